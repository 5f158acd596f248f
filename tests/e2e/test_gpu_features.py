"""Hidden states that captured steps keep on a GPU, against those of transformers' own forward pass on the CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from conftest import make_tiny
from engine_harness import engine_config, knowing_tree, make_runner, plain_each, request, run
from feature_link import FeatureLink
from hidden_states import states_of

from outrider.drafting.events import DraftEvents
from outrider.errors import NotSupported
from outrider.tree import TokenTree
from outrider.wire.frames import DraftLink, FeatureRequest
from target_service.execution.device_executor import DeviceSteps
from target_service.model.head_projection import DraftHead, HeadProjection
from target_service.model.hidden_state_hooks import LayerHooks
from target_service.speculation.hidden_states.encoding import FeatureEncoder, encode
from target_service.speculation.hidden_states.sending import Features
from target_service.speculation.policy.step_cost import StepCost

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
VOCABULARY = 211
ROWS, SEQUENCES = 256, 16
# The output of the first layer, and the state after the last norm.
STATES = FeatureRequest((0, 2), 96, "float32")


def root_only(tokens: Sequence[int], _: random.Random) -> TokenTree:
    return TokenTree.root_only(tokens[-1])


@pytest.mark.parametrize("drafted", [True, False], ids=["trees", "steps ahead"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "as they are"])
def test_captured_steps_keep_every_committed_tokens_state(drafted: bool, compiled: bool) -> None:
    from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
    from tree_models.fused.preparing import LayerOptions

    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 5, 17, 40, 90)]
    wanted = [request(prompt, 24) for prompt in prompts]
    teacher = make_tiny()
    said = plain_each(teacher, wanted)
    propose = knowing_tree([[*one.token_ids, *out] for one, out in zip(wanted, said, strict=True)], VOCABULARY, 40, 0.8)
    options = CaptureOptions(ROWS, SEQUENCES, layers=LayerOptions(compiled=compiled), hooked=STATES.layers)
    plain_runner = make_runner(make_tiny().cuda(), attention="triton")
    plain_runner.draft_head = DraftHead(STATES.layers, None)
    taken = CapturedRunner(plain_runner, options)
    links: list[FeatureLink] = []

    def connect(events: DraftEvents) -> DraftLink:
        links.append(FeatureLink(events, propose if drafted else root_only, wanted=STATES))
        return links[-1]

    outcomes = run(
        taken,
        wanted,
        connect=connect,
        config=engine_config(prefill_chunk=16),
        step_cost=None if drafted else StepCost([(1, 1.0), (64, 1.1)]),
        launch=DeviceSteps(taken, max_sequences=SEQUENCES, max_rows=ROWS),
        stagger=2,
    )
    assert not drafted or sum(one.finished.totals.accepted_tokens for one in outcomes) > 20
    (link,) = links
    assert link.steps_without == 0 and len(link.got) == len(wanted)
    for sequence_id in link.got:
        tokens = link.tokens[sequence_id]
        expected = states_of(teacher, tokens[:-1], STATES.layers)
        torch.testing.assert_close(link.stacked(sequence_id), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("fixed", [True, False], ids=["by graphs", "by single launches"])
def test_rows_encoded_behind_a_pass_are_those_encoded_when_wanted(dtype: str, projected: bool, fixed: bool) -> None:
    hooks = LayerHooks(make_runner(make_tiny().cuda(), attention="triton").network, STATES.layers, 512, grows=not fixed)
    encoder = FeatureEncoder(torch.device("cuda"))
    weights = {"fc.weight": torch.randn(96, 96) / 10}
    projection = HeadProjection(weights, 2, 1e-6).to(device="cuda") if projected else None
    # The second and third of a size are replayed, and 300 rows are more than graphs are captured for.
    for rows in (1, 7, 16, 256, 300, 64, 7):
        hooks._states.normal_()
        wanted = encode(hooks._states[:rows].clone(), dtype, projection).cpu()
        features = encoder.encode_after_launch(hooks, rows, dtype, projection)
        assert features is not None
        # As the next pass would.
        hooks._states.zero_()
        picked = sorted(random.Random(rows).sample(range(rows), min(rows, 5)))
        encoded, places = features.of_rows([range(row, row + 1) for row in picked])
        sent = torch.from_numpy(encoded[[row for place in places for row in place]])
        if dtype == "float8_e4m3":
            # Scales may differ in their last bit with the kernel, and elements by a step with them.
            both = sent, wanted[picked]
            got, expected = (one[:, :-4].view(torch.float8_e4m3fn).float() for one in both)
            torch.testing.assert_close(got, expected, rtol=0.13, atol=0.02)
        else:
            both = sent, wanted
            got, expected = (one.view(getattr(torch, dtype)) for one in both)
            torch.testing.assert_close(got, expected[picked], rtol=1e-2, atol=1e-2)


def test_what_graphs_keep_is_chosen_before_they_are_captured() -> None:
    from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions

    taken = CapturedRunner(make_runner(make_tiny().cuda(), attention="triton"), CaptureOptions(ROWS, SEQUENCES))
    with pytest.raises(NotSupported, match="--draft-head"):
        Features(taken, 0).connect(STATES)
