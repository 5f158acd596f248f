"""What a step takes by its rows."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf

from target_service.core.running_means import bounded

# What one live step may move the cost of its size, and how far from the estimate a step is believed: one step moves it
# by a twentieth at most, ten that take half as long again move it two thirds of the way. Chosen, not measured.
_LIVE_SHARE = 0.1
_LIVE_BOUND = 1.5
# Steps of other sizes after which a size moves as those do. Chosen: where a simulated machine becomes forty times as
# fast, a size that is not run any more ends 1.3 times as dear as it should; sizes that take turns learn of their own.
_UNSEEN = 16


class StepCost:
    """Seconds of a step by its rows: measured at a few sizes, straight lines between, corrected by what steps take.

    A size that was measured while the machine was busy with something else would otherwise be shunned, or sought,
    for ever. A machine becomes faster and slower as a whole, so a size that was not seen lately moves with those that
    are: only ratios of costs matter, and what rows cost would seem to have risen when a step alone became cheap.
    """

    def __init__(self, measured: SequenceOf[tuple[int, float]]) -> None:
        """`measured`: (rows, seconds) with rising rows. Costs are made to rise with rows, which noise may hide."""
        if not measured:
            raise ValueError("needs at least one measured size")
        self._rows = [rows for rows, _ in measured]
        self._measured = [cost for _, cost in measured]
        # Steps since each size was seen itself.
        self._unseen = [0] * len(measured)
        self._seconds: list[float] = []
        self._smooth()

    def _smooth(self) -> None:
        seconds = list(self._measured)
        for i in range(1, len(seconds)):
            seconds[i] = max(seconds[i], seconds[i - 1])
        self._seconds = seconds

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

    def of_each_more(self, rows: int, count: int) -> list[float]:
        """What each of so many further rows adds, one after the other."""
        prices: list[float] = []
        while len(prices) < count:
            at = rows + len(prices)
            # Up to the end of a straight line each costs the same.
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
        # Bounded, so that one pause of the machine does not count as what rows cost.
        expected = self(rows)
        factor = 1 + _LIVE_SHARE * (bounded(seconds, expected, _LIVE_BOUND) / expected - 1)
        for size, unseen in enumerate(self._unseen):
            self._unseen[size] = 0 if size == i else unseen + 1
            self._measured[size] *= factor if size == i else factor ** min(1.0, unseen / _UNSEEN)
        self._smooth()
