"""What a step tells of itself: its phases, and the figures that metrics are made of."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from outrider.tree import TokenTree
from target_service.batch import StepBatch
from target_service.sequence import SequenceRequest, SequenceTotals, StepStats, Verdict


class EngineObserver(Protocol):
    """Hears what the engine did. Called from the engine's thread; must be quick and must not raise."""

    def on_step(self, stats: StepStats) -> None:
        """One step ran."""

    def on_finished(self, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        """A sequence ended: by its finish reason, as "cancelled", or by an error's reason."""

    def on_speculation(self, active: bool) -> None:
        """Drafting was switched by load."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The draft's part of a step: a tree per chunk, and what waiting for it cost."""

    trees: list[TokenTree | None]
    wait_ns: int
    # Sequences that wanted a draft and went on without one.
    fallbacks: int


class StepPhases:
    """Nanoseconds of a step's phases, in order: plan (waiting for the draft included), forward, verify, commit."""

    def __init__(self) -> None:
        self._marks = [time.monotonic_ns()]

    def end(self) -> None:
        """The phase under way is over, and the next begins."""
        self._marks.append(time.monotonic_ns())

    def of(self, phase: int) -> int:
        """Nanoseconds of a phase that is over, counted from 0."""
        return self._marks[phase + 1] - self._marks[phase]

    @property
    def total(self) -> int:
        """Nanoseconds of all phases that are over."""
        return self._marks[-1] - self._marks[0]


def step_stats(batch: StepBatch, gathered: Gathered, verdicts: SequenceOf[Verdict], phases: StepPhases) -> StepStats:
    """The figures of one step whose four phases are over."""
    drafted = [item.tree.drafted for item in batch.items if item.tree is not None]
    return StepStats(
        sequences=len(batch.items),
        committed_sequences=len(verdicts),
        drafted_sequences=sum(count > 0 for count in drafted),
        decode_rows=batch.decode_rows,
        prefill_rows=batch.prefill_rows,
        drafted_tokens=sum(drafted),
        accepted_tokens=sum(verdict.drafted_tokens for verdict in verdicts),
        committed_tokens=sum(len(verdict.token_ids) for verdict in verdicts),
        fallback_sequences=gathered.fallbacks,
        draft_wait_ns=gathered.wait_ns,
        plan_ns=phases.of(0) - gathered.wait_ns,
        forward_ns=phases.of(1),
        verify_ns=phases.of(2),
        commit_ns=phases.of(3),
        total_ns=phases.total,
    )
