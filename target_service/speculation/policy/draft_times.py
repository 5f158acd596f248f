"""Times of steps that wait for drafts, and the tokens that these bring.

Times are counted in plain steps, so that the speed of machines and models does not matter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from target_service.core.running_means import RunningMean, RunningTime, bounded

# Steps of a kind at one load before their time is used: fewer drafted steps of several sequences, which cost more; more
# plain ones where they are launched ahead, which have settled the number of passes launched at once by then.
ENOUGH, ENOUGH_OF_MANY, ENOUGH_AHEAD = 8, 4, 40
# The weight, in steps, of what a lower load has shown.
_INHERITED = 2
# Steps of a kind in a row whose longest bounds its time: what slowed earlier steps may be over.
_IN_A_ROW = 4
# The weight of one step in the time of its kind, a mean of some ten. Chosen, as for the other policies.
_SHARE = 0.1
# A step counts for at most this many times its kind's mean and a plain step together, so that a pause of the machine
# does not decide. A plain step is taken within this factor of their mean, which it moves by a tenth at most. Chosen.
_BOUND = 2.0


def enough_plain(*, ahead: bool) -> int:
    """Plain steps before their time is used."""
    return ENOUGH_AHEAD if ahead else ENOUGH


@dataclass(slots=True)
class StepTime(RunningTime):
    """The time of steps of a kind, in plain steps or the like; never more than the longest of the last few."""

    share: float = _SHARE
    first_few: int = ENOUGH
    most: float = _BOUND
    unit: float = 1.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_IN_A_ROW))

    def observe(self, value: float) -> None:
        is_first = self.is_first
        self.last.append(value)
        RunningTime.observe(self, value)
        # A time that is always long shows after a few steps.
        if not is_first and len(self.last) == _IN_A_ROW:
            self.value = min(self.value, max(self.last))

    def warm_start(self) -> StepTime:
        """A copy that a few steps outweigh."""
        return StepTime(value=self.value, count=min(self.count, _INHERITED), first_few=ENOUGH_OF_MANY)


@dataclass(slots=True)
class LoadTimes:
    """Times of steps at one load: of a plain one in seconds, of the others in plain ones."""

    plain: RunningMean = field(default_factory=lambda: RunningMean(_SHARE))
    # Plain steps in which no head was fed, and the time of plain steps before the first of these.
    unfed_steps: int = 0
    fed: float = 0.0
    # Time of a step that waited for drafts beyond that of its rows, and the share of such steps that were answered.
    overhead: StepTime = field(default_factory=StepTime)
    answered: RunningMean = field(default_factory=lambda: RunningMean.settled(_SHARE, 1.0))
    # Whether the times of drafts come from a lower load.
    inherited: bool = False

    def observe_plain(self, seconds: float, *, fed: bool, ahead: bool) -> None:
        """A step without drafts; `fed`: a head was sent its hidden states; `ahead`: it was launched behind another."""
        if fed and self.unfed_steps:
            return
        if not fed and not self.unfed_steps:
            self.fed, self.plain.count = self.plain.value, 0
        self.unfed_steps += not fed
        self.plain.observe(bounded(seconds, self.plain.value, _BOUND) if self.plain.count else seconds)
        if self.fed and self.unfed_steps == enough_plain(ahead=ahead):
            # The overhead was counted in plain steps that fed a head, which are longer.
            ratio, self.fed = self.fed / self.plain.value, 0.0
            self.overhead.value = max(0.0, (1 + self.overhead.value) * ratio - 1)
            self.overhead.last.clear()

    def observe_after(self, seconds: float, row_cost: float, *, answered: bool) -> None:
        """A step that waited for drafts, whose rows cost `row_cost` plain steps."""
        self.answered.observe(answered)
        self.overhead.observe(max(0.0, seconds / self.plain.value - row_cost))

    def gain(self, load: int, expected: float) -> float:
        """Tokens of steps that wait for drafts, for each token of plain steps in the same time; `expected` is theirs in
        a plain step's time plus that of their rows."""
        answered = self.answered.value
        tokens = answered * expected / load + 1 - answered
        return tokens / (1 + self.overhead.value)

    @property
    def known(self) -> bool:
        """Whether enough drafted steps were observed."""
        return self.inherited or self.overhead.count >= self.overhead.first_few

    def warm_start(self) -> LoadTimes:
        """A start for the next load, where drafts are hardly ever cheaper; a few steps outweigh it."""
        answered = RunningMean.settled(_SHARE, self.answered.value)
        return LoadTimes(overhead=self.overhead.warm_start(), answered=answered, inherited=self.known)
