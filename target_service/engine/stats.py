"""The observer of an engine, and the clock of a step's phases."""

from __future__ import annotations

import time
from typing import Protocol

from target_service.core.sequence import SequenceRequest, SequenceTotals, StepStats


class EngineObserver(Protocol):
    """Receives what the engine did. Called from the engine's thread; must be quick and must not raise."""

    def on_step(self, stats: StepStats) -> None:
        """One step ran."""

    def on_finished(self, sequence_id: int, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        """A sequence ended; `outcome` is its finish reason, "cancelled", or an error's reason."""

    def on_speculation(self, active: bool) -> None:
        """Drafting was switched on or off by load."""


class StepClock:
    """When a step's phases ended, in monotonic nanoseconds, in the order of the attributes.

    Attributes:
        planned: the step is laid out.
        launched: the host is free again. If it computed the step itself, the forward pass has ended too: `forwarded`
            is set with it.
        waits_since: the host began to wait for the device.
        forwarded: the device's results have arrived.
        verified: every tree's outcome is known.
        committed: tokens are committed, and sent to the draft.
    """

    def __init__(self) -> None:
        self.begun = time.monotonic_ns()
        self.planned = self.launched = self.forwarded = self.verified = self.committed = self.begun
        self.waits_since = self.begun

    @property
    def waited_ns(self) -> int:
        """How long the host waited for the device, once the forward pass has ended."""
        return self.forwarded - self.waits_since
