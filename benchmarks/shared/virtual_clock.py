"""A clock in place of the machine's: seconds pass when somebody sleeps or waits, and events happen at their time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from outrider.drafting.inbox import DraftInbox


class VirtualClock:
    """Seconds since it began, with events that are due at a time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now

    def nanoseconds(self) -> int:
        """As `time.monotonic_ns`."""
        return int(self.now * 1e9)

    def call_at(self, at: float, event: Callable[[], None]) -> None:
        """Have `event` happen at a time."""
        heapq.heappush(self._due, (at, next(self._count), event))

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and what is due meanwhile happen."""
        until = self.now + max(0.0, seconds)
        while self._due and self._due[0][0] <= until:
            at, _, event = heapq.heappop(self._due)
            self.now = max(self.now, at)
            event()
        self.now = until

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this runs, modules that read `time` read this clock, and who waits for a draft's events lets time
        pass."""

        def wait_until(inbox: DraftInbox, deadline: float) -> bool:
            while not inbox._events and self.now < deadline:
                following = self._due[0][0] if self._due else deadline
                self.pass_by(min(max(following, self.now), deadline) - self.now)
            return bool(inbox._events)

        clocks = mock.patch.multiple(
            time,
            monotonic=self,
            perf_counter=self,
            sleep=self.pass_by,
            monotonic_ns=self.nanoseconds,
            perf_counter_ns=self.nanoseconds,
        )
        with clocks, mock.patch.object(DraftInbox, "wait_until", wait_until):
            yield
