"""A head or MTP module that drafts behind the target's own passes, without a GPU: the same output, and the trees that
the same one grows in a draft service."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from assistants import AloneAssistant
from conftest import make_tiny
from engine_harness import engine_config, plain_each, request, run
from hidden_states import states_of
from in_pass_heads import (
    KINDS,
    VOCABULARY,
    Drafted,
    Heads,
    drafting_runner,
    eagle_heads,
    heads_of,
    module_heads,
    recorded,
)
from mtp_modules import GLM, write
from rerun_graphs import (
    CPU,
    ROWS,
    SEQUENCES,
    ReadBack,
    ReadBackLatents,
    ReadBackRecurrence,
    RerunRunner,
    without_gpu,
)
from structured_forms import SCHEMAS, trained_tokenizer
from structured_forms import VOCABULARY as FORM_VOCABULARY
from torch import nn

from draft_service.drafters.base import DraftSequence
from draft_service.eagle.head_drafter import HeadDrafter
from draft_service.in_pass import InPassHead
from draft_service.neural.cuda_graphs import pass_drafter
from draft_service.neural.cuda_graphs.pass_drafter import PassDrafter
from outrider.drafting.link import prepare_in_pass
from outrider.errors import NotSupported
from outrider.sampling import SamplingParams, VerificationMode
from outrider.settings import SettingsError
from outrider.structured_output import StructuredOutput
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest
from target_service.execution import host_executor
from target_service.execution.device_executor import DeviceSteps, _is_drafted_in_passes
from target_service.model.cuda_graphs.capturing import capture_steps
from target_service.model.cuda_graphs.runner import CaptureOptions
from target_service.preflight import check_settings
from target_service.text.tokenizer import ModelTokenizer
from tree_kernels.device_event import DeviceEvent
from tree_models.fused.preparing import LayerOptions
from tree_models.in_pass import MakeDrafter, PassTarget
from tree_models.layers.decoder import Decoder

__all__ = ["without_gpu"]

PAGE_SIZE, MAX_TOKENS = 4, 14
# Of a level's frontier, with which some trees of the tiny head end early and some do not. By trial.
LEAST_MASS = {"greedy": 0.95, "seeded": 0.98}
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}
# What grows a head's trees for single texts.
Alone = HeadDrafter | AloneAssistant
# As in `Drafted`.
Paths = set[tuple[int, ...]]
CONFIG = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS // 2)
# Of heads, and the target's tokenizer; with the trees that the heads leave in tables.
MakeSteps = Callable[[Heads, ModelTokenizer | None], tuple[RerunRunner, DeviceSteps, list[Drafted]]]


@pytest.fixture
def steps_of(without_gpu: None) -> MakeSteps:
    del without_gpu

    def make(heads: Heads, tokenizer: ModelTokenizer | None) -> tuple[RerunRunner, DeviceSteps, list[Drafted]]:
        sizes = {"num_pages": 96, "page_size": PAGE_SIZE, "end_token_ids": () if tokenizer is None else (2,)}
        runner = drafting_runner(heads, tokenizer=tokenizer, **sizes)
        drafter = runner.in_pass
        assert isinstance(drafter, PassDrafter)
        drafted = recorded(drafter)
        runner.attention = ReadBackLatents() if runner.latent else ReadBack()
        runner.enable_device_row_selection(SEQUENCES, 3)
        options = CaptureOptions(ROWS, SEQUENCES, LayerOptions(compiled=False), hooked=drafter.layers, few_outputs=6)
        captured = RerunRunner(runner, options)
        if captured.cache.recurrent is not None:
            captured._recurrence = ReadBackRecurrence()
        capture_steps(captured, seconds=60.0, memory_share=0.0)
        return captured, DeviceSteps(captured, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch"), drafted

    return make


@pytest.fixture(scope="module", params=KINDS)
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return heads_of(request.param, tmp_path_factory.mktemp("target"))


def wanted(sampling: SamplingParams) -> list[SequenceRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17, 60)]
    return [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in prompts]


@pytest.mark.values
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("passes", [1, 4])
def test_the_output_is_that_without_drafts_and_the_trees_are_the_heads(
    steps_of: MakeSteps, heads: Heads, kind: str, passes: int
) -> None:
    model, sampling = heads.model, SAMPLINGS[kind]
    requests = wanted(sampling)
    expected = plain_each(model, requests)
    runner, steps, drafted = steps_of(heads, None)
    with torch.inference_mode():
        outcomes = run(runner, requests, launch=steps, passes=passes, stagger=2, config=CONFIG)
    assert [outcome.token_ids for outcome in outcomes] == expected
    texts = [(*one.token_ids, *output) for one, output in zip(requests, expected, strict=True)]
    alone = heads.alone(SEQUENCES)
    # Of three behind each other one: the trees of a draft service take most of this test's time.
    compared = [check(tree, texts, heads, alone, sampling) for tree in drafted[passes - 1 :: 3]]
    assert len(compared) > 8 and sum(compared) > 0.5 * len(compared)


@pytest.mark.values
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_levels_that_are_left_out_change_no_token_and_end_trees(
    steps_of: MakeSteps, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where their launches do nothing: here all is computed, and not used."""
    monkeypatch.setattr(pass_drafter, "_LEFT_OUT", (SEQUENCES, 4, 3, LEAST_MASS[kind]))
    monkeypatch.setattr(InPassHead, "leaves_out", property(lambda _: True, lambda *_: None), raising=False)
    heads, sampling = eagle_heads(make_tiny()), SAMPLINGS[kind]
    requests = wanted(sampling)
    expected = plain_each(heads.model, requests)
    runner, steps, drafted = steps_of(heads, None)
    with torch.inference_mode():
        outcomes = run(runner, requests, launch=steps, passes=1, stagger=2, config=CONFIG)
    assert [outcome.token_ids for outcome in outcomes] == expected
    texts = [(*one.token_ids, *output) for one, output in zip(requests, expected, strict=True)]
    alone, depths = heads.alone(SEQUENCES), set[int]()
    for tree in drafted[::3]:
        known = [
            list(text[: tree.base]) for text in texts if len(text) >= tree.base and text[tree.base - 1] == tree.root
        ]
        depth = max(map(len, tree.paths), default=0)
        whole = [grown(text, heads, alone, sampling) for text in known]
        if not any(len(text) < tree.base for text in texts):
            assert any(tree.paths == {path for path in one if len(path) <= depth} for one in whole)
            depths.add(depth)
    # Pages end none so early.
    assert 1 in depths and max(depths) > 1


