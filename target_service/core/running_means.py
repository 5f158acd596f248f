"""Means of what was observed lately: what passes take, and what they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median_low


def bounded(value: float, about: float, factor: float) -> float:
    """The value, taken no further from another than by a factor, so that a pause of the machine counts for little."""
    return min(factor * about, max(about / factor, value))


@dataclass(slots=True)
class RunningMean:
    """The mean of all that was observed, until one observation is less than `share` of them; from then on that of the
    last 1 / `share` or so (EWMA). A first guess counts for as many observations as `count` begins with."""

    share: float
    value: float = 0.0
    count: int = 0

    @classmethod
    def settled(cls, share: float, value: float) -> RunningMean:
        """One whose first guess counts for as much as it ever will."""
        return cls(share, value, math.ceil(1 / share))

    def observe(self, value: float) -> None:
        """Take one more into account. Several are in every step: a call of `max` would take half of the time."""
        self.count += 1
        share = 1 / self.count
        self.value += (share if share > self.share else self.share) * (value - self.value)


@dataclass(slots=True)
class RunningTime(RunningMean):
    """What passes of a kind take: the median of the first few, in which kernels are compiled and graphs captured, and
    then what it drifts to, where no pass counts for more than `most` times the mean and `unit` together."""

    first_few: int = 1
    most: float = 1.0
    unit: float = 0.0
    first: list[float] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether the next is one of the first few."""
        return len(self.first) == self.count < self.first_few

    def observe(self, value: float) -> None:
        if self.count < self.first_few and self.is_first:
            self.count += 1
            self.first.append(value)
            self.value = median_low(self.first)
        else:
            most = self.most * (self.unit + self.value)
            RunningMean.observe(self, value if value < most else most)


class PassRate:
    """What passes of a kind made lately, in tokens of a sequence and seconds."""

    # Passes whose median is what a pass takes at first, and how much of a longer one counts later.
    _FIRST_FEW, _MOST = 9, 3.0

    def __init__(self, share: float) -> None:
        """`share` of one pass in the means."""
        self._tokens = RunningMean(share)
        self._seconds = RunningTime(share, first_few=self._FIRST_FEW, most=self._MOST)

    @property
    def count(self) -> int:
        """Passes observed."""
        return self._tokens.count

    @property
    def rate(self) -> float:
        """Tokens of a sequence a second; 0 before the first pass."""
        return self._tokens.value / self._seconds.value if self._seconds.value else 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """A pass made so many tokens of each sequence, in so many seconds."""
        self._tokens.observe(tokens)
        self._seconds.observe(seconds)
