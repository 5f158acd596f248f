"""Typical acceptance in the whole engine: longer paths, marked totals, and neighbours that stay lossless."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_harness import (
    DEVICE_SEQUENCES,
    Outcome,
    Propose,
    ScriptedDraft,
    grow,
    make_runner,
    plain,
    plain_each,
    request,
    run,
)
from once import once
from transformers import PreTrainedModel

from outrider.drafting.events import DraftEvents
from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import DraftLink, OpenSequence
from target_service.core.sequence import SequenceRequest

VOCABULARY = 211
SAMPLING = SamplingParams(temperature=0.8, seed=99, ignore_eos=True)
# A random model is sure of nothing: what it takes for typical has to be little.
LOOSE = TypicalAcceptance(0.09, 0.9)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 5, 16, 17, 40)]


def typical(sampling: SamplingParams = SAMPLING, max_tokens: int = 24) -> list[SequenceRequest]:
    mode = VerificationMode.TYPICAL
    return [request(prompt, max_tokens, sampling=sampling, mode=mode, typical=LOOSE) for prompt in prompts()]


@once
def own_model(model: PreTrainedModel) -> PreTrainedModel:
    """A copy: the oracle sets another attention than the engine's. One for all tests, most of whose texts are the
    same."""
    return copy.deepcopy(model)


def greedy_drafts(model: PreTrainedModel) -> Propose:
    """Trees along the greedy continuation of what was said, with random siblings."""
    own = own_model(model)

    def propose(tokens: Sequence[int], rng: random.Random) -> TokenTree:
        # Of one token: each takes a pass of the oracle's model, for every sequence in every step.
        ahead = plain(own, request(tokens, 1))

        def pick(path: Sequence[int]) -> int:
            return ahead[len(path)] if len(path) < len(ahead) else rng.randrange(VOCABULARY)

        return grow(tokens[-1], rng, 8, pick)

    return propose


def departures(model: PreTrainedModel, wanted: SequenceRequest, outcome: Outcome) -> int:
    """Tokens of an answer that the model would not have drawn after those before them, by the request's seed."""
    coupled, prompt = replace(wanted, mode=VerificationMode.COUPLED, max_tokens=1), wanted.token_ids
    begun = [replace(coupled, token_ids=(*prompt, *outcome.token_ids[:place])) for place in range(24)]
    own = plain_each(model, begun)
    return sum(one != other for (one,), other in zip(own, outcome.token_ids, strict=True))


@pytest.mark.parametrize("verified_by", ["host", "device", "device that chooses rows", "device, several passes"])
def test_more_is_kept_than_the_model_would_draw(tiny_model: PreTrainedModel, verified_by: str) -> None:
    wanted, runner = typical(), make_runner(tiny_model)
    on_device, chooses = verified_by != "host", verified_by.startswith("device ") or "passes" in verified_by
    if chooses:
        runner.enable_device_row_selection(DEVICE_SEQUENCES)
    passes = 3 if "passes" in verified_by else 1
    outcomes = run(runner, wanted, propose=greedy_drafts(tiny_model), on_device=on_device, passes=passes)
    for one, outcome in zip(wanted, outcomes, strict=True):
        assert outcome.finished.totals.lossy_tokens == departures(tiny_model, one, outcome)
        # In such passes the rows come from tables, and no verdict has rows of its own.
        assert chooses != any(verdict.accepted_rows for verdict in outcome.verdicts)
        assert outcome.token_ids[0] == plain(tiny_model, replace(one, mode=VerificationMode.COUPLED, max_tokens=1))[0]
    assert sum(outcome.finished.totals.lossy_tokens for outcome in outcomes) > 10


def test_without_drafts_it_is_plain_sampling(tiny_model: PreTrainedModel) -> None:
    wanted = typical()
    for one, outcome in zip(wanted, run(make_runner(tiny_model), wanted), strict=True):
        assert outcome.token_ids == plain(tiny_model, replace(one, mode=VerificationMode.COUPLED))
        assert outcome.finished.totals.lossy_tokens == 0


def test_at_temperature_zero_it_is_greedy_decoding(tiny_model: PreTrainedModel) -> None:
    wanted = typical(SamplingParams(ignore_eos=True))
    assert not any(one.lossy for one in wanted)
    outcomes = run(make_runner(tiny_model), wanted, propose=greedy_drafts(tiny_model))
    for one, outcome in zip(wanted, outcomes, strict=True):
        assert outcome.token_ids == plain(tiny_model, replace(one, mode=VerificationMode.GREEDY))
        assert outcome.finished.totals.lossy_tokens == 0
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 10


@pytest.mark.parametrize("verified_by", ["host", "device", "device that chooses rows"])
def test_neighbours_in_the_batch_stay_lossless(tiny_model: PreTrainedModel, verified_by: str) -> None:
    lossless = [
        request(prompt, 24, sampling=SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True))
        for prompt in prompts()
    ]
    wanted = list(itertools.chain(*zip(typical(), lossless, strict=True)))
    runner = make_runner(tiny_model)
    if verified_by == "device that chooses rows":
        runner.enable_device_row_selection(DEVICE_SEQUENCES)
    outcomes = run(runner, wanted, propose=greedy_drafts(tiny_model), on_device=verified_by != "host")
    assert sum(outcome.finished.totals.lossy_tokens for outcome in outcomes[::2]) > 10
    for one, outcome in zip(lossless, outcomes[1::2], strict=True):
        assert outcome.token_ids == plain(tiny_model, one)
        assert outcome.finished.totals.lossy_tokens == 0


def test_the_draft_is_asked_for_what_is_most_probable(tiny_model: PreTrainedModel) -> None:
    opened: list[OpenSequence] = []

    class Listening(ScriptedDraft):
        def open(self, sequence: OpenSequence) -> None:
            opened.append(sequence)
            super().open(sequence)

    def connect(events: DraftEvents) -> DraftLink:
        return Listening(events, greedy_drafts(tiny_model))

    run(make_runner(tiny_model), typical()[:1], connect=connect)
    assert [(one.mode, one.sampling.temperature) for one in opened] == [(VerificationMode.GREEDY, 0.0)]
