"""What makes most tokens a second where the host is the limit: no drafts, the sequences' own texts, or a draft too.

Times of passes do not tell there. A pass that commits drafted tokens, or receives trees, keeps the host from the passes
behind it; prompts are read in between; several plain passes are launched at once, those beside prompts are not. With
64 sequences and passes of 0.6 ms a draft that made half of plain decoding was used for two thirds of the time
(`benchmarks/results/2026-11-26-cpu-host-limit.md`). So each level is tried there in windows of
launches, with all their tokens and all their time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import IntEnum

from target_service.core.running_means import RunningMean
from target_service.speculation.policy.launch_mode import HOPELESS, load_size


class SpeculationLevel(IntEnum):
    """Where the drafted rows of a launch may come from."""

    NONE = 0
    # Prompt lookup in each sequence's own text.
    LOOKUP_ONLY = 1
    # Lookup and the draft.
    DRAFT = 2


# Shares of the time that the host works, in launches with drafts: above the first it is the limit, below the second it
# is not. Chosen: the first is that above which several passes are launched at once (`multi_step`).
_LIMIT, _NO_LIMIT = 0.85, 0.7
# Launches until that share is believed, and the weight of one in it. Chosen.
_SEEN, _SHARE = 64, 0.02
# Launches of a window, and those at its start that do not count: a draft is sent every sequence then, and the host
# still works for what the other level left. Chosen: some thousand tokens, of whose time prompts take a varying part.
_WINDOW, _WARM_UP = 72, 20
# Launches after which a hopeless window ends. Chosen.
_FEW = 36
# Launches between two trials, and their factor while the same level wins. The first trial has one window of each level,
# and may err. Trials of three levels, the slowest at half the rate, cost at most 1.5 % in the end
# (`test_throughput_trial.py`).
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGER = 512, 8192, 4
# The weight of a window in the rate of its level, what another level has to be faster by, and what drafted rows have to
# be faster by than none: windows of one level differ by some tenth, and drafts that seem to pay by chance lose more
# than those that pay a little gain. Chosen.
_RATE_SHARE, _MARGIN, _DRAFTED_MARGIN = 0.5, 1.03, 1.05


@dataclass(slots=True)
class _LoadTrial:
    # The host's share of the time.
    busy: RunningMean = field(default_factory=lambda: RunningMean(_SHARE))
    # The fastest level so far; None where the host is not the limit.
    best: SpeculationLevel | None = None
    # Levels that still have a window in this trial, the running one first. Empty between two trials.
    due: list[SpeculationLevel] = field(default_factory=list)
    pause: int = _FIRST_PAUSE
    # Of the window, or of the pause.
    launches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    # Tokens a second.
    rates: defaultdict[SpeculationLevel, RunningMean] = field(
        default_factory=lambda: defaultdict(lambda: RunningMean(_RATE_SHARE))
    )

    @property
    def is_hopeless(self) -> bool:
        """Whether the running window is of a level that was slower, and is far slower still."""
        assert self.best is not None
        return self.due[0] is not self.best and self.tokens < HOPELESS * self.rates[self.best].value * self.seconds


class ThroughputTrial:
    """Chooses by load in powers of two. Where the host is not the limit, every level is allowed."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _LoadTrial] = defaultdict(_LoadTrial)

    def allowed(self, load: int) -> SpeculationLevel:
        """The most that the next launch of `load` sequences may use."""
        here = self._loads.get(load_size(load))
        if here is None or here.best is None:
            return SpeculationLevel.DRAFT
        return here.due[0] if here.due else here.best

    def observe_launch(
        self, load: int, most: SpeculationLevel, tokens: int, seconds: float, waited: float, *, drafted: bool
    ) -> None:
        """Observe a launch: its tokens of all sequences, the seconds since the end of the one before, and those of them
        that the host waited. `most` is what launches could use, `drafted` whether this one had drafted rows."""
        here = self._loads[load_size(load)]
        if drafted and seconds > 0:
            here.busy.observe(1 - waited / seconds)
        if here.best is None:
            if here.busy.count >= _SEEN and here.busy.value > _LIMIT and most is not SpeculationLevel.NONE:
                here.best = most
                self._start(here, most)
        elif here.busy.value < _NO_LIMIT:
            del self._loads[load_size(load)]
        else:
            self._count(here, most, tokens, seconds)

    def forget(self) -> None:
        """Another draft has connected: drop what was observed of the last one."""
        self._loads.clear()

    def _count(self, here: _LoadTrial, most: SpeculationLevel, tokens: int, seconds: float) -> None:
        """Count a launch, and start the next window, or the next trial."""
        here.launches += 1
        if not here.due:
            if here.launches >= here.pause:
                self._start(here, most)
            return
        if here.launches > _WARM_UP:
            here.tokens += tokens
            here.seconds += seconds
        if here.launches < (_FEW if here.is_hopeless else _WINDOW):
            return
        here.rates[here.due.pop(0)].observe(here.tokens / here.seconds)
        here.launches, here.tokens, here.seconds = 0, 0, 0.0
        if not here.due:
            self._decide(here)

    @staticmethod
    def _start(here: _LoadTrial, most: SpeculationLevel) -> None:
        """Start a trial of every level up to `most`, the fastest so far first."""
        here.launches = 0
        here.due = sorted(
            (level for level in SpeculationLevel if level <= most), key=lambda level: level is not here.best
        )

    @staticmethod
    def _decide(here: _LoadTrial) -> None:
        assert here.best is not None
        worth = {
            level: rate.value / (1 if level is SpeculationLevel.NONE else _DRAFTED_MARGIN)
            for level, rate in here.rates.items()
        }
        fastest = max(worth, key=worth.__getitem__)
        if worth[fastest] > _MARGIN * worth[here.best]:
            here.best, here.pause = fastest, _FIRST_PAUSE
        else:
            here.pause = min(_LONGEST_PAUSE, _LONGER * here.pause)
