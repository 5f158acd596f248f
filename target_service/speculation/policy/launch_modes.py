"""Whether a pass is launched before its predecessor has ended, or held for the draft's answer to it.

Launched ahead, a pass never waits: its rows come from what was drafted at an earlier root, and from the sequences'
own texts. Held, it has trees of the very root that it begins with, which hold more tokens, and the device waits one
round trip for them. Which makes more tokens a second hangs on how long that trip is beside a pass, on how far the draft
sees, and on how many sequences are waited for; both are measured, by load, and each is tried again now and then.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum

from target_service.core.running_means import PassRate


class Launch(Enum):
    """How a pass is launched."""

    AHEAD = "ahead"
    HELD = "held"


# Passes of a way at a load before it is judged: what they make varies by as much as the mean, so that the error of the
# mean of 32 is a sixth of it.
_TRIAL = 32
# Held passes after which a first trial ends that makes less than this share of the others: chosen, so that a way at
# three quarters of the others' rate is mostly left soon (passes vary by two thirds of what they make, so that the mean
# of twelve is known to a fifth), and one that makes as much seldom. Of 891 passes of one request 104 were held at that
# rate (two H100, `benchmarks/results/2026-11-25-h100-widened-eleventh.md`).
_FEW, _HOPELESS = 12, 0.8
# What one pass moves what is known of its way: the mean of some sixty.
_SHARE = 0.03
# Passes until the way that makes less is tried again, and for how many: a seventieth of the time, of which a part is
# lost.
_AGAIN, _FOR = 1024, 16
# Waiting is tried where it takes this share of a pass at most, for held passes made a fifth more tokens than others
# whose trees came in time (3.36 and 2.83 in the same record). Where those come late they make half as many again
# (3.53 and 2.40, `benchmarks/running_ahead/simulate.py` and H200s), but then answers take longer than that.
_WORTH_TRYING = 0.2
# What either way has to make beyond the other. Means of sixty passes vary by 7 %, and being wrong costs more where the
# device stands idle for it: a quarter of the tokens a second in that record.
_MARGINS = {Launch.AHEAD: 1.0, Launch.HELD: 1.1}


@dataclass(slots=True)
class _Load:
    ways: dict[Launch, PassRate] = field(default_factory=lambda: {way: PassRate(_SHARE) for way in Launch})
    best: Launch = Launch.AHEAD
    since: int = 0

    @property
    def untried(self) -> Launch | None:
        """The way that is to be known better before either is chosen."""
        ahead, held = self.ways[Launch.AHEAD], self.ways[Launch.HELD]
        if ahead.count < _TRIAL:
            return Launch.AHEAD
        hopeless = held.count >= _FEW and held.rate < _HOPELESS * ahead.rate
        return None if held.count >= _TRIAL or hopeless else Launch.HELD


class LaunchModes:
    """Chooses pass by pass, by load in powers of two."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _Load] = defaultdict(_Load)

    def choose(self, load: int, answer_seconds: float, launch_seconds: float, pass_seconds: float) -> Launch:
        """How the next pass of so many sequences is launched, all of whose rows the device may choose, where answers,
        launches and passes take so long; 0 where that is not known.

        While a pass is held the device stands still until the answer is there, and then until the pass is launched.
        """
        if not answer_seconds or answer_seconds + launch_seconds > _WORTH_TRYING * pass_seconds:
            return Launch.AHEAD
        here = self._loads[load.bit_length()]
        if here.untried is not None:
            return here.untried
        other = Launch.HELD if here.best is Launch.AHEAD else Launch.AHEAD
        if here.ways[other].rate > _MARGINS[other] * here.ways[here.best].rate:
            here.best, other, here.since = other, here.best, 0
        here.since += 1
        if here.since <= _AGAIN:
            return here.best
        if here.since >= _AGAIN + _FOR:
            here.since = 0
        return other

    def preferred(self, load: int) -> Launch:
        """The way that makes most by what is known; what passes of the other make is a trial's."""
        return self._loads[load.bit_length()].best

    def observe(self, load: int, way: Launch, tokens: float, seconds: float) -> None:
        """A pass launched so made so many tokens of each sequence, in so many seconds since the one before ended."""
        self._loads[load.bit_length()].ways[way].observe(tokens, seconds)

    def forget(self) -> None:
        """Another draft is there, or none."""
        self._loads.clear()
