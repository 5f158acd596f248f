"""The observer of an engine, and the clock of a step's phases."""

from __future__ import annotations

import time
from typing import Protocol

from target_service.core.sequence import SequenceRequest, SequenceTotals, StepStats


class EngineObserver(Protocol):
    """Receives what the engine did. Called from the engine's thread; must be quick and must not raise."""

    def on_step(self, stats: StepStats) -> None:
        """One step ran."""

    def on_finished(self, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        """A sequence ended; `outcome` is its finish reason, "cancelled", or an error's reason."""

    def on_speculation(self, active: bool) -> None:
        """Drafting was switched on or off by load."""


class StepClock:
    """When a step's phases ended, in monotonic nanoseconds. Phases end in the order of the methods."""

    def __init__(self) -> None:
        self.begun = time.monotonic_ns()
        self.planned = self.launched = self.forwarded = self.verified = self.committed = self.begun
        self._waits_since = self.begun

    def end_plan(self) -> None:
        """The step is laid out."""
        self.planned = time.monotonic_ns()

    def end_launch(self) -> None:
        """The host is free again. If it computed the step itself, the forward pass is over too."""
        self.launched = self.forwarded = time.monotonic_ns()

    def begin_wait(self) -> None:
        """The host only waits for the device from now on."""
        self._waits_since = time.monotonic_ns()

    @property
    def waited_ns(self) -> int:
        """How long the host waited, once the forward pass has ended."""
        return self.forwarded - self._waits_since

    def end_forward(self) -> None:
        """The device's results are there."""
        self.forwarded = time.monotonic_ns()

    def end_verify(self) -> None:
        """Every tree's outcome is known."""
        self.verified = time.monotonic_ns()

    def end_commit(self) -> None:
        """Tokens are committed, and sent to the draft."""
        self.committed = time.monotonic_ns()
