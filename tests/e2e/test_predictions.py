"""Whatever a request predicts, the output is plain decoding's, and the totals say what the prediction was worth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_harness import Propose, ScriptedDraft, knowing_tree, make_runner, plain, random_tree, request, run
from transformers import PreTrainedModel

from outrider.drafting.events import Disconnected, DraftEvents
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import DraftLink, SequenceAdvance
from target_service.core.sequence import SequenceRequest
from target_service.speculation.policy.step_cost import StepCost

pytestmark = pytest.mark.values

VOCABULARY = 211
TOKENS = 48
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, ignore_eos=True),
}


class FixedCost(StepCost):
    """Says what it was made with, whatever the machine is busy with."""

    def observe_step(self, rows: int, seconds: float) -> None:
        pass


# Rows at no price, at a low and at a high one.
COSTS = {"free": None, "cheap": FixedCost([(1, 1.0), (64, 1.5)]), "dear": FixedCost([(1, 1.0), (2, 2.0), (64, 64.0)])}
_PLAIN: dict[str, tuple[SequenceRequest, tuple[int, ...]]] = {}


@pytest.fixture(params=SAMPLINGS)
def case(request: pytest.FixtureRequest, tiny_model: PreTrainedModel) -> tuple[SequenceRequest, tuple[int, ...]]:
    """A request, and what plain decoding says."""
    name = request.param
    if name not in _PLAIN:
        _PLAIN[name] = (wanted := asked(SAMPLINGS[name])), plain(tiny_model, wanted)
    return _PLAIN[name]


def asked(sampling: SamplingParams, tokens: int = TOKENS) -> SequenceRequest:
    rng = random.Random(3)
    return request([rng.randrange(3, VOCABULARY) for _ in range(19)], tokens, sampling=sampling)


def edited(said: Sequence[int], every: int, seed: int = 5) -> list[int]:
    """The text before an edit that made `said` of it: tokens exchanged, put in and left out in turn."""
    rng, before = random.Random(seed), list[int]()
    for place, token in enumerate(said):
        kind = (place // every) % 3 if place % every == every - 1 else None
        if kind == 0:
            before.append(rng.randrange(3, VOCABULARY))
        elif kind == 1:
            before += [rng.randrange(3, VOCABULARY) for _ in range(3)] + [token]
        elif kind is None:
            before.append(token)
    return before


def predictions(said: Sequence[int]) -> dict[str, list[int]]:
    rng = random.Random(11)
    return {
        "right": list(said),
        "wrong": [rng.randrange(3, VOCABULARY) for _ in said],
        "shifted": [rng.randrange(3, VOCABULARY) for _ in range(7)] + list(said),
        "cut-off": list(said[9:]),
        "edited": edited(said, 9),
        "longer": [*said, *(rng.randrange(3, VOCABULARY) for _ in range(200))],
        "one-token": [said[0]],
        "repeated": [said[0]] * 60,
    }


KINDS = tuple(predictions(range(TOKENS)))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_plain_decoding(
    tiny_model: PreTrainedModel, case: tuple[SequenceRequest, tuple[int, ...]], kind: str, cost: str
) -> None:
    wanted, said = case
    predicted = replace(wanted, prediction=tuple(predictions(said)[kind]))
    outcome = run(make_runner(tiny_model), [predicted], step_cost=COSTS[cost])[0]
    assert outcome.token_ids == said
    totals = outcome.finished.totals
    assert totals.accepted_predicted_tokens == totals.accepted_tokens <= totals.predicted_tokens
    assert totals.predicted_tokens == totals.drafted_tokens
    assert totals.steps == totals.completion_tokens - totals.accepted_tokens


@pytest.mark.parametrize("draft", ["random", "knowing"])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_draft(
    tiny_model: PreTrainedModel, case: tuple[SequenceRequest, tuple[int, ...]], kind: str, draft: str
) -> None:
    wanted, said = case
    whole = [(*wanted.token_ids, *said)]
    propose = random_tree(VOCABULARY, 24) if draft == "random" else knowing_tree(whole, VOCABULARY, 24, right=0.8)
    others = [asked(wanted.sampling, 11), replace(wanted, prediction=tuple(predictions(said)[kind]))]
    outcomes = run(make_runner(tiny_model), others, propose=propose, stagger=2, step_cost=COSTS["cheap"])
    assert [outcome.token_ids for outcome in outcomes] == [said[:11], said]
    without, totals = (outcome.finished.totals for outcome in outcomes)
    assert without.predicted_tokens == 0
    assert totals.accepted_predicted_tokens <= min(totals.predicted_tokens, totals.accepted_tokens)
    assert totals.predicted_tokens <= totals.drafted_tokens


def test_a_right_prediction_saves_passes(tiny_model: PreTrainedModel) -> None:
    wanted = asked(SAMPLINGS["greedy"])
    said = plain(tiny_model, wanted)
    steps = {}
    for kind in ("right", "edited", "wrong"):
        predicted = replace(wanted, prediction=tuple(predictions(said)[kind]))
        totals = run(make_runner(tiny_model), [predicted], step_cost=COSTS["cheap"])[0].finished.totals
        steps[kind] = totals.steps
        if kind == "right":
            # All but the token that each step says itself, and none for nothing but past the end.
            assert totals.accepted_predicted_tokens == totals.completion_tokens - totals.steps
    assert steps["right"] <= TOKENS / 8
    assert steps["edited"] <= TOKENS / 2
    assert steps["wrong"] >= TOKENS - 3


def test_a_wrong_prediction_is_hardly_ever_offered(tiny_model: PreTrainedModel) -> None:
    """Not even where it is made of the answer's own tokens, and rows cost nothing."""
    wanted = asked(SAMPLINGS["greedy"], 200)
    said = plain(tiny_model, wanted)
    shuffled = random.Random(2).sample(said, len(said))
    totals = run(make_runner(tiny_model), [replace(wanted, prediction=tuple(shuffled))])[0].finished.totals
    assert totals.drafted_steps - totals.accepted_tokens <= 12


