"""How the time for tuning is spent."""

from __future__ import annotations

from dataclasses import dataclass

# Least pairs of blocks at each load for a useful ratio: two degrees of freedom. Chosen.
LEAST_PAIRS = 3
# Share of the remaining time for measuring the best candidate once more. Chosen: that measurement alone decides, and
# each of the others is only one of several.
FINAL_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds: to `change` a draft for another, and of a `pair` of blocks at all loads."""

    change: float
    pair: float

    @property
    def least(self) -> float:
        """Least seconds for measuring a candidate."""
        return self.change + LEAST_PAIRS * self.pair

    @property
    def barely(self) -> float:
        """Least seconds for any spread at all: two pairs."""
        return self.change + 2 * self.pair


def final_seconds(left: float, costs: Costs) -> float:
    """Seconds of those `left` for all candidates that are kept for the best one's second measurement."""
    return max(left * FINAL_SHARE, costs.least)


def next_share(left: float, kept: float, waiting: int, first: bool, costs: Costs) -> float:
    """Seconds for the next of `waiting` candidates, its start included; 0 where there is not enough for one. As many as
    can be measured get equal shares, so with little time the first few are measured and the others are not. What one
    leaves or overruns changes the shares of the rest. Of `left`, `kept` is for the second measurement; where there is
    no time for one, the `first` candidate gets all of it: the only one is not the luckiest of several, so its one
    measurement can be trusted."""
    affordable = min(waiting, int((left - kept) / costs.least))
    if affordable > 0:
        return (left - kept) / affordable
    return left if first and left >= costs.barely else 0.0


def measurable(left: float, waiting: int, costs: Costs) -> int:
    """How many of `waiting` candidates can be measured in the `left` seconds, by the rule of `next_share`."""
    if not waiting or left < costs.barely:
        return 0
    return max(1, min(waiting, int((left - final_seconds(left, costs)) / costs.least)))


def seconds_for_all(spent: float, waiting: int, costs: Costs) -> float:
    """Estimated seconds for all `waiting` candidates and the second measurement, with those `spent` before them."""
    return spent + waiting * costs.least / (1.0 - FINAL_SHARE)
