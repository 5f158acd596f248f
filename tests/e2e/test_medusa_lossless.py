"""With Medusa heads that were trained for a moment, the output is plain decoding's, and drafts are accepted.

The target sends the hidden states: what it sends and what the heads were taught on are computed apart.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_tiny
from draft_process import Service
from engine_harness import Connect, engine_config, make_runner, plain, run
from medusa_heads import make_heads, taught_heads
from taught_heads import HIDDEN, LAYERS, SAMPLINGS, VOCABULARY, prompts, request_of
from transformers import PreTrainedModel

from draft_service import in_process as inprocess
from draft_service.in_process import InprocessLink
from draft_service.medusa.checkpoint import save_heads
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from draft_service.medusa.head import MedusaHead
from outrider.drafting.link import GrpcDraftLink, LinkOptions
from outrider.sampling import SamplingParams
from outrider.wire.frames import DraftEvents, DraftLink
from target_service.core.sequence import Verdict
from target_service.engine.loop import EngineLoop

TOKENS = 24


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    model = make_tiny()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def heads(teacher: PreTrainedModel) -> MedusaHead:
    return taught_heads(teacher, TOKENS)


@pytest.fixture(scope="module")
def folder(heads: MedusaHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heads(heads, tmp_path_factory.mktemp("heads"))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    if service.process is not None:
        service.end(signal.SIGKILL)


def drafting(heads: MedusaHead, drafters: list[MedusaDrafter], **settings: object) -> Connect:
    """How to connect to a drafter in this process; every one that was made so is added to `drafters`."""

    def connect(events: DraftEvents) -> DraftLink:
        defaults: dict[str, object] = {"dtype": "float32", "race_sharpness": 2.0}
        drafters.append(MedusaDrafter(MedusaConfig(**(defaults | settings)), heads))  # type: ignore[arg-type]
        drafters[-1].start()
        return InprocessLink(drafters[-1], events)

    return connect


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    "settings", [{"topk": 1}, {"topk": 4}, {"tree": "mc_sim_7b_63"}], ids=["chain", "tree", "fixed"]
)
def test_output_is_plain_decoding(
    heads: MedusaHead,
    teacher: PreTrainedModel,
    tiny_model: PreTrainedModel,
    sampling: SamplingParams,
    settings: dict[str, object],
) -> None:
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    said = [plain(teacher, one) for one in wanted]
    drafters: list[MedusaDrafter] = []
    outcomes = run(make_runner(tiny_model), wanted, connect=drafting(heads, drafters, **settings), stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == said
    # Of 96 tokens. With states of other positions nothing that was taught is found again.
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 48
    # Nothing but the answer to an open, which comes before the prompt's features.
    assert drafters[0].stats()["medusa_missing_features_total"] == len(wanted)


@pytest.mark.parametrize("kv_tokens", [2048, 120], ids=["roomy", "preempting"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float8_e4m3"])
def test_chunks_preemption_and_short_types_do_not_matter(
    heads: MedusaHead, teacher: PreTrainedModel, tiny_model: PreTrainedModel, kv_tokens: int, feature_dtype: str
) -> None:
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    said = [plain(teacher, one) for one in wanted]
    runner = make_runner(tiny_model, page_size=4, kv_tokens=kv_tokens)
    connect = drafting(heads, [], feature_dtype=feature_dtype)
    outcomes = run(runner, [*wanted, *wanted], connect=connect, config=engine_config(prefill_chunk=3))
    assert [outcome.token_ids for outcome in outcomes] == [*said, *said]
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 80
    assert (sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0) is (kv_tokens < 2048)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_heads_that_know_nothing_do_not_matter(
    teacher: PreTrainedModel, tiny_model: PreTrainedModel, sampling: SamplingParams
) -> None:
    untaught = make_heads(
        target_hidden_size=HIDDEN, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, target_layers=LAYERS
    )
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    outcomes = run(make_runner(tiny_model), wanted, connect=drafting(untaught, []), stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == [plain(teacher, one) for one in wanted]
    assert sum(outcome.finished.totals.drafted_tokens for outcome in outcomes) > 0


def test_trie_and_heads_draft_for_the_same_sequences(
    folder: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_MERGED_MERGED_DRAFTERS", "medusa,trie")
    monkeypatch.setenv("OUTRIDER_MEDUSA_HEAD", str(folder))
    monkeypatch.setenv("OUTRIDER_MEDUSA_DTYPE", "float32")
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    said = [plain(teacher, one) for one in wanted]
    runner = make_runner(tiny_model)
    links: list[InprocessLink] = []

    def connect(events: DraftEvents) -> DraftLink:
        links.append(inprocess.connect("merged", events, runner.vocabulary_size, ""))
        return links[-1]

    # The second time the trie knows what was said the first time.
    outcomes = run(runner, [*wanted, *wanted], connect=connect, stagger=4)
    assert [outcome.token_ids for outcome in outcomes] == [*said, *said]
    first, second = (
        sum(outcome.finished.totals.accepted_tokens for outcome in half) for half in (outcomes[:4], outcomes[4:])
    )
    assert 40 < first < second
    assert links[0]._drafter.stats()["medusa_feature_rows_total"] > 0
    links[0].stop()


@pytest.mark.parametrize("drafter", [("medusa",), ("merged", "--merged-drafters", "medusa,trie")], ids=lambda d: d[0])
def test_over_the_wire_one_vector_travels_for_each_step(
    drafter: tuple[str, ...], folder: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, service: Service
) -> None:
    base = engine_config(prefill_chunk=16)
    # The tests' machine may be busy, and what counts here is what drafts say, not when.
    config = replace(base, drafting=replace(base.drafting, wait_seconds=5.0))
    loop = EngineLoop(make_runner(tiny_model), config)
    link = GrpcDraftLink(service.address, loop.drafting, VOCABULARY, "", LinkOptions(connect_timeout=0.5))
    loop.drafting.attach(link)
    service.start("--drafter", *drafter, "--head", str(folder), "--dtype", "float32")
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    said: dict[int, list[int]] = {number: [] for number in range(1, len(wanted) + 1)}
    accepted = ended = steps = 0
    try:
        deadline = time.monotonic() + 60
        while not loop.drafting.connected:
            assert time.monotonic() < deadline, "no draft service came up"
            time.sleep(0.01)
            loop.drafting.listen()
        for number, one in enumerate(wanted, start=1):
            loop.add(loop.make(number, one))
        while ended < len(wanted):
            for event in loop.step() or ():
                if isinstance(event, Verdict):
                    said[event.sequence_id] += event.token_ids
                    accepted += event.drafted_tokens
                    steps += 1
                else:
                    ended += 1
    finally:
        link.stop()
    assert [tuple(one) for one in said.values()] == [plain(teacher, one) for one in wanted]
    assert accepted > 40
    # bfloat16, and of a prompt no more than its end.
    assert loop.features.sent_bytes == 2 * HIDDEN * loop.features.sent_vectors
    assert loop.features.sent_vectors <= steps + len(wanted)
