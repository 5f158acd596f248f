"""With Medusa heads that were trained for a moment, the output is plain decoding's, and drafts are accepted.

The target sends the hidden states: what it sends and what the heads were taught on are computed apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_process import Service
from engine_harness import Connect, make_runner, plain_each, run
from head_runs import (
    WireRun,
    accepted_in,
    check_chunks_and_preemption,
    check_ignorance,
    check_merged_with_trie,
    drafting,
    wire_loop,
)
from medusa_heads import make_heads, taught_heads
from taught_heads import HIDDEN, LAYERS, SAMPLINGS, VOCABULARY, prompts, request_of
from transformers import PreTrainedModel

from draft_service.medusa.checkpoint import save_heads
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from draft_service.medusa.head import MedusaHead
from outrider.sampling import SamplingParams

pytestmark = pytest.mark.values

TOKENS = 24


@pytest.fixture(scope="module")
def heads(teacher: PreTrainedModel) -> MedusaHead:
    return taught_heads(teacher, TOKENS)


@pytest.fixture(scope="module")
def folder(heads: MedusaHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heads(heads, tmp_path_factory.mktemp("heads"))


def made(heads: MedusaHead, drafters: list[MedusaDrafter] | None = None, **settings: object) -> Connect:
    defaults: dict[str, object] = {"dtype": "float32", "gumbel_sharpness": 2.0}
    config = MedusaConfig(**(defaults | settings))  # type: ignore[arg-type]
    return drafting(lambda: MedusaDrafter(config, heads), [] if drafters is None else drafters)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("settings", [{"topk": 1}, {"topk": 4}], ids=["chain", "tree"])
def test_output_is_plain_decoding(
    heads: MedusaHead,
    teacher: PreTrainedModel,
    tiny_model: PreTrainedModel,
    sampling: SamplingParams,
    settings: dict[str, object],
) -> None:
    wanted = [request_of(prompt, sampling) for prompt in prompts()]
    said = plain_each(teacher, wanted)
    drafters: list[MedusaDrafter] = []
    outcomes = run(make_runner(tiny_model), wanted, connect=made(heads, drafters, **settings), stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == said
    # Of 96 tokens. With states of other positions nothing that was taught is found again.
    assert accepted_in(outcomes) > 48
    # Nothing but the answer to an open, which comes before the prompt's features.
    assert drafters[0].stats()["medusa_missing_features_total"] == len(wanted)


@pytest.mark.parametrize("kv_tokens", [2048, 120], ids=["roomy", "preempting"])
@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float8_e4m3"])
def test_chunks_preemption_and_short_types_do_not_matter(
    heads: MedusaHead, teacher: PreTrainedModel, tiny_model: PreTrainedModel, kv_tokens: int, feature_dtype: str
) -> None:
    check_chunks_and_preemption(teacher, tiny_model, made(heads, feature_dtype=feature_dtype), kv_tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_heads_that_know_nothing_do_not_matter(
    teacher: PreTrainedModel, tiny_model: PreTrainedModel, sampling: str
) -> None:
    sizes = {"vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY, "target_hidden_size": HIDDEN}
    check_ignorance(teacher, tiny_model, made(make_heads(**sizes, target_layers=LAYERS)), sampling)


def test_trie_and_heads_draft_for_the_same_sequences(
    folder: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_MERGED_MERGED_DRAFTERS", "medusa,trie")
    monkeypatch.setenv("OUTRIDER_MEDUSA_HEAD", str(folder))
    monkeypatch.setenv("OUTRIDER_MEDUSA_DTYPE", "float32")
    assert check_merged_with_trie(teacher, make_runner(tiny_model), least=40)["medusa_feature_rows_total"] > 0


@pytest.mark.parametrize("drafter", [("medusa",), ("merged", "--merged-drafters", "medusa,trie")], ids=lambda d: d[0])
def test_over_the_wire_one_vector_travels_for_each_step(
    drafter: tuple[str, ...], folder: Path, teacher: PreTrainedModel, tiny_model: PreTrainedModel, service: Service
) -> None:
    loop, link = wire_loop(make_runner(tiny_model), service)
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    going = WireRun(loop, service, ("--drafter", *drafter, "--head", str(folder), "--dtype", "float32"))
    try:
        going.begin()
        going.add(wanted)
        going.steps()
    finally:
        link.stop()
    assert [tuple(said) for said in going.said.values()] == plain_each(teacher, wanted)
    assert going.accepted > 40
    # bfloat16, and of a prompt no more than its end.
    assert loop.features.sent_bytes == 2 * HIDDEN * loop.features.sent_vectors
