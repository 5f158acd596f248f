"""What a draft says, from any thread to the engine's."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from outrider.drafting.listening import ListeningTime
from outrider.wire.frames import DraftInfo, SequenceFailure, SequenceGrowth


@dataclass(frozen=True, slots=True)
class Connected:
    """A draft is there."""

    info: DraftInfo


@dataclass(frozen=True, slots=True)
class Disconnected:
    """It is gone, or could not be reached."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The draft that followed these sequences is gone, and another is there."""

    sequence_ids: tuple[int, ...]


DraftEvent = SequenceGrowth | SequenceFailure | Connected | Disconnected | Lost


class DraftInbox(ABC):
    """`DraftEvents` that queue and wake whoever waits. The `on_...` methods may be called from any thread."""

    def __init__(self) -> None:
        self._events: deque[DraftEvent] = deque()
        self._wake = threading.Condition()
        self._listening = ListeningTime()
        # When a growth came last, on the monotonic clock.
        self.received_at = 0.0

    def on_growth(self, growths: SequenceOf[SequenceGrowth]) -> None:
        self.received_at = time.monotonic()
        self._queue(growths)

    def on_failure(self, failure: SequenceFailure) -> None:
        self._queue((failure,))

    def on_connected(self, info: DraftInfo) -> None:
        self._queue((Connected(info),))

    def on_disconnected(self, reason: str) -> None:
        self._queue((Disconnected(reason),))

    def on_lost(self, sequence_ids: SequenceOf[int]) -> None:
        self._queue((Lost(tuple(sequence_ids)),))

    def _queue(self, events: Iterable[DraftEvent]) -> None:
        with self._wake:
            self._events.extend(events)
            self._wake.notify_all()

    def listen(self) -> None:
        """Take in what has arrived, in order and without waiting: all of it, unless that takes too long."""
        listening = self._listening
        listening.begin()
        while self._events:
            self._handle(self._events.popleft())
            if listening.over:
                break
        if listening.end(emptied=not self._events):
            with self._wake:
                # What was said of the draft itself is kept.
                kept = [event for event in self._events if isinstance(event, Connected | Disconnected | Lost)]
                self._events.clear()
                self._events.extend(kept)
            listening.forget()
            self._cut_off("what it says takes more time than there is for it")

    @abstractmethod
    def _handle(self, event: DraftEvent) -> None:
        """Take in one event."""

    @abstractmethod
    def _cut_off(self, reason: str) -> None:
        """Part from a draft that says more than can be taken in; what it had said of sequences is dropped."""

    def _wait_until(self, deadline: float) -> bool:
        """Wait for something to be said, to a time of the monotonic clock. Whether there is something."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._events), timeout=deadline - time.monotonic())
