"""Requests known by their texts alone: rows moved, used again, left and come back to."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider_vllm import tracking
from outrider_vllm.tracking import ABSENT_STEPS, RequestTracker, Tokens


def text(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def numbers(tracker: RequestTracker, *texts: Tokens) -> list[int | None]:
    return [seen.request.number if seen is not None else None for seen in tracker.see(texts)]


def test_a_text_that_grows_in_its_row_is_one_request() -> None:
    tracker = RequestTracker(4)
    (first,) = tracker.see([text(1, 2, 3)])
    (second,) = tracker.see([text(1, 2, 3, 4, 5)])
    (third,) = tracker.see([text(1, 2, 3, 4, 5)])
    assert first is not None and second is not None and third is not None
    assert first.fresh.tolist() == [1, 2, 3]
    assert second.fresh.tolist() == [4, 5]
    assert third.fresh.tolist() == []
    assert first.request is second.request is third.request


def test_rows_that_change_places_keep_their_requests() -> None:
    tracker = RequestTracker(4)
    assert numbers(tracker, text(1, 2), text(3, 4), text(5, 6)) == [1, 2, 3]
    assert numbers(tracker, text(5, 6, 9), text(1, 2, 9), text(3, 4, 9)) == [3, 1, 2]
    # The first has ended, and the last has moved into its row.
    assert numbers(tracker, text(3, 4, 9, 9), text(1, 2, 9, 9)) == [2, 1]


def test_a_row_that_is_used_again_has_another_request() -> None:
    tracker = RequestTracker(4)
    assert numbers(tracker, text(1, 2, 3, 4)) == [1]
    # The same prompt again, and a text as long as the old one with another end.
    assert numbers(tracker, text(1, 2)) == [2]
    assert numbers(tracker, text(1, 9, 9, 9, 9)) == [3]


def test_a_request_that_was_preempted_is_known_in_another_row() -> None:
    tracker = RequestTracker(4)
    assert numbers(tracker, text(1, 2, 3), text(4, 5, 6)) == [1, 2]
    for step in range(ABSENT_STEPS):
        assert numbers(tracker, text(4, 5, 6, *[7] * step)) == [2]
        assert tracker.evict_absent() == []
    end = [7] * (ABSENT_STEPS - 1)
    assert numbers(tracker, text(4, 5, 6, *end), text(8, 8), text(1, 2, 3, 9)) == [2, 3, 1]


def test_equal_ends_in_moved_rows_are_told_apart_by_their_beginnings() -> None:
    tracker = RequestTracker(4)
    end = list(range(20, 120))
    assert numbers(tracker, text(1, *end), text(2, *end), text(3)) == [1, 2, 3]
    assert numbers(tracker, text(3, 1), text(0), text(2, *end, 5), text(1, *end, 5)) == [3, 4, 2, 1]


def test_a_long_request_goes_before_one_that_it_begins_with() -> None:
    tracker = RequestTracker(4)
    assert numbers(tracker, text(7), text(1, 2), text(1, 2, 3)) == [1, 2, 3]
    assert numbers(tracker, text(1, 2, 3, 4), text(7, 7)) == [3, 1]


def test_a_row_without_text_is_no_request() -> None:
    tracker = RequestTracker(4)
    assert tracker.see([text()]) == [None] and len(tracker) == 0


def test_what_is_in_no_row_is_given_up_by_steps_by_time_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = RequestTracker(2)
    numbers(tracker, *(text(one) for one in range(1, 6)))
    tracker.see([text(1)])
    # Four are absent, and two may be.
    assert len(tracker.evict_absent()) == 2 and len(tracker) == 3
    for _ in range(ABSENT_STEPS):
        tracker.see([text(1)])
    assert len(tracker.evict_absent()) == 2 and len(tracker) == 1
    now = tracking.time.monotonic()
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now + 2 * tracking.ABSENT_SECONDS)
    tracker.see([text(9)])
    assert [request.number for request in tracker.evict_absent()] == [1]
    assert [request.number for request in tracker.clear()] == [6] and len(tracker) == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_batches(seed: int) -> None:
    """Requests with a common beginning come, grow, leave and come back, in any rows: none is ever taken for another."""
    coins = random.Random(seed)
    tracker = RequestTracker(64)
    shared = [coins.randrange(5) for _ in range(70)]
    texts = {name: [*shared, name] for name in range(12)}
    known: dict[int, int] = {}
    for _ in range(200):
        batch = coins.sample(sorted(texts), coins.randrange(1, 9))
        for name in batch:
            texts[name] += [coins.randrange(5) for _ in range(coins.randrange(1, 7))]
        seen = tracker.see([text(*texts[name]) for name in batch])
        for name, one in zip(batch, seen, strict=True):
            assert one is not None
            assert known.setdefault(one.request.number, name) == name
        tracker.evict_absent()
        assert len(tracker) <= 64 + 8
    # Those that came back soon enough were known again.
    assert len(known) < 200