def check(
    drafted: Drafted,
    texts: list[tuple[int, ...]],
    heads: Heads,
    alone: HeadDrafter | AloneAssistant,
    sampling: SamplingParams,
) -> bool:
    """Whether a tree is whole, and the head's own behind one of the texts. One that is cut by its pages has fewer."""
    known = [list(text[: drafted.base]) for text in texts if len(text) >= drafted.base]
    trees = [grown(text, heads, alone, sampling) for text in known if text[-1] == drafted.root]
    # Behind its end, a sequence goes on until its launch is over.
    ended = any(len(text) < drafted.base for text in texts)
    assert ended or any(drafted.paths <= tree for tree in trees), drafted.base
    return any(drafted.paths == tree for tree in trees)


def grown(text: list[int], heads: Heads, alone: Alone, sampling: SamplingParams) -> Paths:
    """The tree that the head grows in a draft service."""
    mode = VerificationMode.COUPLED if sampling.temperature else VerificationMode.GREEDY
    sequence = DraftSequence(1, text, 1, VOCABULARY, mode=mode, seed=sampling.seed or 0, sampling=sampling)
    alone.open(sequence)
    if isinstance(alone, HeadDrafter):
        sequence.features.append(states_of(heads.model, text[:-1], heads.layers), 0)
    (tree,) = alone.propose([sequence])
    alone.close(sequence)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def test_a_module_has_no_copy_of_its_targets_vocabulary(tmp_path: Path) -> None:
    sizes = {"num_pages": 8, "page_size": PAGE_SIZE, "end_token_ids": ()}
    runner = drafting_runner(module_heads("mimo", tmp_path), tokenizer=None, **sizes)
    network, drafter = runner.network, runner.in_pass
    assert isinstance(network, Decoder) and isinstance(drafter, InPassHead)
    embedding, head, drafted = network.embedding, network.head.plain, drafter._head.lm_head.plain
    assert head is not None and drafted is not None
    assert drafter._head.embedding is embedding and drafted.weight is head.weight
    # Others are not taken for them.
    others = (embedding + 1, embedding.bfloat16(), embedding[:-1])
    drafter._head.share([nn.Parameter(other, requires_grad=False) for other in others])
    assert drafter._head.embedding is embedding and drafted.weight is head.weight


