"""Predictions that are grown into the device's tables change no token, and save passes where they are right (fp32)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_harness import (
    DEVICE_SEQUENCES,
    Outcome,
    knowing_tree,
    make_runner,
    plain,
    plain_each,
    random_tree,
    request,
    run,
)
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams, VerificationMode
from target_service.core.sequence import SequenceRequest

pytestmark = pytest.mark.values

VOCABULARY = 211
TOKENS = 64
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True),
}


def asked(sampling: SamplingParams) -> SequenceRequest:
    rng = random.Random(3)
    return request([rng.randrange(3, VOCABULARY) for _ in range(19)], TOKENS, sampling=sampling)


def noise(count: int) -> list[int]:
    rng = random.Random(8)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def predictions(said: Sequence[int]) -> dict[str, list[int]]:
    # Exchanged at 7, put in before 20, left out from 31 on and exchanged again.
    before = [*said[:7], 3, *said[8:20], 5, 6, *said[20:31], *said[35:50], *noise(2), *said[52:]]
    return {
        "right": list(said),
        "wrong": noise(TOKENS),
        "shifted": [*noise(9), *said],
        "edited": before,
        "longer": [*said, *noise(300)],
        "none": [],
    }


def answer(
    model: PreTrainedModel, wanted: Sequence[SequenceRequest], *, lookup: int = 1, passes: int = 1, draft: str = ""
) -> list[Outcome]:
    known = wanted if draft == "knowing" else []
    whole = [(*one.token_ids, *said) for one, said in zip(known, plain_each(model, known), strict=True)]
    runner = make_runner(model, kv_tokens=4096)
    runner.enable_device_row_selection(DEVICE_SEQUENCES, lookup)
    proposals = {"random": random_tree(VOCABULARY, 24), "knowing": knowing_tree(whole, VOCABULARY, 24, right=0.8)}
    return run(runner, wanted, on_device=True, passes=passes, propose=proposals.get(draft), stagger=2)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("draft", ["", "random", "knowing"])
def test_what_is_said_is_plain_decodings(
    tiny_model: PreTrainedModel, sampling: SamplingParams, passes: int, draft: str
) -> None:
    one = asked(sampling)
    said = plain(tiny_model, one)
    wanted = [replace(one, prediction=tuple(each)) for each in predictions(said).values()]
    outcomes = answer(tiny_model, wanted, passes=passes, draft=draft)
    assert [outcome.token_ids for outcome in outcomes] == [said] * len(wanted)
    for outcome, each in zip(outcomes, wanted, strict=True):
        totals = outcome.finished.totals
        assert totals.accepted_predicted_tokens <= min(totals.predicted_tokens, totals.accepted_tokens)
        assert totals.predicted_tokens <= totals.drafted_tokens
        assert each.prediction or not totals.predicted_tokens


def test_right_ones_save_passes_and_wrong_ones_are_given_up(tiny_model: PreTrainedModel) -> None:
    one = asked(SAMPLINGS["seeded"])
    said = plain(tiny_model, one)
    totals = {}
    for kind, prediction in predictions(said).items():
        outcome = answer(tiny_model, [replace(one, prediction=tuple(prediction))])[0]
        assert outcome.token_ids == said
        totals[kind] = outcome.finished.totals
    assert totals["right"].steps <= 8 and totals["longer"].steps <= 8
    assert totals["edited"].steps <= TOKENS / 2 and totals["edited"].accepted_predicted_tokens > TOKENS / 3
    assert totals["wrong"].steps >= TOKENS - totals["none"].accepted_tokens - 6
    assert totals["none"].predicted_tokens == 0


def test_rejection_is_cut_by_the_host_beside_the_devices_rows(tiny_model: PreTrainedModel) -> None:
    """At top_k 1 the distribution has one token."""
    greedy = asked(SAMPLINGS["greedy"])
    said = plain(tiny_model, greedy)
    certain = SamplingParams(temperature=0.7, top_k=1, seed=4, ignore_eos=True)
    rejection = replace(greedy, sampling=certain, mode=VerificationMode.REJECTION, seed=4, prediction=said)
    outcomes = answer(tiny_model, [rejection, replace(greedy, prediction=said)])
    assert [outcome.token_ids for outcome in outcomes] == [said, said]
    assert all(outcome.finished.totals.steps < TOKENS / 2 for outcome in outcomes)
