"""Events of a draft, from any thread to the engine's."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from outrider.drafting.events import Connected, Disconnected, DraftEvent, Grown, Lost, Opened, SequenceFailure
from outrider.wire.frames import DraftLink, SequenceGrowth

QueuedEvent = SequenceGrowth | Opened | SequenceFailure | Connected | Disconnected | Lost
# Seconds that one `listen` may take; later events wait a step at most. 64 growths of 64 nodes take a tenth of it.
LISTEN_SECONDS = 0.02


class DraftInbox(ABC):
    """Receives the events of a draft in a queue, and wakes a waiting thread."""

    def __init__(self) -> None:
        self._events: deque[QueuedEvent] = deque()
        self._wake = threading.Condition()
        # Calls of `listen` in a row that left events, and when the first of them began.
        self._calls_behind, self._behind_since = 0, 0.0
        # When the last growth arrived, on the monotonic clock.
        self.received_at = 0.0
        self._link: DraftLink | None = None

    def attach(self, link: DraftLink) -> None:
        """Use `link` from now on. Called once, before the first step."""
        self._link = link

    def receive(self, event: DraftEvent) -> None:
        """Queue an event. Any thread."""
        events: Iterable[QueuedEvent]
        if isinstance(event, Grown):
            events, self.received_at = event.growths, time.monotonic()
        else:
            events = (event,)
        with self._wake:
            self._events.extend(events)
            self._wake.notify_all()

    def listen(self) -> None:
        """Handle the events that have arrived, in order: all of them, unless that takes too long."""
        begun = time.monotonic()
        while self._events:
            self._handle(self._events.popleft())
            # Behind an event, so that every call handles one.
            if time.monotonic() - begun > LISTEN_SECONDS:
                break
        if not self._events:
            self._calls_behind = 0
            return
        if not self._calls_behind:
            self._behind_since = begun
        self._calls_behind += 1
        # A draft is cut off after so many calls of `listen` in a row, over so many seconds, that left events: it sends
        # faster than the engine can read. One long step between two calls is not counted against it.
        if self._calls_behind < 32 or time.monotonic() - self._behind_since < 1.0:
            return
        self._calls_behind = 0
        with self._wake:
            # Events about the connection itself are kept.
            kept = [event for event in self._events if isinstance(event, Connected | Disconnected | Lost)]
            self._events.clear()
            self._events.extend(kept)
        self._cut_off("it sends more than there is time to read")

    @abstractmethod
    def _handle(self, event: QueuedEvent) -> None:
        """Handle one event."""

    @abstractmethod
    def _cut_off(self, reason: str) -> None:
        """Disconnect a draft that sends more than can be read; its queued events about sequences were dropped."""

    def wait_until(self, deadline: float) -> bool:
        """Wait for an event until a time of the monotonic clock; returns whether there is one."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._events), timeout=deadline - time.monotonic())
