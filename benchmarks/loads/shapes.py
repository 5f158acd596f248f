"""What passes take on a simulated device, and the host beside them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.host.simulated_prompts import pass_seconds
from target_service.execution.batch import StepBatch
from target_service.speculation.policy.step_cost import StepCost

# Rows whose cost is measured at start (`step_cost`).
_COSTED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048)
# Milliseconds of a pass by its rows, Llama-8B on an H200. Up to 128 rows as measured
# (`benchmarks/results/2026-11-29-h200-heads-behind-passes.md`); above so that passes of 768 rows with their head and
# keys take what they took in a service, 18.9 (`2026-11-29-h200-windowed-head.md`), and a prompt of 6,100 tokens 157
# (`2026-11-29-h200-prompt-attention.md`): a tenth less than the same passes take alone.
HEADED_PASS_MS = ((1, 4.3), (32, 4.31), (64, 4.58), (128, 5.23), (256, 6.5), (768, 15.4), (2048, 40.0))
# Of the head behind it, in the first of these records: reading it, by its rows, and growing, by sequences at most.
_READ_MS, _READ_ROW_MS = 0.13, 0.78e-3
_GROW_MS = ((4, 1.05), (16, 0.95), (32, 0.88), (64, 0.82), (256, 0.45))
# For each row of a prompt and key before it, and for each key of a sequence that decodes: from 768 and 2,048 rows
# behind 3,072 tokens, and eight trees behind 8,192 (the last of these records).
_ROW_KEY_MS, _KEY_MS = 1.15e-6, 6e-5


@dataclass(frozen=True)
class LoadedShape:
    """Times: of a pass as a multiple of an 8B shape's, and seconds of the host for a launch and for a commit, and for
    each sequence of either; what a sequence with a draft takes besides; and of a draft's answer."""

    scale: float = 1.0
    host: float = 2.5e-4
    host_each: float = 8e-6
    host_drafted: float = 6e-6
    answer: float = 6e-4
    answer_each: float = 4e-5
    following: float = 0.03

    def seconds(self, rows: int, sequences: int, *, followed: bool) -> float:
        """Of a pass of a captured size."""
        return self.scale * pass_seconds(rows, sequences) * (1 + self.following * followed)

    def of_step(self, batch: StepBatch, rows: int, *, followed: bool) -> float:
        """Of a pass of a step."""
        return self.seconds(rows, len(batch.items), followed=followed)

    def cost(self) -> StepCost:
        return StepCost([(rows, self.seconds(rows, 1, followed=False)) for rows in _COSTED])


def _interpolated(points: Sequence[tuple[int, float]], at: int) -> float:
    sizes, values = zip(*points, strict=True)
    i = min(max(1, bisect.bisect_left(sizes, at)), len(sizes) - 1)
    share = (at - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return float(values[i - 1] + share * (values[i] - values[i - 1]))


@dataclass(frozen=True)
class HeadedShape(LoadedShape):
    """An 8B shape on an H200, with a head behind its passes."""

    def seconds(self, rows: int, sequences: int, *, followed: bool) -> float:
        """See `LoadedShape.seconds`: without keys before the rows."""
        head = _READ_MS + _READ_ROW_MS * rows
        grown = next((ms for most, ms in _GROW_MS if sequences <= most), 0.0)
        return 1e-3 * (_interpolated(HEADED_PASS_MS, rows) + followed * (head + grown))

    def of_step(self, batch: StepBatch, rows: int, *, followed: bool) -> float:
        """See `LoadedShape.of_step`."""
        keys = sum([one.start * (_KEY_MS if one.known == 1 else _ROW_KEY_MS * one.known) for one in batch.items])
        return self.seconds(rows, len(batch.items), followed=followed) + 1e-3 * keys


SHAPES = {"8b": LoadedShape(), "small": LoadedShape(scale=0.12)}
