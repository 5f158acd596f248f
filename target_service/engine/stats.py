"""What a step reports: its phases, and the figures that metrics are made of."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from target_service.core.sequence import SequenceRequest, SequenceTotals, StepStats, Verdict
from target_service.execution.batch import StepBatch
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.gathered import Gathered


class EngineObserver(Protocol):
    """Gets what the engine did. Called from the engine's thread; must be quick and must not raise."""

    def on_step(self, stats: StepStats) -> None:
        """One step ran."""

    def on_finished(self, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        """A sequence ended: by its finish reason, as "cancelled", or by an error's reason."""

    def on_speculation(self, active: bool) -> None:
        """Drafting was switched by load."""


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
        """The host is free again. Where it computes the step itself, the forward pass is over too."""
        self.launched = self.forwarded = time.monotonic_ns()

    def begin_wait(self) -> None:
        """The host has nothing to do but wait for the device."""
        self._waits_since = time.monotonic_ns()

    @property
    def waited_ns(self) -> int:
        """How long it waited, once the forward pass has ended."""
        return self.forwarded - self._waits_since

    def end_forward(self) -> None:
        """The device's results are there."""
        self.forwarded = time.monotonic_ns()

    def end_verify(self) -> None:
        """Every tree's outcome is known."""
        self.verified = time.monotonic_ns()

    def end_commit(self) -> None:
        """Sequences have moved on, and the draft knows."""
        self.committed = time.monotonic_ns()


def step_stats(
    batch: StepBatch,
    gathered: Gathered,
    outcomes: SequenceOf[Verified | None],
    verdicts: SequenceOf[Verdict],
    clock: StepClock,
    free_ns: int,
    *,
    on_device: bool,
    passes: int = 1,
    features: tuple[int, int] = (0, 0),
    device_ns: tuple[int, int] = (0, 0),
    round_trip_ns: int = 0,
    followed: bool = False,
) -> StepStats:
    """The figures of a step that has been committed.

    `free_ns` is when the device had ended the step before: one that was launched ahead begins its forward pass then.
    Not `on_device`, launching is the forward pass itself, and no work beside it. `passes` were launched at once.
    `features` are the vectors sent to the draft since the step before, and their bytes. `device_ns` is how long the
    device was at work on the launch before this one, and idle between the two. `round_trip_ns` is how long the draft
    took for its last answer, and `followed` whether one follows any sequence.
    """
    chosen = [one for outcome in outcomes if outcome is not None for one in outcome.device_passes]
    drafted = [item.tree.drafted for item in batch.items if item.tree is not None]
    if batch.device_rows is not None:
        drafted = [rows for outcome in outcomes if outcome is not None for rows in outcome.drafted_by_pass]
    return StepStats(
        sequences=len(batch.items),
        committed_sequences=sum(verdict.passes for verdict in verdicts),
        drafted_sequences=sum(count > 0 for count in drafted),
        decode_rows=batch.decode_rows,
        prefill_rows=batch.prefill_rows,
        drafted_tokens=sum(drafted),
        accepted_tokens=sum(verdict.drafted_tokens for verdict in verdicts),
        committed_tokens=sum(len(verdict.token_ids) for verdict in verdicts),
        fallback_sequences=gathered.fallbacks,
        draft_wait_ns=gathered.wait_ns,
        plan_ns=clock.planned - clock.begun - gathered.wait_ns,
        launch_ns=clock.launched - clock.planned if on_device else 0,
        forward_ns=clock.forwarded - max(clock.planned, free_ns),
        verify_ns=clock.verified - clock.forwarded,
        commit_ns=clock.committed - clock.verified,
        total_ns=clock.committed - max(clock.begun, free_ns),
        feature_vectors=features[0],
        feature_bytes=features[1],
        hits=sum(one.drafted_from_table > 0 for one in chosen),
        misses=sum(not one.drafted_from_table for one in chosen) if followed else 0,
        chosen_rows=sum(one.drafted for one in chosen),
        chosen_accepted=sum(one.accepted for one in chosen),
        table_rows=sum(one.drafted_from_table for one in chosen),
        table_accepted=sum(one.accepted_from_table for one in chosen),
        expected_tokens=sum(one.expected for one in chosen),
        round_trip_ns=round_trip_ns,
        busy_ns=device_ns[0],
        idle_ns=device_ns[1],
        passes=passes,
    )