@pytest.mark.parametrize("cost", COSTS)
def test_an_offer_is_bounded_by_what_was_right(tiny_model: PreTrainedModel, cost: str) -> None:
    """A text that shares runs of words with the answer by chance, which is what makes a wrong one look right."""
    wanted = asked(SAMPLINGS["greedy"], 120)
    said, rng = plain(tiny_model, wanted), random.Random(6)
    # Runs of the answer, each followed by something else.
    misleading = [
        token
        for at in range(0, 112, 8)
        for token in (*said[at : at + 6], *(rng.randrange(3, VOCABULARY) for _ in range(40)))
    ]
    predicted = replace(wanted, prediction=tuple(misleading), trees=True)
    outcome = run(make_runner(tiny_model), [predicted], step_cost=COSTS[cost])[0]
    assert outcome.token_ids == said
    right = offered = 0
    for verdict in outcome.verdicts:
        assert verdict.tree is not None
        rows = len(verdict.tree.token_ids) - 1
        # Two guesses at most are offered at once.
        assert rows <= 2 * (4 + 4 * right)
        right += len(verdict.tree.accepted_rows)
        offered += rows
    assert COSTS[cost] is not None or offered > right > 0


@pytest.mark.parametrize("draft", [None, "random"])
def test_rejection_follows_a_prediction_that_is_certain(tiny_model: PreTrainedModel, draft: str | None) -> None:
    """At top_k 1 the distribution has one token, so that rejection sampling must say what greedy decoding does."""
    greedy = asked(SAMPLINGS["greedy"])
    said = plain(tiny_model, greedy)
    certain = SamplingParams(temperature=0.7, top_k=1, seed=4, ignore_eos=True)
    propose: Propose | None = random_tree(VOCABULARY, 24) if draft else None
    for kind, prediction in predictions(said).items():
        wanted = replace(
            greedy, sampling=certain, mode=VerificationMode.REJECTION, seed=4, prediction=tuple(prediction)
        )
        outcome = run(make_runner(tiny_model), [wanted], propose=propose, step_cost=COSTS["cheap"])[0]
        assert outcome.token_ids == said, kind
        if kind == "right":
            assert outcome.finished.totals.steps <= TOKENS / 6


class _ComesAndGoes(ScriptedDraft):
    """Disconnects at every seventh advance, and is back at the next."""

    count = 0

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        self.count += 1
        if self.count % 7 == 0:
            self._tokens.clear()
            self.events.receive(Disconnected("gone for a test"))
            self.connect()
            return
        super().advance(advances)

    def close(self, sequence_ids: Sequence[int]) -> None:
        super().close([each for each in sequence_ids if each in self._tokens])


def test_faults_of_the_draft_meanwhile(
    tiny_model: PreTrainedModel, case: tuple[SequenceRequest, tuple[int, ...]]
) -> None:
    wanted, said = case

    def connect(events: DraftEvents) -> DraftLink:
        return _ComesAndGoes(events, random_tree(VOCABULARY, 24))

    several = [replace(wanted, prediction=tuple(each)) for each in predictions(said).values()]
    outcomes = run(make_runner(tiny_model, kv_tokens=1024), several, connect=connect, stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == [said] * len(several)


def test_no_rows_are_offered_past_the_last_token(tiny_model: PreTrainedModel) -> None:
    wanted = asked(SAMPLINGS["greedy"])
    said = plain(tiny_model, wanted)
    short = replace(wanted, max_tokens=5, prediction=said)
    outcome = run(make_runner(tiny_model), [short])[0]
    totals = outcome.finished.totals
    assert outcome.token_ids == said[:5]
    assert (totals.predicted_tokens, totals.accepted_predicted_tokens, totals.steps) == (3, 3, 2)


def test_max_nodes_bounds_what_is_offered(tiny_model: PreTrainedModel) -> None:
    wanted = asked(SAMPLINGS["greedy"])
    said = plain(tiny_model, wanted)
    outcome = run(make_runner(tiny_model), [replace(wanted, max_draft_nodes=2, prediction=said)])[0]
    assert outcome.token_ids == said
    assert max(len(verdict.accepted_rows) for verdict in outcome.verdicts) == 2
