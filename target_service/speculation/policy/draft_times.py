"""What steps take that wait for drafts, and what drafts make of them.

Counted in plain steps, so that machines and models of any speed are judged alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from target_service.core.running_means import RunningMean, RunningTime, bounded

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
class StepTime(RunningTime):
    """What steps of a kind take, in plain steps or what is near to one; never more than the longest of the last few."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=_IN_A_ROW))

    @classmethod
    def of(cls, first_few: int = ENOUGH) -> StepTime:
        """Nothing observed yet."""
        return cls(_SHARE, first_few=first_few, most=_BOUND, unit=1.0)

    def observe(self, value: float) -> None:
        is_first = self.is_first
        self.last.append(value)
        RunningTime.observe(self, value)
        # What always takes long is known after a few steps.
        if not is_first and len(self.last) == _IN_A_ROW:
            self.value = min(self.value, max(self.last))

    def count_from(self, value: float) -> None:
        """Counted in other units from now on."""
        self.value = value
        self.last.clear()

    def warm_start(self) -> StepTime:
        """The same, which a few steps outweigh."""
        started = StepTime.of(ENOUGH_OF_MANY)
        started.value, started.count = self.value, min(self.count, _INHERITED)
        return started


@dataclass(slots=True)
class LoadTimes:
    """What steps take at one load: a plain one in seconds, the others in plain ones."""

    plain: RunningMean = field(default_factory=lambda: RunningMean(_SHARE))
    # Those of them in which no head was fed, and what plain ones took before the first of these.
    unfed_steps: int = 0
    fed: float = 0.0
    # What a step that waited for drafts takes beyond its rows, and the share of those that were answered lately.
    overhead: StepTime = field(default_factory=StepTime.of)
    answered: RunningMean = field(default_factory=lambda: RunningMean.settled(_SHARE, 1.0))
    # Whether drafts are known from a lower load, until steps of this one say otherwise.
    inherited: bool = False

    def observe_plain(self, seconds: float, *, fed: bool, ahead: bool) -> None:
        """A step without drafts; `fed`, a head was given what it reads of it, and `ahead`, it was launched so."""
        if fed and self.unfed_steps:
            return
        if not fed and not self.unfed_steps:
            self.fed, self.plain.count = self.plain.value, 0
        self.unfed_steps += not fed
        self.plain.observe(bounded(seconds, self.plain.value, _BOUND) if self.plain.count else seconds)
        if self.fed and self.unfed_steps == enough_plain(ahead=ahead):
            # What drafts take was counted in longer steps.
            ratio, self.fed = self.fed / self.plain.value, 0.0
            self.overhead.count_from(max(0.0, (1 + self.overhead.value) * ratio - 1))

    def observe_after(self, seconds: float, row_cost: float, *, answered: bool) -> None:
        """A step that waited for drafts, whose rows take `row_cost` plain ones."""
        self.answered.observe(answered)
        self.overhead.observe(max(0.0, seconds / self.plain.value - row_cost))

    def gain(self, load: int, expected: float) -> float:
        """Tokens of steps that wait for drafts, which promise so many in a plain step's time and that of their rows,
        for each that plain steps would make in the same time."""
        answered = self.answered.value
        tokens = answered * expected / load + 1 - answered
        return tokens / (1 + self.overhead.value)

    @property
    def known(self) -> bool:
        """Whether enough was seen of drafts."""
        return self.inherited or self.overhead.count >= self.overhead.first_few

    def warm_start(self) -> LoadTimes:
        """What is taken for true at the next load, where drafts hardly ever come cheaper; a few steps outweigh it."""
        answered = RunningMean.settled(_SHARE, self.answered.value)
        return LoadTimes(overhead=self.overhead.warm_start(), answered=answered, inherited=self.known)
