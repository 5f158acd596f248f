"""Teaching tries off the request path: one thread, one bounded queue."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass

import numpy as np

from draft_service.ngram_trie import NgramTrie
from draft_service.trie_arrays import Tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Tokens that `trie` is to learn. `context` came before them and was taught before."""

    trie: NgramTrie
    context: Tokens
    token_ids: Tokens
    weight: int


class Learner:
    """Inserts lessons in order, on its own thread, so that every trie has a single writer."""

    def __init__(self, max_backlog: int) -> None:
        """`max_backlog`: tokens that may wait; lessons past it are dropped, and counted."""
        self._max_backlog = max_backlog
        self._lessons: queue.SimpleQueue[Lesson | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="trie-learner", daemon=True)
        self._count = threading.Lock()
        self.backlog = 0
        self.learnt_tokens = 0
        self.dropped_tokens = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Learn what waits, then end. Idempotent."""
        if self._thread.is_alive():
            self._lessons.put(None)
            self._thread.join()

    def teach(self, lesson: Lesson) -> bool:
        """Queue a lesson. False when it was dropped because too much waits."""
        tokens = len(lesson.token_ids)
        with self._count:
            if self.backlog + tokens > self._max_backlog:
                self.dropped_tokens += tokens
                return False
            self.backlog += tokens
        self._lessons.put(lesson)
        return True

    def flush(self) -> None:
        """Wait until everything taught so far is learnt. Returns at once when not running."""
        if self._thread.is_alive():
            done = threading.Event()
            self._lessons.put(done)
            done.wait()

    def _run(self) -> None:
        while (item := self._lessons.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            item.trie.insert(item.token_ids, item.context, item.weight)
            with self._count:
                self.backlog -= len(item.token_ids)
                self.learnt_tokens += len(item.token_ids)


def as_tokens(token_ids: list[int]) -> Tokens:
    """Token ids as the kernels take them."""
    return np.array(token_ids, dtype=np.int32)
