"""With an EAGLE head that was trained for a moment, the output is plain decoding's, and drafts are accepted.

The target sends the hidden states: what it sends and what the head was taught on are computed apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import make_tiny
from engine_harness import Connect, engine_config, make_runner, plain, run
from taught_heads import HIDDEN, KINDS, LAYERS, SAMPLINGS, new_head, prompts, request_of, taught_head
from transformers import PreTrainedModel

from draft_service import in_process as inprocess
from draft_service.eagle.checkpoint import save_head
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from draft_service.in_process import InprocessLink
from outrider.sampling import SamplingParams
from outrider.wire.frames import DraftEvents, DraftLink
from target_service.model.head_projection import read_draft_head


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    model = make_tiny()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, teacher: PreTrainedModel) -> EagleHead:
    return taught_head(teacher, request.param)


@pytest.fixture(scope="module")
def folder(head: EagleHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(head, tmp_path_factory.mktemp("head"), embedding=True)


@contextmanager
def drafting(head: EagleHead, **settings: object) -> Iterator[tuple[Connect, list[EagleDrafter]]]:
    """How to connect to a drafter in this process, and every one that was made so."""
    drafters: list[EagleDrafter] = []

    def connect(events: DraftEvents) -> DraftLink:
        defaults: dict[str, object] = {"num_steps": 4, "dtype": "float32", "race_sharpness": 2.0}
        drafters.append(EagleDrafter(EagleConfig(**(defaults | settings)), head))  # type: ignore[arg-type]
        drafters[-1].start()
        return InprocessLink(drafters[-1], events)

    yield connect, drafters


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("topk", [1, 4], ids=["chain", "tree"])
@pytest.mark.parametrize("projection", ["draft", "target"])
def test_output_is_plain_decoding(
    head: EagleHead,
    folder: Path,
    teacher: PreTrainedModel,
    tiny_model: PreTrainedModel,
    sampling: SamplingParams,
    topk: int,
    projection: str,
) -> None:
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    said = [plain(teacher, one) for one in wanted]
    runner = make_runner(tiny_model)
    if projection == "target":
        runner.draft_head = read_draft_head(str(folder), LAYERS, HIDDEN)
    with drafting(head, topk=topk, projection=projection) as (connect, drafters):
        outcomes = run(runner, wanted, connect=connect, stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == said
    accepted = sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)
    # Of 96 tokens. With features of other positions, EAGLE-1 falls below this.
    assert accepted > 56
    stats = drafters[0].stats()
    assert stats["eagle_cache_used_tokens"] == 0
    # Nothing but the answer to an open, which comes before the prompt's features.
    assert stats["eagle_missing_features_total"] == len(wanted)


@pytest.mark.parametrize("prefill_chunk", [3, 16])
@pytest.mark.parametrize("kv_tokens", [2048, 120], ids=["roomy", "preempting"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float8_e4m3"])
def test_chunks_preemption_and_short_types_do_not_matter(
    head: EagleHead,
    teacher: PreTrainedModel,
    tiny_model: PreTrainedModel,
    prefill_chunk: int,
    kv_tokens: int,
    feature_dtype: str,
) -> None:
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    said = [plain(teacher, one) for one in wanted]
    config = engine_config(prefill_chunk=prefill_chunk)
    runner = make_runner(tiny_model, page_size=4, kv_tokens=kv_tokens)
    with drafting(head, projection="draft", feature_dtype=feature_dtype) as (connect, drafters):
        outcomes = run(runner, [*wanted, *wanted], connect=connect, config=config)
    assert [outcome.token_ids for outcome in outcomes] == [*said, *said]
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 80
    assert (sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0) is (kv_tokens < 2048)
    assert drafters[0].stats()["eagle_missing_features_total"] == 2 * len(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_head_that_knows_nothing_does_not_matter(
    kind: str, teacher: PreTrainedModel, tiny_model: PreTrainedModel, sampling: SamplingParams
) -> None:
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    with drafting(new_head(teacher, kind).requires_grad_(False).eval(), projection="draft") as (connect, _):
        outcomes = run(make_runner(tiny_model), wanted, connect=connect, stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == [plain(teacher, one) for one in wanted]
    assert sum(outcome.finished.totals.drafted_tokens for outcome in outcomes) > 0


def test_trie_and_head_draft_for_the_same_sequences(
    tmp_path: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_head(taught_head(teacher, "eagle-3.1"), tmp_path, embedding=True)
    monkeypatch.setenv("OUTRIDER_EAGLE_HEAD", str(folder))
    monkeypatch.setenv("OUTRIDER_EAGLE_DTYPE", "float32")
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    said = [plain(teacher, one) for one in wanted]
    runner = make_runner(tiny_model)
    runner.draft_head = read_draft_head(str(folder), LAYERS, HIDDEN)
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
    assert 50 < first < second
    stats = links[0]._drafter.stats()
    assert stats["eagle_feature_rows_total"] > 0 and stats["eagle_cache_used_tokens"] == 0
    links[0].stop()
