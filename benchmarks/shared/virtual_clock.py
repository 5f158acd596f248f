"""A clock in place of the machine's: seconds pass when something sleeps or waits, and events happen at their time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol
from unittest import mock

from outrider.drafting.inbox import DraftInbox

# Longest time that passes at once while watchers may deliver something.
_WATCHED = 1e-4


class Patches(Protocol):
    """What replaces attributes for a while; `pytest.MonkeyPatch` is one."""

    def setattr(self, target: object, name: str, value: object, /) -> None:
        """Replace the attribute `name` of `target`."""


class _Entered(ExitStack):
    """Patches that end with the stack."""

    def setattr(self, target: object, name: str, value: object, /) -> None:
        self.enter_context(mock.patch.object(target, name, value))


class VirtualClock:
    """Seconds since it began, with events that are due at a time. `tick` seconds pass at each look at it."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick
        # Called whenever something has slept or waited.
        self.watchers: list[Callable[[], None]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def nanoseconds(self) -> int:
        """As `time.monotonic_ns`."""
        return int(self() * 1e9)

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
        for watcher in self.watchers:
            watcher()

    def install(self, patches: Patches) -> VirtualClock:
        """Have the modules of this process that read `time` read this clock; event loops do as well."""
        for name in ("monotonic", "perf_counter"):
            patches.setattr(time, name, self)
            patches.setattr(time, f"{name}_ns", self.nanoseconds)
        patches.setattr(time, "sleep", self.pass_by)
        return self

    def deliver_while_waiting(self, patches: Patches) -> None:
        """Have what waits for a draft's events let time pass here, in which events happen and watchers are called."""

        def wait_until(inbox: DraftInbox, deadline: float) -> bool:
            while not inbox._events and self.now < deadline:
                following = self._due[0][0] if self._due else deadline
                if self.watchers:
                    following = min(following, self.now + _WATCHED)
                self.pass_by(min(max(following, self.now), deadline) - self.now)
            return bool(inbox._events)

        patches.setattr(DraftInbox, "wait_until", wait_until)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this runs, both of these hold."""
        with _Entered() as patches:
            self.install(patches)
            self.deliver_while_waiting(patches)
            yield
