"""How the time for tuning is spent."""

from __future__ import annotations

from dataclasses import dataclass

# Pairs of blocks at each load without which a ratio says next to nothing: two degrees of freedom. Chosen.
LEAST_PAIRS = 3
# Of the whole time: for measuring the settings in force against plain decoding, which nothing is chosen by. Chosen.
SPECULATION_SHARE = 0.15
# Of the time that is left once the settings in force are measured: for measuring the best candidate once more, on which
# the choice rests. Chosen: that decides alone, and each of the others is only one of several.
FINAL_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that things take here: to `change` a draft for another, and a `pair` of blocks at all loads."""

    change: float
    pair: float

    @property
    def least(self) -> float:
        """The least that measuring a candidate takes."""
        return self.change + LEAST_PAIRS * self.pair

    @property
    def barely(self) -> float:
        """What it takes to see any spread at all: two pairs."""
        return self.change + 2 * self.pair


def final_seconds(left: float, costs: Costs) -> float:
    """What of the time that is `left` for all candidates is kept for the best one's second measurement."""
    return max(left * FINAL_SHARE, costs.least)


def next_share(left: float, kept: float, waiting: int, first: bool, costs: Costs) -> float:
    """Seconds for the next of `waiting` candidates, its start included; 0 where there is not enough for one.

    As many as can be measured at all get the same, so with little time the first few are measured and the others are
    not. What one leaves over, or takes too much, is the others'. Of `left`, `kept` is for the end; but where a single
    candidate can be measured and no end, the `first` gets all of it: the best of one is not the luckiest of several, so
    its only measurement can be trusted.
    """
    affordable = min(waiting, int((left - kept) / costs.least))
    if affordable > 0:
        return (left - kept) / affordable
    return left if first and left >= costs.barely else 0.0


def measurable(left: float, waiting: int, costs: Costs) -> int:
    """How many of `waiting` candidates `next_share` finds time for, where `left` is all that there is."""
    if not waiting or left < costs.barely:
        return 0
    return max(1, min(waiting, int((left - final_seconds(left, costs)) / costs.least)))


def seconds_for_all(spent: float, waiting: int, costs: Costs) -> float:
    """About what it takes to measure `waiting` candidates and the best once more, beside what is `spent` on starting
    services and on the settings in force."""
    return spent + waiting * costs.least / (1.0 - FINAL_SHARE)
