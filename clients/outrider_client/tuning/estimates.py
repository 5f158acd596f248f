"""How much faster one configuration is than another, with what uncertainty, and the choice that follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Quantiles of Student's t for two-sided 95 %, by degrees of freedom from 1; then one for all larger ones.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of speeds. `mean` and `error` are of its logarithm; with 0 degrees of `freedom` the error is unknown."""

    mean: float
    error: float
    freedom: int

    @property
    def ratio(self) -> float:
        return math.exp(self.mean)

    @property
    def low(self) -> float:
        """The low end of the 95 % interval."""
        return math.exp(self.mean - self._half)

    @property
    def high(self) -> float:
        return math.exp(min(self.mean + self._half, 700.0))

    @property
    def _half(self) -> float:
        if self.freedom < 1:
            return math.inf
        return self.error * (_T95[self.freedom - 1] if self.freedom <= len(_T95) else 2.09)


def estimate(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """The ratio of first to second of `pairs` of speeds, each pair of the same work at nearly the same time. The mean
    is the geometric one, which calls twice as fast and half as fast equal. Speeds are above 0; no pairs give a ratio of
    1 without an interval."""
    logs = [math.log(first / second) for first, second in pairs]
    if len(logs) < 2:
        return Estimate(sum(logs), math.inf, 0)
    return Estimate(statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def over_loads(estimates: Sequence[Estimate]) -> Estimate:
    """The geometric mean of one ratio at several loads, equally weighted, with the fewest degrees of freedom of any."""
    error = math.sqrt(sum(one.error**2 for one in estimates)) / len(estimates)
    return Estimate(statistics.fmean(one.mean for one in estimates), error, min(one.freedom for one in estimates))


def most_promising(estimates: Sequence[Estimate]) -> int | None:
    """The index of the candidate to measure once more: the fastest, the first of equals; None where none was faster.
    The best of many is partly the luckiest, so this decides nothing: `better` does, from a later measurement."""
    best = max(range(len(estimates)), key=lambda place: estimates[place].mean, default=None)
    return None if best is None or estimates[best].mean <= 0.0 else best


def better(confirmed: Estimate) -> bool:
    """Whether a candidate is faster beyond the noise: the whole interval is above 1."""
    return confirmed.low > 1.0
