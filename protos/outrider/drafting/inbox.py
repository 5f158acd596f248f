"""What a draft says, from any thread to the engine's."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

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


class DraftInbox:
    """`DraftEvents` that queue and wake whoever waits. The `on_...` methods may be called from any thread."""

    def __init__(self) -> None:
        self._events: deque[DraftEvent] = deque()
        self._wake = threading.Condition()
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

    def _received(self) -> Iterator[DraftEvent]:
        """Everything that was said, in order, without waiting."""
        while self._events:
            yield self._events.popleft()

    @property
    def _waiting(self) -> bool:
        """Whether something was said that was not taken."""
        return bool(self._events)

    def _forget_growth(self) -> None:
        """Drop what was said of sequences, and keep what was said of the draft itself."""
        with self._wake:
            kept = [event for event in self._events if isinstance(event, Connected | Disconnected | Lost)]
            self._events.clear()
            self._events.extend(kept)

    def _wait_until(self, deadline: float) -> bool:
        """Wait for something to be said, to a time of the monotonic clock. Whether there is something."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._events), timeout=deadline - time.monotonic())
