"""Whether drafted rows make more tokens a second than plain passes where the host is the limit.

Times of passes do not tell there. A pass that commits drafted tokens, or receives trees, keeps the host from the passes
behind it; prompts are read in between; several plain passes are launched at once, those beside prompts are not. With
64 sequences and passes of 0.6 ms a draft that made half of plain decoding was used for two thirds of the time
(`benchmarks/results/2026-11-26-cpu-host-limit.md`). So both are tried there in windows of launches, with all their
tokens and all their time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from target_service.core.running_means import RunningMean
from target_service.speculation.policy.launch_mode import load_size

# Launches until that share is believed, and the weight of one in it. Chosen.
_SEEN, _SHARE = 64, 0.02
# Launches of a window, and those at its start that do not count: a draft is sent every sequence then, and the host
# still works for what the window before left. Chosen: some thousand tokens, of whose time prompts take a varying part.
_WINDOW, _WARM_UP = 72, 20
# Launches between two trials, and their factor while the same wins. The first trial has one window of each, and may
# err. Trials where the slower makes half cost at most 1 % in the end (`test_throughput_trial.py`).
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGER = 512, 8192, 4
# The weight of a window in its rate, and what drafted rows have to be faster by than none: windows of one kind differ
# by some tenth, and drafts that seem to pay by chance lose more than those that pay a little gain. Chosen.
_RATE_SHARE, _DRAFTED_MARGIN = 0.5, 1.05


@dataclass(slots=True)
class _LoadTrial:
    # The host's share of the time.
    busy: RunningMean = field(default_factory=lambda: RunningMean(_SHARE))
    # Whether drafted rows were faster in the last trial; None where the host is not the limit.
    prefers_rows: bool | None = None
    # With drafted rows or without, what still has a window in this trial, the running one first. Empty between trials.
    due: list[bool] = field(default_factory=list)
    pause: int = _FIRST_PAUSE
    # Of the window, or of the pause.
    launches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    # Tokens a second without drafted rows, and with them.
    rates: tuple[RunningMean, RunningMean] = field(
        default_factory=lambda: (RunningMean(_RATE_SHARE), RunningMean(_RATE_SHARE))
    )


class ThroughputTrial:
    """Chooses by load in powers of two. Where the host is not the limit, drafted rows are always allowed."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _LoadTrial] = defaultdict(_LoadTrial)

    def allows_rows(self, load: int) -> bool:
        """Whether the next launch of `load` sequences may have drafted rows."""
        here = self._loads.get(load_size(load))
        if here is None or here.prefers_rows is None:
            return True
        return here.due[0] if here.due else here.prefers_rows

    def observe_launch(self, load: int, tokens: int, seconds: float, waited: float, *, drafted: bool) -> None:
        """Observe a launch: its tokens of all sequences, the seconds since the end of the one before, and those of them
        that the host waited. `drafted`: it had drafted rows."""
        here = self._loads[load_size(load)]
        if drafted and seconds > 0:
            here.busy.observe(1 - waited / seconds)
        if here.prefers_rows is None:
            # Shares of the time that the host works, in launches with drafts: above the first it is the limit, below
            # the second it is not. Chosen: the first is that above which several passes are launched at once
            # (`multi_step`).
            if here.busy.count >= _SEEN and here.busy.value > 0.85:
                here.prefers_rows, here.due, here.launches = True, [True, False], 0
        elif here.busy.value < 0.7:
            del self._loads[load_size(load)]
        else:
            self._count(here, tokens, seconds)

    def forget(self) -> None:
        """Another draft has connected: drop what was observed of the last one."""
        self._loads.clear()

    def _count(self, here: _LoadTrial, tokens: int, seconds: float) -> None:
        """Count a launch, and start the next window, or the next trial."""
        assert here.prefers_rows is not None
        here.launches += 1
        if not here.due:
            if here.launches >= here.pause:
                here.due, here.launches = [here.prefers_rows, not here.prefers_rows], 0
            return
        if here.launches > _WARM_UP:
            here.tokens += tokens
            here.seconds += seconds
        if here.launches < _WINDOW:
            return
        here.rates[here.due.pop(0)].observe(here.tokens / here.seconds)
        here.launches, here.tokens, here.seconds = 0, 0, 0.0
        if not here.due:
            plain, drafted = here.rates
            before, here.prefers_rows = here.prefers_rows, drafted.value > _DRAFTED_MARGIN * plain.value
            here.pause = min(_LONGEST_PAUSE, _LONGER * here.pause) if here.prefers_rows is before else _FIRST_PAUSE
