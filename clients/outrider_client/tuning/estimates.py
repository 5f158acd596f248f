"""How much faster one way is than another, and how sure that is; the choice that follows from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Quantiles of Student's t for two-sided 95 %, by degrees of freedom from 1 on; then about the normal law's.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
_T95_MANY = 2.09


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of speeds. `mean` and `error` are of its logarithm, `freedom` the degrees of freedom of the error; with
    none, nothing is known of it."""

    mean: float
    error: float
    freedom: int

    @property
    def ratio(self) -> float:
        return math.exp(self.mean)

    @property
    def low(self) -> float:
        """The low end of the interval that holds the ratio with 95 %."""
        return math.exp(self.mean - self._half)

    @property
    def high(self) -> float:
        return math.exp(min(self.mean + self._half, 700.0))

    @property
    def _half(self) -> float:
        if self.freedom < 1:
            return math.inf
        return self.error * (_T95[self.freedom - 1] if self.freedom <= len(_T95) else _T95_MANY)


def estimate(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """The ratio of first to second of `pairs` of speeds, each pair of the same work at nearly the same time.

    The mean is the geometric one, which calls twice as fast and half as fast equal. Speeds are above 0; no pairs are an
    estimate of 1 that knows nothing.
    """
    logs = [math.log(first / second) for first, second in pairs]
    if len(logs) < 2:
        return Estimate(sum(logs), math.inf, 0)
    return Estimate(statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def over_loads(estimates: Sequence[Estimate]) -> Estimate:
    """The geometric mean of one ratio at several loads, each of which counts the same. As sure as the least sure."""
    count = len(estimates)
    return Estimate(
        sum(one.mean for one in estimates) / count,
        math.sqrt(sum(one.error**2 for one in estimates)) / count,
        min(one.freedom for one in estimates),
    )


def most_promising(estimates: Sequence[Estimate]) -> int | None:
    """The place of the candidate that is worth measuring once more: the fastest, the first of equals; None where none
    was faster than the settings in force.

    The best of many is too good by the luck that made it the best, so this decides nothing: `better` does, from figures
    taken afterwards.
    """
    best = max(range(len(estimates)), key=lambda place: estimates[place].mean, default=None)
    return None if best is None or estimates[best].mean <= 0.0 else best


def better(confirmed: Estimate) -> bool:
    """Whether a candidate is faster beyond the noise: the whole interval is above 1."""
    return confirmed.low > 1.0
