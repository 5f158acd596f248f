"""Gemma 4 with its assistant, which drafts on the host between steps, says what plain decoding says (fp32)."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from assistants import TARGETS, assisted_runner, make_assistant, teach
from conftest import make_tiny
from engine_harness import Outcome, engine_config, plain_each, request, run
from scripted_service import byte_tokenizer
from transformers import PreTrainedModel
from waits import HUNG_SECONDS
from windowed_models import GREEDY, MAX_TOKENS, SEEDED, WINDOWED, windowed_model, windowed_requests

from outrider.sampling import SamplingParams, VerificationMode
from target_service.assembly import assemble, load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceEvent, SequenceFinished, StepVerdict
from target_service.preflight import check_settings, prepared_draft

pytestmark = pytest.mark.values

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
FLAGS = "--num-steps 4 --topk 3 --num-draft-tokens 12 --min-score 0 --gumbel-candidates 211"


def accepted(outcomes: list[Outcome]) -> int:
    return sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)


@cache
def target_of(name: str) -> PreTrainedModel:
    return windowed_model(name)


@pytest.fixture(scope="module", params=TARGETS)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A target, and an assistant that knows its greedy answers."""
    target, folder = target_of(request.param), tmp_path_factory.mktemp("assistant")
    wanted = windowed_requests(GREEDY)
    texts = [(*one.token_ids, *said) for one, said in zip(wanted, plain_each(target, wanted), strict=True)]
    teach(make_assistant(target, folder), target, texts, 5, folder)
    return target, folder


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_output_is_that_without_drafts(
    taught: tuple[PreTrainedModel, Path], sampling: SamplingParams, page_size: int
) -> None:
    """Prompts in parts, sequences that join others, and frames for windows."""
    target, folder = taught
    wanted = windowed_requests(sampling)
    runner = assisted_runner(target, folder, FLAGS, page_size=page_size, num_pages=1024 // page_size)
    outcomes = run(runner, wanted, config=engine_config(prefill_chunk=7), stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == plain_each(target, wanted)
    # It was taught one token a step: of 42 half.
    assert accepted(outcomes) > (12 if sampling is GREEDY else 2)


def test_preempted_sequences_and_shared_prefixes(taught: tuple[PreTrainedModel, Path]) -> None:
    """Answers stay the same where keys are dropped and computed again, and where others have computed them."""
    target, folder = taught
    wanted = windowed_requests(GREEDY)
    expected = plain_each(target, wanted)
    scarce = assisted_runner(target, folder, FLAGS, page_size=4, num_pages=16)
    outcomes = run(scarce, [*wanted, *wanted], stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == [*expected, *expected]
    assert sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0 and accepted(outcomes) > 24
    shared = assisted_runner(target, folder, FLAGS, page_size=4, num_pages=96)
    outcomes = run(shared, [*wanted, *wanted], stagger=24)
    assert [outcome.token_ids for outcome in outcomes] == [*expected, *expected]
    assert outcomes[-1].finished.totals.cached_tokens > 0 and accepted(outcomes) > 24


def test_rejection_draws_from_its_distributions(taught: tuple[PreTrainedModel, Path]) -> None:
    """Drafts with distributions are verified, and the same seed makes the same answer."""
    target, folder = taught
    wanted = [
        request(one.token_ids, 14, sampling=SEEDED, mode=VerificationMode.REJECTION)
        for one in windowed_requests(SEEDED)
    ]
    made = [run(assisted_runner(target, folder, FLAGS), wanted) for _ in range(2)]
    assert [one.token_ids for one in made[0]] == [one.token_ids for one in made[1]]
    assert accepted(made[0]) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_of_sixteen_bits(taught: tuple[PreTrainedModel, Path], dtype: str) -> None:
    """Drafts are accepted; equality is that of fp32."""
    target, folder = taught
    runner = assisted_runner(copy.deepcopy(target).to(getattr(torch, dtype)), folder, FLAGS)
    outcomes = run(runner, windowed_requests(GREEDY))
    assert [len(outcome.token_ids) for outcome in outcomes] == [MAX_TOKENS] * 3
    assert accepted(outcomes) > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_target_with_its_assistant_by_their_folders(tmp_path: Path, page_size: int) -> None:
    """As `outrider target --draft 'inpass:assistant --head FOLDER'` loads and runs them on a CPU."""
    model_type, settings = WINDOWED["gemma4"]
    model = make_tiny(model_type, **settings | {"vocab_size": 300, "vocab_size_per_layer_input": 300})
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    wanted = [request(range(5, 5 + length), 14) for length in (4, 21)]
    expected = plain_each(model, wanted)
    texts = [(*one.token_ids, *said) for one, said in zip(wanted, expected, strict=True)]
    teach(make_assistant(model, tmp_path / "head"), model, texts, 4, tmp_path / "head")
    config = TargetConfig(
        model=str(tmp_path / "model"), draft=f"inpass:assistant --head {tmp_path / 'head'} {FLAGS}", dtype="float32",
        kv_tokens=512, page_size=page_size, listen=f"unix:{tmp_path / 'target'}", row_budget="all",
    )  # fmt: skip
    check_settings(config)
    assert prepared_draft(config) is None
    assembled = assemble(config, load_model(config), None)
    said: dict[int, list[int]] = {}
    finished: SimpleQueue[SequenceFinished] = SimpleQueue()

    def deliver(events: list[SequenceEvent]) -> None:
        for event in events:
            if isinstance(event, SequenceFinished):
                finished.put(event)
            elif isinstance(event, StepVerdict):
                said.setdefault(event.sequence_id, []).extend(event.token_ids)

    assembled.engine.start(deliver)
    try:
        for number, one in enumerate(wanted, start=1):
            assembled.engine.submit(one, number)
        totals = [finished.get(timeout=HUNG_SECONDS).totals for _ in wanted]
        assert assembled.engine.draft_info is not None and assembled.engine.draft_info.drafter == "assistant"
    finally:
        assembled.stop()
    assert [tuple(said[number]) for number in (1, 2)] == expected
    assert sum(each.accepted_tokens for each in totals) > 8
