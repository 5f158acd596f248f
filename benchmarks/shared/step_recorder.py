"""An `EngineObserver` that keeps what every step cost, and a summary of that."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from target_service.core.sequence import SequenceRequest, SequenceTotals, StepStats

_PHASES = tuple(field.name for field in dataclasses.fields(StepStats) if field.name.endswith("_ns"))


class StepRecorder:
    """Steps since they were last taken, in order, each with the monotonic time of its end in nanoseconds."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, StepStats]] = []

    def on_step(self, stats: StepStats) -> None:
        self._steps.append((time.monotonic_ns(), stats))

    def on_finished(self, sequence_id: int, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        """Sequences are counted by their events."""

    def on_speculation(self, active: bool) -> None:
        """Nothing to keep."""

    def pop_steps(self) -> list[tuple[int, StepStats]]:
        """Return and drop the recorded steps."""
        taken, self._steps = self._steps, []
        return taken


def summarise(steps: Sequence[tuple[int, StepStats]]) -> dict[str, Any]:
    """Of steps without and with prompt rows: their number, rows, and medians of milliseconds, in all and by phase.

    `interval_ms` is from the end of the step before to the end of this one, and so has what no phase has.
    """
    kinds: dict[str, list[tuple[StepStats, float]]] = {"decode": [], "prompt": []}
    previous = None
    for end, stats in steps:
        interval = (end - previous) * 1e-6 if previous is not None else stats.total_ns * 1e-6
        previous = end
        kinds["prompt" if stats.prefill_rows else "decode"].append((stats, interval))
    return {kind: _summary(of_kind) for kind, of_kind in kinds.items() if of_kind}


def _summary(steps: Sequence[tuple[StepStats, float]]) -> dict[str, Any]:
    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 4)

    every = [stats for stats, _ in steps]
    return {
        "steps": len(steps),
        "rows": median([one.decode_rows + one.prefill_rows for one in every]),
        "sequences": median([one.sequences for one in every]),
        "interval_ms": median([interval for _, interval in steps]),
        "ms": {name.removesuffix("_ns"): median([getattr(one, name) * 1e-6 for one in every]) for name in _PHASES},
        "tokens": sum(one.committed_tokens for one in every),
        "drafted_sequences": sum(one.drafted_sequences for one in every),
        "committed_sequences": sum(one.committed_sequences for one in every),
        "fallback_sequences": sum(one.fallback_sequences for one in every),
        "seconds": round(sum(interval for _, interval in steps) * 1e-3, 4),
    }


def line(summary: dict[str, Any]) -> str:
    """A summary as one line, without phases that take no time."""
    parts = []
    for kind, of_kind in summary.items():
        phases = " ".join(f"{name} {ms:.3f}" for name, ms in of_kind["ms"].items() if ms >= 5e-4)
        parts.append(
            f"{of_kind['steps']} {kind} steps of {of_kind['rows']:g} rows: {of_kind['interval_ms']:.3f} ms ({phases})"
        )
    return "; ".join(parts)
