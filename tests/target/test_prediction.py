"""Where in a prediction the answer is, and what is offered of it."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.draft_tree import GrowingTree
from outrider.sampling import SamplingParams, VerificationMode
from target_service.core.sequence import SequenceRequest
from target_service.execution.node_tables import PredictedChain, PredictedNodes
from target_service.speculation.merged_tree import MergedTree, PredictedTree
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.prediction import PredictedAnswer

PROMPT = [1000, 1001, 1002]
TEXT = list(range(100, 160))


def answering(prediction: list[int]) -> tuple[PredictedAnswer, list[int]]:
    """A prediction, and the tokens of its sequence."""
    committed = list(PROMPT)
    return PredictedAnswer(tuple(prediction), committed, len(committed)), committed


def first_tokens(answer: PredictedAnswer) -> list[int]:
    return [chain.token_ids[0] for chain in answer.chains(8)]


def test_nothing_predicted_is_no_prediction() -> None:
    runner: Any = SimpleNamespace(end_token_ids=(), tokenizer=None)
    wanted = SequenceRequest(tuple(PROMPT), SamplingParams(), VerificationMode.COUPLED, 0, 4)
    assert LiveSequence.of(1, wanted, runner).prediction is None
    predicted = LiveSequence.of(1, replace(wanted, prediction=tuple(TEXT)), runner)
    assert predicted.prediction is not None and first_tokens(predicted.prediction) == TEXT[:1]


def test_it_begins_at_its_beginning_and_goes_along() -> None:
    answer, committed = answering(TEXT)
    assert [chain.token_ids for chain in answer.chains(4)] == [(100, 101, 102, 103)]
    committed += TEXT[:10]
    assert first_tokens(answer) == [110] and answer._place == 10 and answer.holds
    committed += TEXT[10:]
    assert not answer.has_offer and not answer.holds


def test_scores_rise_along_a_chain_and_with_the_run() -> None:
    answer, committed = answering(TEXT)
    (early,) = answer.chains(6)
    assert list(early.scores) == sorted(early.scores)
    committed += TEXT[:12]
    (late,) = answer.chains(6)
    assert late.scores[0] > early.scores[0]


def test_an_exchanged_token_is_guessed_at_once() -> None:
    answer, committed = answering(TEXT)
    committed += [*TEXT[:12], 7]
    # As if it had been exchanged, and as if it had been put in.
    assert first_tokens(answer) == [TEXT[13], TEXT[12]]
    committed += TEXT[13:15]
    assert first_tokens(answer) == [TEXT[15]]


def test_inserted_tokens_are_left_behind() -> None:
    answer, committed = answering(TEXT)
    committed += [*TEXT[:12], 7, 8, 9]
    assert TEXT[12] in first_tokens(answer)
    committed += TEXT[12:14]
    assert first_tokens(answer) == [TEXT[14]]


def test_tokens_that_were_left_out_are_found_by_the_next() -> None:
    answer, committed = answering(TEXT)
    committed += [*TEXT[:12], TEXT[20]]
    assert first_tokens(answer) == [TEXT[21]]


def test_far_moves_are_found_by_the_longest_run() -> None:
    # The same two tokens stand in it twice; three tell which it is.
    text = [1, 2, 3, 50, 51, 52, 53, 9, 2, 3, 60, 61, 62]
    answer, committed = answering(text)
    committed += [77, 78, 9, 2, 3]
    assert first_tokens(answer) == [60]


def test_offers_that_fail_take_ever_longer_runs() -> None:
    answer, committed = answering(TEXT)
    needed = []
    for _ in range(4):
        answer.observe_offer(0)
        committed.append(5)
        run = 0
        while not answer.has_offer:
            committed.append(TEXT[run])
            run += 1
        needed.append(run)
    assert needed == sorted(set(needed))
    answer.observe_offer(2)
    committed += [5, TEXT[3], TEXT[4]]
    assert answer.has_offer


@examples(60)
@given(st.integers(0, 10**6))
def test_an_edited_text_is_found_again(seed: int) -> None:
    """Whatever was edited, a run of eight tokens that stand in it once leads back."""
    rng = random.Random(seed)
    answer, committed = answering(TEXT)
    place = rng.randrange(1, 30)
    committed += [*TEXT[:place], *(rng.randrange(500) for _ in range(rng.randrange(9)))]
    assert len(answer.chains(8)) <= 2
    start = rng.randrange(place, 40)
    for length in range(8):
        committed.append(TEXT[start + length])
        answer.chains(8)
    assert first_tokens(answer) == [TEXT[start + 8]]


def test_chains_hang_in_a_drafts_tree() -> None:
    grown = GrowingTree([*PROMPT, 10], 0)
    grown._place(0, 20, 0.5)
    grown._place(1, 21, 0.4)
    chains = [PredictedChain((20, 30, 31), (0.9, 0.8, 0.7)), PredictedChain((20, 40), (0.3, 0.2))]
    tree = MergedTree(10, grown, chains).cut({1, 2, 3, 4, 5})
    assert isinstance(tree, PredictedTree)
    assert tree.token_ids == (10, 20, 21, 30, 31, 40) and tree.parents == (0, 0, 1, 1, 3, 1)
    assert tree.scores == (1.0, 0.5, 0.4, 0.0, 0.0, 0.0) and tree.predicted == (0.0, 0.9, 0.0, 0.8, 0.7, 0.2)
    assert tree.predicted_rows == 4
    assert tree.accepted_predicted((1, 2)) == 1


def test_chains_follow_a_table_from_where_it_begins() -> None:
    tokens = [*PROMPT, 10, 11, 12]
    nodes = PredictedNodes(5, (0,), (PredictedChain((12, 13), (0.9, 0.8)), PredictedChain((50,), (0.1,))), tokens)
    assert nodes.from_base(4) == [([11, 12, 13], [1.0, 0.9, 0.8]), ([11, 50], [1.0, 0.1])]
    # Of what was said since, only the first chain knew.
    assert nodes.from_base(6) == [((13,), (0.8,))]
