"""Teaching tries off the request path: one thread, one bounded queue."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Learner:
    """Runs lessons in order on its own thread, so that every trie has a single writer."""

    def __init__(self, max_backlog: int, every_seconds: float = 0.0, chore: Callable[[], None] | None = None) -> None:
        """`max_backlog`: tokens that may wait. `chore` runs on the thread every so often, and once at the end."""
        self._max_backlog = max_backlog
        self._every = every_seconds
        self._chore = chore
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="trie-learner", daemon=True)
        self._count = threading.Lock()
        self.backlog = 0
        self.learnt_tokens = 0
        self.dropped_tokens = 0

    def start(self) -> None:
        """Begin to work off the queue. Called once."""
        self._thread.start()

    def stop(self) -> None:
        """Work off what waits, run the chore, end. Idempotent."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()

    def teach(self, tokens: int, lesson: Callable[[], None]) -> bool:
        """Queue a lesson of so many tokens. False when it was dropped because too much waits."""
        with self._count:
            if self.backlog + tokens > self._max_backlog:
                self.dropped_tokens += tokens
                return False
            self.backlog += tokens

        def learn() -> None:
            lesson()
            with self._count:
                self.backlog -= tokens
                self.learnt_tokens += tokens

        self._work.put(learn)
        return True

    def run(self, work: Callable[[], Result]) -> Result:
        """Do `work` on the thread, after all that was queued before, and hand back its result or error."""
        future: Future[Result] = Future()

        def fulfil() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                # Raised again where the result is awaited.
                future.set_exception(error)

        self._work.put(fulfil)
        return future.result()

    def flush(self) -> None:
        """Wait until everything taught so far is learnt."""
        self.run(lambda: None)

    def _run(self) -> None:
        due = time.monotonic() + self._every
        while True:
            try:
                work = self._work.get(timeout=max(0.0, due - time.monotonic()) if self._every else None)
            except queue.Empty:
                work = _nothing
            if work is None:
                break
            work()
            if self._every and time.monotonic() >= due:
                self._do_chore()
                due = time.monotonic() + self._every
        self._do_chore()

    def _do_chore(self) -> None:
        if self._chore is not None:
            self._chore()


def _nothing() -> None:
    """What the thread does when only the chore is due."""