@pytest.mark.parametrize("passes", [1, 4])
def test_the_results_of_a_launch_do_not_wait_for_drafting(
    steps_of: MakeSteps, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host waits for is recorded before the head reads the launch's last pass."""
    order = list[str]()

    class Noted(DeviceEvent):
        def record(self) -> None:
            super().record()
            order.append("results")

    runner, steps, _ = steps_of(eagle_heads(make_tiny()), None)
    drafter = runner.in_pass
    assert isinstance(drafter, InPassHead)
    read, launch = drafter.read, steps.launch
    monkeypatch.setattr(host_executor, "DeviceEvent", Noted)
    monkeypatch.setattr(drafter, "read", lambda *what: (order.append("read"), read(*what)))
    monkeypatch.setattr(steps, "launch", lambda *what: (order.append("launch"), launch(*what))[1])
    with torch.inference_mode():
        run(runner, wanted(SAMPLINGS["greedy"]), launch=steps, passes=passes, stagger=2, config=CONFIG)
    launches = " ".join(order).split("launch ")[1:]
    assert len(launches) > 4 and all(one.split()[-2:] == ["results", "read"] for one in launches), launches
    # Of prompts read alone, of trees, and of several passes at once.
    assert {one.count("read") for one in launches} == {1, passes}


def test_only_what_the_device_chooses_for_gets_trees() -> None:
    usual = request([5, 6, 7], 4)
    assert _is_drafted_in_passes(usual)
    others = (
        replace(usual, speculate=False),
        replace(usual, external=True),
        replace(usual, mode=VerificationMode.REJECTION),
        replace(usual, max_draft_nodes=0),
    )
    assert not any(map(_is_drafted_in_passes, others))


def test_forms_and_predictions_beside_a_head(steps_of: MakeSteps) -> None:
    """What the host expects of a form, and what is predicted, go before the head's trees, which serve where there is
    neither."""
    model, tokenizer = make_tiny(vocab_size=FORM_VOCABULARY, eos_token_id=2), trained_tokenizer()
    runner, steps, drafted = steps_of(eagle_heads(model), tokenizer)
    free = SamplingParams(ignore_eos=True)
    forms = [StructuredOutput(json_schema=json.dumps(SCHEMAS[name])) for name in ("flat", "recursion")]
    shaped = [request((5, 9, 14), 40, sampling=replace(free, ignore_eos=False, structured_output=one)) for one in forms]
    usual = request((7, 11, 90), 40, sampling=free)
    wanted = [*shaped, usual]
    with torch.inference_mode():
        alone = run(runner, [replace(one, speculate=False) for one in wanted], launch=steps, config=CONFIG)
        assert not drafted
        predicted = replace(usual, prediction=alone[-1].token_ids)
        outcomes = run(runner, [*wanted, predicted], launch=steps, stagger=1, config=CONFIG)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in (*alone, alone[-1])]
    # The forms' own text, and the prediction, were taken.
    steps_of_forms = [sum(one.finished.totals.steps for one in each[:2]) for each in (outcomes, alone)]
    assert steps_of_forms[0] < 0.9 * steps_of_forms[1]
    assert outcomes[-1].finished.totals.steps < 0.5 * alone[-1].finished.totals.steps
    assert len(drafted) > 20


@pytest.mark.parametrize("named", ["trie", "medusa", "merged --merged-drafters trie,prompt_lookup"])
def test_a_drafter_that_does_not_run_in_passes(named: str) -> None:
    with pytest.raises(SettingsError, match="does not run in the target's passes"):
        prepare_in_pass(f"inpass:{named}", "")


def test_modules_that_do_not_run_in_passes(tmp_path: Path) -> None:
    module_heads("glm4_moe", tmp_path / "whole")
    bare = write(tmp_path / "bare", GLM, {"model.embed_tokens.weight": torch.zeros(60, 16)})
    for flags, model, problem in (
        ("--num-modules 2", "whole", "num_modules 2: one drafts in the target's passes"),
        ("", "bare", "no MTP module"),
        (f"--base-model {bare}", "whole", "no MTP module"),
    ):
        with pytest.raises(SettingsError, match=problem):
            prepare_in_pass(f"inpass:mtp {flags}", str(tmp_path / model))


def test_a_head_of_another_target() -> None:
    make: MakeDrafter = prepare_in_pass("inpass:merged --head smollm2-135m-instruct", "smollm2-135m-instruct")
    usual = PassTarget(30, 30, False, 576, 49152, "", CPU, torch.float32)
    for other, problem in (
        (usual._replace(vocabulary_size=32000), "49152 tokens, this one 32000"),
        (usual._replace(hidden_size=4096), "576 wide, the target's are 4096"),
        (usual._replace(tokenizer_fingerprint="another"), "another tokenizer"),
    ):
        with pytest.raises(NotSupported, match=problem):
            make(other)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"device": "cpu"}, "needs captured steps on a GPU"),
        ({"attention": "flashinfer"}, "needs captured steps on a GPU"),
        ({"batch_invariant": True}, "not with --batch-invariant"),
        ({"draft_head": "some/head"}, "not with --draft-head"),
    ],
)
def test_settings_of_passes_that_cannot_draft(changes: dict[str, Any], problem: str) -> None:
    usual: dict[str, Any] = {"device": "cuda:0", "draft": "inpass:eagle", "listen": "127.0.0.1:0"}
    with pytest.raises(SettingsError, match=problem):
        check_settings(TargetConfig(**(usual | changes)))
    with pytest.raises(SettingsError, match="names no drafter"):
        check_settings(TargetConfig(**(usual | {"draft": "inpass: "})))
