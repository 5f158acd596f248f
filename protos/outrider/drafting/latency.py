"""How long the draft takes to answer, and whether it answers in time."""

from __future__ import annotations

import time

# Seconds that a draft without sequences may take to read the next prompt, and compile for it, before it is late.
_BEGINNING = 5.0


class DraftLatency:
    """Latency and circuit breaker of the engine's draft. Times are of the monotonic clock, in seconds."""

    def __init__(self, failures_to_open: int) -> None:
        """After `failures_to_open` late answers in a row waiting does not pay, until one comes in time."""
        self._failures_to_open = failures_to_open
        self._late = 0
        self._sent_at = 0.0
        self._begun_at = -_BEGINNING
        # Of the last answer, until it is taken.
        self._round_trip_ns = 0
        # Moving average of the time to answer; 0 before the first answer.
        self.answer_seconds = 0.0

    @property
    def waiting_pays(self) -> bool:
        """Whether the draft has answered in time lately."""
        return self._late < self._failures_to_open

    @property
    def beginning(self) -> bool:
        """Whether the draft has drafted nothing since it last had no sequence, and may still be preparing."""
        return time.monotonic() < self._begun_at + _BEGINNING

    def expect_first_answer(self) -> None:
        """The draft is sent a sequence when it has none. Earlier late answers are forgotten."""
        self._begun_at = time.monotonic()
        self._late = 0

    def received(self) -> None:
        self._begun_at = -_BEGINNING

    def sent(self) -> None:
        self._sent_at = time.monotonic()

    def answered(self, at: float) -> None:
        """The draft answered, at this time, what was sent last or something before that."""
        if at > self._sent_at:
            took = at - self._sent_at
            self._round_trip_ns = round(took * 1e9)
            # Weight of the newest answer in the moving average (EWMA).
            self.answer_seconds += (0.1 if self.answer_seconds else 1.0) * (took - self.answer_seconds)

    def take_round_trip(self) -> int:
        """Nanoseconds from sending to the draft until its last answer; 0 if none came since the last call."""
        taken, self._round_trip_ns = self._round_trip_ns, 0
        return taken

    def late(self) -> None:
        """A wait for the draft timed out."""
        self._late += 1

    def in_time(self) -> None:
        """The draft answered during a wait, or soon enough."""
        self._late = 0
