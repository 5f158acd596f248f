"""What waits for a slow reader is put together without changing what it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import EngineDead
from outrider.sampling import FinishReason
from outrider.sampling import TokenLogprobs as Logprobs
from outrider.tree import VerifiedTree
from target_service.api.event_queue import joined
from target_service.core.sequence import Finish, SequenceFailed, SequenceFinished, SequenceTotals, StepVerdict

LENGTH = Finish(FinishReason.LENGTH)


def verdict(step: int, *tokens: int, drafted: int = 0, **fields: Any) -> StepVerdict:
    return StepVerdict(7, step, tuple(range(1, drafted + 1)), tokens, drafted, **fields)


def test_plain_steps_become_one_chunk() -> None:
    events = [
        verdict(3, 10, queue_ns=5, compute_ns=1, logprobs=(Logprobs(-1.0),)),
        verdict(4, 11, compute_ns=2, logprobs=(Logprobs(-2.0),)),
        verdict(5, 12, compute_ns=3, logprobs=(Logprobs(-3.0),), finish=LENGTH),
        SequenceFinished(7, LENGTH, SequenceTotals()),
    ]
    together = (Logprobs(-1.0), Logprobs(-2.0), Logprobs(-3.0))
    expected = verdict(5, 10, 11, 12, queue_ns=5, compute_ns=6, logprobs=together, finish=LENGTH)
    assert list(joined(events)) == [expected, events[-1]]


@pytest.mark.parametrize(
    ("drafted", "tokens"),
    [([2, 0, 0], [(3, 2)]), ([0, 1, 0], [(1, 0), (2, 1)]), ([1, 1, 1], [(1, 1)] * 3)],
    ids=["first", "middle", "all"],
)
def test_drafted_tokens_stay_first(drafted: list[int], tokens: list[tuple[int, int]]) -> None:
    said = [event for event in joined([verdict(i, i, drafted=count) for i, count in enumerate(drafted)])]
    assert [(len(event.token_ids), event.drafted_tokens) for event in said if isinstance(event, StepVerdict)] == tokens


def test_steps_keep_their_drafts() -> None:
    several = verdict(2, 1, 2, 3, 4, drafted=2, drafts_by_step=(0, 2))
    (said,) = joined([several, verdict(4, 5, 6), verdict(5, 7)])
    assert isinstance(said, StepVerdict)
    assert (said.token_ids, said.drafted_tokens) == ((1, 2, 3, 4, 5, 6, 7), 2)
    assert said.drafts_by_step == (0, 2, 0, 0, 0) and said.step == 5
    assert [one.drafts_by_step for one in joined([verdict(0, 1), several])] == [(), (0, 2)]  # type: ignore[union-attr]


def test_the_last_tree_is_kept() -> None:
    first, second = VerifiedTree((1, 2), (0, 0), (1,)), VerifiedTree((3, 4), (0, 0), ())
    (said,) = joined([verdict(0, 2, 3, drafted=1, tree=first), verdict(1, 9, tree=second), verdict(2, 8)])
    assert isinstance(said, StepVerdict) and said.tree == second


def test_what_came_before_a_failure_is_said() -> None:
    failure = SequenceFailed(7, EngineDead("the engine has failed"))
    assert list(joined([verdict(0, 1), verdict(1, 2), failure])) == [verdict(1, 1, 2), failure]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=5))
def test_nothing_is_lost_or_reordered(batches: list[list[int]]) -> None:
    """However steps are put together, tokens keep their order, and drafted ones are told from the others."""
    said: list[tuple[int, bool]] = []
    expected: list[tuple[int, bool]] = []
    step = 0
    for batch in batches:
        events = []
        for drafted in batch:
            tokens = tuple(range(step * 10, step * 10 + drafted + 1))
            events.append(verdict(step, *tokens, drafted=drafted))
            expected += [(token, place < drafted) for place, token in enumerate(tokens)]
            step += 1
        for event in joined(events):
            assert isinstance(event, StepVerdict)
            said += [(token, place < event.drafted_tokens) for place, token in enumerate(event.token_ids)]
    assert said == expected
