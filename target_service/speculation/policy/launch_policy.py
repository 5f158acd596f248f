"""Whether a pass is launched before its predecessor has ended, or waits for the draft's answer to it.

A pass that runs ahead never waits: its rows come from what was drafted at an earlier root, and from the sequences'
own texts. One that waits has trees of its own root, which bring more tokens, but the device is idle for one round
trip. Which mode makes more tokens a second depends on the round trip, the draft and the load, so both
are measured by load, and each is tried again now and then. At a load that was never met the mode of the nearest one
that knows is taken first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from target_service.core.running_means import PassRate
from target_service.speculation.policy.launch_mode import LaunchMode

# Passes of a mode at a load before its rate is used: their tokens vary by as much as the mean, so that the error of the
# mean of 32 is a sixth of it.
_TRIAL = 32
# Waiting passes after which a first trial ends if their rate is below this share of the others': chosen, so that a mode
# at three quarters of the others' rate mostly ends soon (the mean of twelve passes is known to a fifth), and one at the
# same rate rarely. Of 891 passes of one request 104 waited at that rate (two H100,
# `benchmarks/results/2026-11-25-h100-widened-eleventh.md`).
_FEW, _HOPELESS = 12, 0.8
# Weight of one pass in the means of its mode: some sixty passes.
_SHARE = 0.03
# Passes until the slower mode is tried again, and for how many: a seventieth of the time, of which a part is lost.
_AGAIN, _FOR = 1024, 16
# Passes of a new load that are launched as at the nearest one, before both modes are tried: the first eight answers, of
# some sixty passes, are not spent on trials. Chosen.
_AS_NEAREST = 128
# Waiting is tried where it takes at most this share of a pass: waiting passes made a fifth more tokens than others
# whose trees came in time (3.36 and 2.83 in the same record). Against passes whose trees come late they make half as
# many again (3.53 and 2.40, `benchmarks/running_ahead/simulate.py` and H200s), but then answers take longer than that.
_WORTH_TRYING = 0.2
# Rate that either mode needs to replace the other. Means of sixty passes vary by 7 %, and a wrong choice costs more
# where the device is idle for it: a quarter of the tokens a second in that record.
_MARGINS = {LaunchMode.RUN_AHEAD: 1.0, LaunchMode.WAIT_FOR_DRAFT: 1.1}


@dataclass(slots=True)
class _LaunchRates:
    rates: dict[LaunchMode, PassRate] = field(default_factory=lambda: {mode: PassRate(_SHARE) for mode in LaunchMode})
    best: LaunchMode = LaunchMode.RUN_AHEAD
    since: int = 0

    @property
    def untried(self) -> LaunchMode | None:
        """The mode that needs more passes before either is chosen."""
        ahead, waiting = self.rates[LaunchMode.RUN_AHEAD], self.rates[LaunchMode.WAIT_FOR_DRAFT]
        if ahead.count < _TRIAL:
            return LaunchMode.RUN_AHEAD
        hopeless = waiting.count >= _FEW and waiting.rate < _HOPELESS * ahead.rate
        return None if waiting.count >= _TRIAL or hopeless else LaunchMode.WAIT_FOR_DRAFT


class LaunchPolicy:
    """Chooses pass by pass, by load in powers of two."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _LaunchRates] = defaultdict(_LaunchRates)

    def choose(self, load: int, answer_seconds: float, launch_seconds: float, pass_seconds: float) -> LaunchMode:
        """How the next pass of `load` sequences is launched, all of whose rows the device may choose.

        `answer_seconds`, `launch_seconds` and `pass_seconds` are the times of a draft's answer, a launch and a pass; 0
        where unknown. While a pass waits, the device is idle until the answer has come and the pass is launched.
        """
        if not answer_seconds or answer_seconds + launch_seconds > _WORTH_TRYING * pass_seconds:
            return LaunchMode.RUN_AHEAD
        here = self._loads[load.bit_length()]
        if here.untried is not None:
            known = self._nearest(load.bit_length())
            if known is None or here.since >= _AS_NEAREST:
                return here.untried
            here.best, here.since = known.best, here.since + 1
            return here.best
        other = LaunchMode.WAIT_FOR_DRAFT if here.best is LaunchMode.RUN_AHEAD else LaunchMode.RUN_AHEAD
        if here.rates[other].rate > _MARGINS[other] * here.rates[here.best].rate:
            here.best, other, here.since = other, here.best, 0
        here.since += 1
        if here.since <= _AGAIN:
            return here.best
        if here.since >= _AGAIN + _FOR:
            here.since = 0
        return other

    def _nearest(self, size: int) -> _LaunchRates | None:
        """The nearest load, by its power of two, at which both modes were tried."""
        known = [other for other, rates in self._loads.items() if rates.untried is None]
        nearest = min(known, key=lambda other: abs(other - size), default=None)
        return None if nearest is None else self._loads[nearest]

    def preferred(self, load: int) -> LaunchMode:
        """The faster mode so far; passes of the other one are trials."""
        return self._loads[load.bit_length()].best

    def observe_pass(self, load: int, mode: LaunchMode, tokens: float, seconds: float) -> None:
        """Observe a pass: its tokens of each sequence, and seconds since the end of the one before."""
        self._loads[load.bit_length()].rates[mode].observe(tokens, seconds)

    def forget(self) -> None:
        """Drop all rates: another draft has connected, or the weights have changed."""
        self._loads.clear()
