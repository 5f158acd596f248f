"""Insertion into tries off the request path: one thread with a bounded queue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class TrieWorker:
    """Runs insertions (lessons) in order on its own thread, so that every trie has a single writer."""

    def __init__(self, max_backlog: int, chore: Callable[[], None] | None = None, chore_seconds: float = 0.0) -> None:
        """`max_backlog`: tokens that may wait. `chore` runs after lessons, every `chore_seconds`, and once at the
        end."""
        self._max_backlog = max_backlog
        self._chore = chore
        self._chore_seconds = chore_seconds
        self._chore_due = time.monotonic() + chore_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trie-worker")
        self._count = threading.Lock()
        # A requested chore that has not run yet.
        self._asked: threading.Timer | None = None
        self._stopped = False
        self.backlog = 0
        self.inserted_tokens = 0
        self.dropped_tokens = 0

    def stop(self) -> None:
        """Finish all queued lessons, run the chore, and end the thread."""
        with self._count:
            self._stopped = True
        self.call_on_thread(self._do_chore)
        self._thread.shutdown()

    def submit(self, tokens: int, insertion: Callable[[], None]) -> None:
        """Queue a lesson of this many tokens, or drop it if too many wait."""
        with self._count:
            if self.backlog + tokens > self._max_backlog:
                self.dropped_tokens += tokens
                return
            self.backlog += tokens
        self._thread.submit(self._insert, tokens, insertion).add_done_callback(_report)

    def call_on_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread, after everything queued before; returns its result or raises its error."""
        return self._thread.submit(work).result()

    def ask_for_chore(self, seconds: float) -> None:
        """Run the chore within `seconds`, once for all requests, also if nothing is inserted meanwhile."""
        with self._count:
            if self._chore is None or self._asked is not None or self._stopped:
                return
            self._asked = threading.Timer(min(seconds, self._chore_seconds), self._begin_chore)
            self._asked.daemon = True
            self._asked.start()

    def flush(self) -> None:
        self.call_on_thread(lambda: None)

    def _insert(self, tokens: int, insertion: Callable[[], None]) -> None:
        try:
            insertion()
        finally:
            with self._count:
                self.backlog -= tokens
                self.inserted_tokens += tokens
        if time.monotonic() >= self._chore_due:
            self._do_chore()

    def _begin_chore(self) -> None:
        with self._count:
            if not self._stopped:
                self._thread.submit(self._do_chore).add_done_callback(_report)

    def _do_chore(self) -> None:
        # Later requests may come too late for this run.
        with self._count:
            if self._asked is not None:
                self._asked.cancel()
            self._asked = None
        if self._chore is not None:
            self._chore()
            self._chore_due = time.monotonic() + self._chore_seconds


def _report(insertion: Future[None]) -> None:
    """Log a failed lesson, which costs drafts but not the service."""
    if (error := insertion.exception()) is not None:
        log.error("the trie failed to learn", exc_info=error)
