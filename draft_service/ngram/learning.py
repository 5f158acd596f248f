"""Teaching tries off the request path: one thread, and a bound on what waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Learner:
    """Runs lessons in order on its own thread, so that every trie has a single writer."""

    def __init__(self, max_backlog: int, chore: Callable[[], None] | None = None, chore_seconds: float = 0.0) -> None:
        """`max_backlog`: tokens that may wait. `chore` runs after a lesson every so often, and once at the end."""
        self._max_backlog = max_backlog
        self._chore = chore
        self._chore_seconds = chore_seconds
        self._chore_due = time.monotonic() + chore_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trie-learner")
        self._count = threading.Lock()
        self.backlog = 0
        self.learnt_tokens = 0
        self.dropped_tokens = 0

    def stop(self) -> None:
        """Work off what waits, run the chore, end."""
        if self._chore is not None:
            self.run(self._chore)
        self._thread.shutdown()

    def teach(self, tokens: int, lesson: Callable[[], None]) -> bool:
        """Queue a lesson of so many tokens. False when it was dropped because too much waits."""
        with self._count:
            if self.backlog + tokens > self._max_backlog:
                self.dropped_tokens += tokens
                return False
            self.backlog += tokens
        self._thread.submit(self._learn, tokens, lesson).add_done_callback(_report)
        return True

    def run(self, work: Callable[[], Result]) -> Result:
        """Do `work` on the thread, after all that was queued before, and hand back its result or raise its error."""
        return self._thread.submit(work).result()

    def flush(self) -> None:
        """Wait until everything taught so far is learnt."""
        self.run(lambda: None)

    def _learn(self, tokens: int, lesson: Callable[[], None]) -> None:
        try:
            lesson()
        finally:
            with self._count:
                self.backlog -= tokens
                self.learnt_tokens += tokens
        if self._chore is not None and time.monotonic() >= self._chore_due:
            self._chore()
            self._chore_due = time.monotonic() + self._chore_seconds


def _report(lesson: Future[None]) -> None:
    """A lesson that fails costs drafts, not the service, but must not go unseen."""
    if (error := lesson.exception()) is not None:
        log.error("the trie failed to learn", exc_info=error)
