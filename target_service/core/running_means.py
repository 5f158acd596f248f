"""Running means of recent observations: times and tokens of passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median_low


@dataclass(slots=True)
class RunningMean:
    """The mean of all observations, and once they are more than 1 / `share`, an EWMA with weight `share`. An initial
    `value` counts for `count` observations."""

    share: float
    value: float = 0.0
    count: int = 0

    @classmethod
    def settled(cls, share: float, value: float) -> RunningMean:
        """An EWMA from the start, with an initial value."""
        return cls(share, value, math.ceil(1 / share))

    def observe(self, value: float) -> None:
        """Add an observation. Several are in every step: a call of `max` would take half of the time."""
        self.count += 1
        share = 1 / self.count
        self.value += (share if share > self.share else self.share) * (value - self.value)


@dataclass(slots=True)
class RunningTime(RunningMean):
    """The time of passes of a kind: the median of the first few, in which kernels are compiled and graphs captured,
    then a running mean in which no pass counts for more than `most` times the sum of mean and `unit`."""

    # More than compile, so that the median is of one that does not; and what held one pass up must not count as many.
    # Both chosen.
    first_few: int = 9
    most: float = 3.0
    unit: float = 0.0
    first: list[float] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether the next observation is one of the first few."""
        return len(self.first) == self.count < self.first_few

    def observe(self, value: float) -> None:
        if self.count < self.first_few and self.is_first:
            self.count += 1
            self.first.append(value)
            self.value = median_low(self.first)
        else:
            most = self.most * (self.unit + self.value)
            RunningMean.observe(self, value if value < most else most)
