"""Events of a draft, from any thread to the engine's."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.wire.frames import DraftInfo, DraftLink, SequenceFailure, SequenceGrowth


@dataclass(frozen=True, slots=True)
class Connected:
    """A draft is connected."""

    info: DraftInfo


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The draft is disconnected, or could not be reached."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The draft that followed these sequences is disconnected, and another is connected."""

    sequence_ids: tuple[int, ...]


DraftEvent = SequenceGrowth | SequenceFailure | Connected | Disconnected | Lost
# Seconds that one `listen` may take; later events wait a step at most. 64 growths of 64 nodes take a tenth of it.
LISTEN_SECONDS = 0.02
# A draft is cut off after so many calls of `listen` in a row, over so many seconds, that left events: it sends faster
# than the engine can read. One long step between two calls is not counted against it.
_CALLS_BEHIND, _SECONDS_BEHIND = 32, 1.0


class DraftInbox(ABC):
    """A queue of `DraftEvents` that wakes a waiting thread. The `on_...` methods may be called from any thread."""

    def __init__(self) -> None:
        self._events: deque[DraftEvent] = deque()
        self._wake = threading.Condition()
        # Calls of `listen` in a row that left events, and when the first of them began.
        self._calls_behind, self._behind_since = 0, 0.0
        # When the last growth arrived, on the monotonic clock.
        self.received_at = 0.0
        self._link: DraftLink | None = None

    def attach(self, link: DraftLink) -> None:
        """Use `link` from now on. Called once, before the first step."""
        self._link = link

    def on_growth(self, growths: Sequence[SequenceGrowth]) -> None:
        self.received_at = time.monotonic()
        self._queue(growths)

    def on_failure(self, failure: SequenceFailure) -> None:
        self._queue((failure,))

    def on_connected(self, info: DraftInfo) -> None:
        self._queue((Connected(info),))

    def on_disconnected(self, reason: str) -> None:
        self._queue((Disconnected(reason),))

    def on_lost(self, sequence_ids: Sequence[int]) -> None:
        self._queue((Lost(tuple(sequence_ids)),))

    def _queue(self, events: Iterable[DraftEvent]) -> None:
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
        if self._calls_behind < _CALLS_BEHIND or time.monotonic() - self._behind_since < _SECONDS_BEHIND:
            return
        self._calls_behind = 0
        with self._wake:
            # Events about the connection itself are kept.
            kept = [event for event in self._events if isinstance(event, Connected | Disconnected | Lost)]
            self._events.clear()
            self._events.extend(kept)
        self._cut_off("it sends more than there is time to read")

    @abstractmethod
    def _handle(self, event: DraftEvent) -> None:
        """Handle one event."""

    @abstractmethod
    def _cut_off(self, reason: str) -> None:
        """Disconnect a draft that sends more than can be read; its queued events about sequences were dropped."""

    def _wait_until(self, deadline: float) -> bool:
        """Wait for an event until a time of the monotonic clock; returns whether there is one."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._events), timeout=deadline - time.monotonic())
