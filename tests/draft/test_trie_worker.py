"""Lessons: in order, off the caller's thread, bounded, and loud when they fail."""

from __future__ import annotations

import logging
import threading

import pytest
from waits import HUNG_SECONDS

from draft_service.ngram.trie_worker import TrieWorker


def test_lessons_run_in_order_on_one_other_thread() -> None:
    learner, seen = TrieWorker(1_000), []
    for number in range(50):
        learner.submit(1, lambda number=number: seen.append((number, threading.get_ident())))
    learner.flush()
    assert [number for number, _ in seen] == list(range(50))
    assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()}) and len({t for _, t in seen}) == 1
    assert (learner.backlog, learner.inserted_tokens) == (0, 50)
    learner.stop()


def test_the_backlog_is_bounded_without_blocking() -> None:
    learner, gate = TrieWorker(10), threading.Event()

    def wait() -> None:
        gate.wait(HUNG_SECONDS)

    dropped = []
    for tokens, lesson in ((8, wait), (3, wait), (2, wait)):
        learner.submit(tokens, lesson)
        dropped.append(learner.dropped_tokens)
    assert dropped == [0, 3, 3]
    gate.set()
    learner.stop()
    assert (learner.backlog, learner.dropped_tokens) == (0, 3)


def test_a_failed_lesson_is_reported_and_the_next_one_learnt(caplog: pytest.LogCaptureFixture) -> None:
    learner, seen = TrieWorker(10), []

    def fail() -> None:
        raise MemoryError("no room")

    with caplog.at_level(logging.ERROR):
        learner.submit(1, fail)
        learner.submit(1, lambda: seen.append(1))
        learner.stop()
    assert seen == [1] and learner.backlog == 0
    assert "failed to learn" in caplog.text


def test_errors_of_work_come_back_to_the_caller() -> None:
    learner = TrieWorker(10)
    with pytest.raises(ZeroDivisionError):
        learner.call_on_thread(lambda: 1 // 0)
    assert learner.call_on_thread(lambda: 7) == 7
    learner.stop()


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 4), (1_000.0, 1)], ids=["after every lesson", "only at the end"])
def test_the_chore_runs_when_due_and_at_the_end(seconds: float, times: int) -> None:
    done: list[int] = []
    learner = TrieWorker(10, lambda: done.append(1), seconds)
    for _ in range(3):
        learner.submit(1, lambda: None)
    learner.stop()
    assert len(done) == times


def test_a_chore_that_is_asked_for_runs_once_and_without_a_lesson() -> None:
    done = threading.Semaphore(0)
    learner = TrieWorker(10, done.release, 1_000.0)
    for _ in range(5):
        learner.ask_for_chore(0.05)
    assert done.acquire(timeout=HUNG_SECONDS)
    learner.flush()
    assert not done.acquire(blocking=False)
    learner.ask_for_chore(0.0)
    assert done.acquire(timeout=HUNG_SECONDS)
    learner.ask_for_chore(1_000.0)
    learner.stop()
    assert done.acquire(blocking=False) and not done.acquire(blocking=False)
