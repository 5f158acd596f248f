"""What steps take that wait for drafts, and what drafts make of them.

Counted in plain steps, so that machines and models of any speed are judged alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from statistics import median_low

# Steps of a kind at one load before their time is believed: fewer drafted ones of several sequences, which cost more,
# and more plain ones where they are launched ahead, which until then have found how many passes to launch at once.
ENOUGH, ENOUGH_OF_MANY, ENOUGH_AHEAD = 8, 4, 40
# Steps that what a lower load has shown counts for.
_INHERITED = 2
# Steps of a kind in a row that are believed if all of them were shorter: what makes a step long may pass.
_IN_A_ROW = 4
# What one step moves the time of its kind, and how far from it a step is believed: the mean of some ten, and no
# step moves that of plain ones by more than a tenth. Chosen, not measured.
_SHARE = 0.1
_BOUND = 2.0


class Use(Enum):
    """How a step uses drafts."""

    # It has none, or those that the device chooses.
    PLAIN = "plain"
    # It waits for those of the tokens that are known, and nothing runs meanwhile.
    AFTER = "after"


def enough_plain(*, ahead: bool) -> int:
    """Plain steps that are enough to know them."""
    return ENOUGH_AHEAD if ahead else ENOUGH


@dataclass(slots=True)
class Ewma:
    """What steps of a kind take, in plain steps or what is near to one: the median of the first few, in which kernels
    are compiled and graphs captured, and then what it drifts to; never more than the longest of the last few."""

    value: float = 0.0
    count: int = 0
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_IN_A_ROW))

    def observe(self, value: float, enough: int) -> None:
        self.count += 1
        self.last.append(value)
        if len(self.first) + 1 == self.count <= enough:
            self.first.append(value)
            self.value = median_low(self.first)
            return
        # A pause of the machine counts for little, what always takes long is known after a few steps.
        bounded = min(_BOUND * (1 + self.value), value)
        self.value += max(_SHARE, 1 / self.count) * (bounded - self.value)
        if len(self.last) == _IN_A_ROW:
            self.value = min(self.value, max(self.last))

    def count_from(self, value: float) -> None:
        """Counted in other units from now on."""
        self.value = value
        self.last.clear()

    def warm_start(self) -> Ewma:
        """The same, which a few steps outweigh."""
        return Ewma(self.value, min(self.count, _INHERITED))


@dataclass(slots=True)
class LoadTimes:
    """What steps take at one load: a plain one in seconds, the others in plain ones."""

    plain: float = 0.0
    plain_steps: int = 0
    # Those of them in which no head was fed, and what plain ones took before the first of these.
    unfed_steps: int = 0
    fed: float = 0.0
    # What a step that waited for drafts takes beyond its rows, and the share of those that were answered lately.
    overhead: Ewma = field(default_factory=Ewma)
    answered: float = 1.0
    # Drafted steps of a kind that are enough to know it.
    enough: int = ENOUGH
    # Whether drafts are known from a lower load, until steps of this one say otherwise.
    inherited: bool = False

    def observe_plain(self, seconds: float, *, fed: bool, ahead: bool) -> None:
        """A step without drafts; `fed`, a head was given what it reads of it, and `ahead`, it was launched so."""
        if fed and self.unfed_steps:
            return
        if not fed and not self.unfed_steps:
            self.fed, self.plain_steps = self.plain, 0
        self.plain_steps += 1
        self.unfed_steps += not fed
        if self.plain_steps == 1:
            self.plain = seconds
        else:
            ratio = min(_BOUND, max(1 / _BOUND, seconds / self.plain))
            self.plain *= 1 + max(_SHARE, 1 / self.plain_steps) * (ratio - 1)
        if self.fed and self.unfed_steps == enough_plain(ahead=ahead):
            # What drafts take was counted in longer steps.
            ratio, self.fed = self.fed / self.plain, 0.0
            self.overhead.count_from(max(0.0, (1 + self.overhead.value) * ratio - 1))

    def observe_after(self, seconds: float, row_cost: float, *, answered: bool) -> None:
        """A step that waited for drafts, whose rows take `row_cost` plain ones."""
        self.answered += _SHARE * (answered - self.answered)
        self.overhead.observe(max(0.0, seconds / self.plain - row_cost), self.enough)

    def gain(self, load: int, expected: float) -> float:
        """Tokens of steps that wait for drafts, which promise so many in a plain step's time and that of their rows,
        for each that plain steps would make in the same time."""
        tokens = self.answered * expected / load + 1 - self.answered
        return tokens / (1 + self.overhead.value)

    @property
    def known(self) -> bool:
        """Whether enough was seen of drafts."""
        return self.inherited or self.overhead.count >= self.enough

    def warm_start(self) -> LoadTimes:
        """What is taken for true at the next load, where drafts hardly ever come cheaper; a few steps outweigh it."""
        return LoadTimes(
            overhead=self.overhead.warm_start(), answered=self.answered, enough=ENOUGH_OF_MANY, inherited=self.known
        )
