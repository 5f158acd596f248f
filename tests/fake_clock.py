"""A clock that a test sets, in place of the machine's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from outrider.drafting.inbox import DraftInbox


class FakeClock:
    """Seconds pass when somebody sleeps, by `tick` at each look at the clock, and when a test says so."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick
        # Called whenever somebody has slept.
        self.watchers: list[Callable[[], None]] = []

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += max(0.0, seconds)
        for watcher in self.watchers:
            watcher()

    def deliver_while_waiting(self, patch: pytest.MonkeyPatch) -> None:
        """Have who waits for a draft's events let time pass here, in which watchers may deliver them."""

        def wait_until(inbox: DraftInbox, deadline: float) -> bool:
            while not inbox._events and self.now < deadline:
                self.pass_by(min(1e-4, deadline - self.now))
            return bool(inbox._events)

        patch.setattr(DraftInbox, "wait_until", wait_until)

    def install(self, patch: pytest.MonkeyPatch) -> FakeClock:
        """Have the modules of this process that read `time` read this clock; event loops do as well."""
        for name in ("monotonic", "perf_counter"):
            patch.setattr(time, name, self)
            patch.setattr(time, f"{name}_ns", lambda: int(self() * 1e9))
        patch.setattr(time, "sleep", self.pass_by)
        return self
