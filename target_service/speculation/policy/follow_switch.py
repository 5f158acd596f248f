"""Whether a draft that runs ahead is worth following at a load: by what whole passes make in the same time without it.

To follow a draft the target sends it every token, and a head its hidden states; it takes in trees, and hosts have only
so much time for that. Where that costs more than the drafts bring, nothing is sent to the draft for a while.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from target_service.speculation.policy.running_means import PassRate

# Passes without a draft at a load before it is followed there, for else nobody would know what it brings: a quarter of
# a second at 8B size.
_ALONE_FIRST = 48
# A draft is dropped where so many passes that followed it made less than this share of what others make, for all that
# what passes make varies; and at once below the last, which is no accident: a draft that costs a third is dropped after
# the first 32. More passes tell smaller losses from noise.
_DROPPED = ((32, 0.8), (64, 0.9), (192, 1.0))
_HOPELESS = 0.65
# Standard errors that are granted. With 1.5 a draft that makes 30 % more was kept in 99 of 100 simulated runs of 5,000
# passes whose tokens vary by as much as their mean, and in 73 with none (the `Engine` of test_follow_switch.py).
_GRANTED = 1.5
# And then not followed for so many seconds, twice as long each time it is dropped again: a good one is back within two
# seconds, and one that halves the speed for 32 passes in vain costs two per cent in the long run.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.5, 60.0
# What it has to make of the others for its pauses to be short again: more than the noise of a kept draft that makes as
# much. Chosen, not measured.
_RECOVERED = 1.05
# What one pass moves the means: those of some two hundred.
_SHARE = 0.01


@dataclass(slots=True)
class _Load:
    alone: PassRate = field(default_factory=lambda: PassRate(_SHARE))
    followed: PassRate = field(default_factory=lambda: PassRate(_SHARE))
    until: float = 0.0
    pause: float = _FIRST_PAUSE

    @property
    def gain(self) -> float:
        """What passes that follow the draft make for each token of others."""
        return self.followed.rate / self.alone.rate if self.alone.rate else 1.0

    @property
    def fails(self) -> bool:
        """Whether the draft loses beyond doubt."""
        count, gain = self.followed.count, self.gain
        granted = gain * math.exp(_GRANTED * math.sqrt(self.followed.variance + self.alone.variance))
        if count >= _DROPPED[0][0] and gain < _HOPELESS:
            return True
        return any(count >= passes and granted < share for passes, share in _DROPPED)


class FollowSwitch:
    """Decides by load in powers of two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._loads: defaultdict[int, _Load] = defaultdict(_Load)

    def follows(self, load: int) -> bool:
        """Whether a draft is to be followed while so many sequences run."""
        here = self._loads.get(load.bit_length())
        return here is not None and here.alone.count >= _ALONE_FIRST and self._clock() >= here.until

    def observe(self, load: int, tokens: float, seconds: float, *, followed: bool) -> None:
        """A pass that only decoded made so many tokens of each sequence, in so many seconds since the one before."""
        here = self._loads[load.bit_length()]
        if not followed:
            here.alone.observe(tokens, seconds)
            return
        here.followed.observe(tokens, seconds)
        if here.alone.count < _ALONE_FIRST:
            return
        if here.fails:
            here.until, here.followed = self._clock() + here.pause, PassRate(_SHARE)
            here.pause = min(_LONGEST_PAUSE, 2 * here.pause)
        elif here.followed.count >= _DROPPED[-1][0] and here.gain > _RECOVERED:
            here.pause = _FIRST_PAUSE

    def forget(self) -> None:
        """Another draft is there: what the last one was worth says nothing of it."""
        for here in self._loads.values():
            here.followed, here.until, here.pause = PassRate(_SHARE), 0.0, _FIRST_PAUSE
