"""The cost of a step by its rows."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

from target_service.core.running_means import bounded

# The weight of one live step in the cost of its size: ten that take half as long again move it two thirds of the way.
# Chosen.
_LIVE_SHARE = 0.1
# The bound of a live step's factor from the estimate, so that one step moves it by a twentieth at most. Chosen.
_LIVE_BOUND = 1.5
# Steps of other sizes after which a size follows those. Chosen: where a simulated machine becomes forty times as fast,
# a size that no longer runs ends 1.3 times too expensive; sizes that alternate are measured by themselves.
_UNSEEN = 16


class StepCost:
    """Seconds of a step by its rows: measured at a few sizes, interpolated linearly, corrected by live steps.

    Without correction, a size that was measured while the machine was busy would be avoided, or preferred, for ever.
    A machine becomes faster or slower as a whole, so a size that did not run lately moves with those that did: only
    ratios of costs matter, and the others would seem more expensive when one size became cheap.
    """

    def __init__(self, measured: SequenceOf[tuple[int, float]]) -> None:
        """`measured`: (rows, seconds) with rising rows. Costs are made to rise with rows, which noise may hide."""
        if not measured:
            raise ValueError("needs at least one measured size")
        self._rows = [rows for rows, _ in measured]
        self._measured = [cost for _, cost in measured]
        # Steps since each size ran.
        self._unseen = [0] * len(measured)
        self._seconds: list[float] = []
        self._smooth()

    def _smooth(self) -> None:
        self._seconds = list(accumulate(self._measured, max))

    def __call__(self, rows: int) -> float:
        """Estimated seconds of a step with this many rows."""
        i = bisect.bisect_left(self._rows, rows)
        if i == 0:
            return self._seconds[0]
        if i == len(self._rows):
            per_row = self._seconds[-1] / self._rows[-1]
            return self._seconds[-1] + per_row * (rows - self._rows[-1])
        share = (rows - self._rows[i - 1]) / (self._rows[i] - self._rows[i - 1])
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])

    def marginal(self, rows: int, count: int) -> list[float]:
        """Seconds that each of `count` rows more than `rows` adds, one after the other."""
        prices: list[float] = []
        while len(prices) < count:
            at = rows + len(prices)
            # Rows of one line segment cost the same.
            i = bisect.bisect_right(self._rows, at)
            until = self._rows[i] if i < len(self._rows) else rows + count
            prices += [self(at + 1) - self(at)] * min(until - at, count - len(prices))
        return prices

    def observe(self, rows: int, seconds: float) -> None:
        """Correct the nearest measured size by a step of `rows` that took `seconds`."""
        if rows > self._rows[-1]:
            return
        i = bisect.bisect_left(self._rows, rows)
        if i and rows - self._rows[i - 1] < self._rows[i] - rows:
            i -= 1
        # Bounded, so that a pause of the machine hardly counts.
        expected = self(rows)
        factor = 1 + _LIVE_SHARE * (bounded(seconds, expected, _LIVE_BOUND) / expected - 1)
        for size, unseen in enumerate(self._unseen):
            self._unseen[size] = 0 if size == i else unseen + 1
            self._measured[size] *= factor if size == i else factor ** min(1.0, unseen / _UNSEEN)
        self._smooth()
