"""How long the draft takes to answer, and whether it keeps its time."""

from __future__ import annotations

import time

# What one answer moves the time that the next is expected to take.
_SHARE = 0.1
# For so long a draft may read a prompt, and compile what it needs for that, before its silence means anything.
_BEGINNING = 5.0


class DraftLatency:
    """Clock and breaker of the engine's draft. Times are of the monotonic clock, in seconds."""

    def __init__(self, failures_to_open: int) -> None:
        """After so many late answers in a row waiting does not pay, until one comes in time."""
        self._failures_to_open = failures_to_open
        self._late = 0
        self._sent_at = 0.0
        self._begun_at = -_BEGINNING
        # Of the last answer, until it is taken.
        self._round_trip_ns = 0
        # 0 before the first answer.
        self._answer_seconds = 0.0

    @property
    def waiting_pays(self) -> bool:
        """Whether the draft has kept its time lately."""
        return self._late < self._failures_to_open

    @property
    def answer_seconds(self) -> float:
        """What it takes to answer, lately; 0 before the first answer."""
        return self._answer_seconds

    @property
    def beginning(self) -> bool:
        """Whether the draft has drafted nothing since it began with what it follows, and may still be at that."""
        return time.monotonic() < self._begun_at + _BEGINNING

    def begin(self) -> None:
        """The draft is given its first sequence, after a time with none. Whether it was late before is forgotten."""
        self._begun_at = time.monotonic()
        self._late = 0

    def received(self) -> None:
        """It has drafted something."""
        self._begun_at = -_BEGINNING

    def sent(self) -> None:
        """A step was sent to the draft."""
        self._sent_at = time.monotonic()

    def answered(self, at: float) -> None:
        """It has answered what was sent last, or something before that."""
        if at > self._sent_at:
            self._round_trip_ns = round((at - self._sent_at) * 1e9)
            took = at - self._sent_at
            self._answer_seconds += (_SHARE if self._answer_seconds else 1.0) * (took - self._answer_seconds)

    def take_round_trip(self) -> int:
        """Nanoseconds from sending to the draft to its last answer; 0 where none came since the last call."""
        taken, self._round_trip_ns = self._round_trip_ns, 0
        return taken

    def late(self) -> None:
        """It was waited for in vain."""
        self._late += 1

    def in_time(self) -> None:
        """It answered while somebody waited, or soon enough."""
        self._late = 0
