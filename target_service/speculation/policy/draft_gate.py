"""Decides by load whether a draft that runs ahead is worth its cost, compared with whole passes without it.

Using a draft costs host time: it is sent every token, a head its hidden states, and its trees are received. Where
that costs more than the drafts bring, nothing is sent to the draft for a while.

The passes that made a text are compared with those that lookup would have needed for it (`lookup_baseline`), of which
passes without a draft need a share; only the time of a pass is compared with that of others, since it hardly depends on
the text. Comparing passes before and after does not work: on an H200, a draft that made a third more was dropped most
of the time, because texts differ by more.

A draft is followed from the first pass on, unless the nearest load that was judged says that it does not pay. Passes
without it are timed soon where it is in doubt, or no load has shown yet what it costs of a pass; elsewhere once that
takes no more than a try may, since a sequence that a head does not follow for a while stays without it to its end.
Times are compared between passes of about as many rows.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from target_service.core.running_means import RunningMean, RunningTime
from target_service.speculation.policy.launch_mode import TRYING, load_size

# Passes without a draft that are timed at a load before it is followed there: a quarter of a second at 8B size.
_ALONE_FIRST = 48
# (comparisons, gain): a draft is dropped if its gain, variance allowed for, is lower after that many comparisons. One
# request yields one for about eight passes, and more of them up to four.
_DROPPED = ((6, 0.8), (12, 0.9), (36, 1.0))
# Standard errors allowed for. With 2, a draft that makes 30 % more was kept in 59 of 60 simulated runs of 5,000
# passes whose comparisons vary by 0.6 of their mean, and in 58 of 60 with 20 % more (the `Engine` of
# test_draft_gate.py). A worthless draft's vary little: its rows are not taken.
_GRANTED = 2.0
# Seconds without the draft after it was dropped, doubled each time: a good one is back within two seconds, and one that
# halves the speed for 40 passes costs two per cent in the long run.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.5, 60.0
# Comparisons after which a load that follows another one is judged for itself. Chosen.
_LOOKED_AT = 12
# Where no load was judged yet: passes before one is, and the gain from which it need not be, as what a draft costs of a
# pass would have to be half of it. Chosen.
_UNJUDGED, _BEYOND_DOUBT = 128, 1.5
# Gain at which pauses are short again: above the noise of a kept draft without any. Chosen, not measured.
_RECOVERED = 1.05
# Passes of about as many rows, of either kind, from which their times are compared, and such numbers of rows for each
# doubling: within a fifth. Chosen.
_FEW, _CLASSES = 4, 4
# Weight of one comparison in the mean passes: some sixty, or two seconds at 8B size, in which a draft may change.
_PASS_SHARE = 0.03
# Comparisons without a draft that count as much as the assumption that lookup is all there is. Chosen.
_ASSUMED = 16
# Weight of one pass in the mean times: some two hundred passes.
_times, _passes = partial(RunningTime, 0.01), partial(RunningMean, _PASS_SHARE)


@dataclass(slots=True)
class _DraftedPasses:
    """Means of stretches of text that were made with a draft: passes, passes by lookup alone, their squares and
    product."""

    needed: RunningMean = field(default_factory=_passes)
    by_lookup: RunningMean = field(default_factory=_passes)
    needed_squared: RunningMean = field(default_factory=_passes)
    lookup_squared: RunningMean = field(default_factory=_passes)
    product: RunningMean = field(default_factory=_passes)

    def compare(self, needed: float, by_lookup: float) -> None:
        self.needed.observe(needed)
        self.by_lookup.observe(by_lookup)
        self.needed_squared.observe(needed * needed)
        self.lookup_squared.observe(by_lookup * by_lookup)
        self.product.observe(needed * by_lookup)

    @property
    def ratio(self) -> float:
        """Passes of lookup alone for each pass with the draft."""
        return self.by_lookup.value / self.needed.value if self.needed.value else 1.0

    @property
    def error(self) -> float:
        """The standard error of the ratio, as a share of it."""
        needed, by_lookup = max(self.needed.value, 1e-9), max(self.by_lookup.value, 1e-9)
        varied = self.needed_squared.value / needed**2 + self.lookup_squared.value / by_lookup**2
        varied -= 2 * self.product.value / (needed * by_lookup)
        return math.sqrt(max(0.0, varied) / max(1.0, min(self.needed.count, 2 / _PASS_SHARE)))


class _PassSeconds:
    """Seconds of passes of one kind, by about so many rows."""

    def __init__(self) -> None:
        self.count = 0
        self.by_rows: defaultdict[int, RunningTime] = defaultdict(_times)

    def observe_pass(self, rows: int, seconds: float) -> None:
        self.count += 1
        self.by_rows[round(_CLASSES * math.log2(rows))].observe(seconds)

    def for_each_of(self, other: _PassSeconds) -> float:
        """Seconds of these passes for each of the others', by the mean over numbers of rows that both had; 1 without
        any."""
        weight = total = 0.0
        for rows, own in self.by_rows.items():
            count = min(own.count, other.by_rows[rows].count) if rows in other.by_rows else 0
            if count >= _FEW:
                weight += count
                total += count * math.log(own.value / other.by_rows[rows].value)
        return math.exp(total / weight) if weight else 1.0


@dataclass(slots=True)
class _LoadGain:
    alone: _PassSeconds = field(default_factory=_PassSeconds)
    followed: _PassSeconds = field(default_factory=_PassSeconds)
    # Passes of a stretch of text without a draft, and by lookup alone.
    alone_needed: RunningMean = field(default_factory=_passes)
    alone_by_lookup: RunningMean = field(default_factory=_passes)
    with_draft: _DraftedPasses = field(default_factory=_DraftedPasses)
    until: float = 0.0
    pause: float = _FIRST_PAUSE
    # Whether passes without a draft are timed although it was followed, since it is in doubt.
    in_doubt: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether passes without a draft were timed."""
        return self.alone.count >= _ALONE_FIRST

    @property
    def slower(self) -> float:
        """Seconds of passes with the draft for each second of the others; 1 before these were timed."""
        return self.followed.for_each_of(self.alone) if self.is_timed else 1.0

    @property
    def is_judged(self) -> bool:
        """Whether it is known if the draft pays."""
        enough = bool(self.until) or self.with_draft.needed.count >= _LOOKED_AT
        return enough and (self.is_timed or not self.in_doubt)

    @property
    def gain(self) -> float:
        """Tokens that passes with the draft make in the time in which the others make one."""
        return self.gain_as(self)

    def gain_as(self, other: _LoadGain) -> float:
        """The gain, with what the draft costs of a pass at the `other` load and what passes make without it there."""
        return self.with_draft.ratio / (other.slower * other.beyond_lookup)

    @property
    def beyond_lookup(self) -> float:
        """Passes of lookup alone for each pass without a draft: more than one by recycled tokens."""
        if not self.alone_needed.value:
            return 1.0
        compared = min(self.alone_needed.count, 2 / _PASS_SHARE)
        share = compared / (compared + _ASSUMED)
        return 1.0 + share * (max(1.0, self.alone_by_lookup.value / self.alone_needed.value) - 1.0)

    def fails_with(self, gain: float) -> bool:
        """Whether the draft loses tokens if its gain is this one, beyond the error allowed for."""
        count, at_best = self.with_draft.needed.count, gain * math.exp(_GRANTED * self.with_draft.error)
        return any(count >= comparisons and at_best < share for comparisons, share in _DROPPED)

    def is_doubtful(self, gain: float, *, cost_known: bool) -> bool:
        """Whether passes without the draft are to be timed, where its gain seems to be this one; `cost_known`: by what
        it costs of a pass at another load."""
        if self.with_draft.needed.count < _LOOKED_AT:
            return self.fails_with(gain)
        if gain * math.exp(_GRANTED * self.with_draft.error) < _RECOVERED:
            return True
        if not cost_known:
            return self.followed.count >= _UNJUDGED and gain < _BEYOND_DOUBT
        return _ALONE_FIRST * (1 - 1 / max(1.0, gain)) < TRYING * self.followed.count


class DraftGate:
    """Decides by load, see `load_size`."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` in seconds, by default `time.monotonic` as it is now: a simulation has replaced it."""
        self._clock = clock or time.monotonic
        self._loads: defaultdict[int, _LoadGain] = defaultdict(_LoadGain)

    def uses_draft(self, load: int) -> bool:
        """Whether a draft is used at this load."""
        here = self._loads.get(load_size(load))
        if here is None or not (here.is_timed or here.in_doubt):
            return not self._judged() or self._shown_by(load_size(load)) is not None
        return here.is_timed and self._clock() >= here.until

    def measures(self, load: int) -> bool:
        """Whether passes without a draft are still being timed at this load."""
        here = self._loads.get(load_size(load))
        return (here is None or not here.is_timed) and not self.uses_draft(load)

    def gain(self, load: int) -> float | None:
        """Tokens of passes with the draft for each of those without one in the same time, at the nearest load where
        that was judged; None where it was nowhere."""
        nearest = self._nearest(self._judged(), load_size(load))
        if nearest is None:
            return None
        here = self._loads[nearest]
        return 1.0 if self._clock() < here.until else here.gain

    def _judged(self) -> list[int]:
        """Loads where it was judged, by their power of two."""
        return [known for known, one in self._loads.items() if one.is_judged]

    def _shown_by(self, size: int) -> _LoadGain | None:
        """The nearest load, by its power of two, where a draft was judged; None if it does not pay there."""
        nearest = self._nearest(self._judged(), size)
        if nearest is None:
            return None
        other = self._loads[nearest]
        enough = other.with_draft.needed.count >= _DROPPED[0][0]
        return other if enough and other.gain > 1.0 and self._clock() >= other.until else None

    @staticmethod
    def _nearest(sizes: Iterable[int], size: int) -> int | None:
        """Of loads in powers of two the one nearest to `size`. A larger one says more than a smaller one, as drafts
        gain less with more sequences."""
        return min(sizes, key=lambda known: (abs(known - size), -known), default=None)

    def observe_pass(self, load: int, rows: int, seconds: float, *, with_draft: bool) -> None:
        """Observe the time of a pass of so many `rows`, those of prompts among them, from the end of the one before."""
        here = self._loads[load_size(load)]
        (here.followed if with_draft else here.alone).observe_pass(rows, seconds)

    def compare(self, load: int, needed: float, by_lookup: float, *, with_draft: bool = True) -> None:
        """Observe the passes `with_draft` or without that a stretch of text needed, and those that lookup alone would
        have needed."""
        here = self._loads[load_size(load)]
        if not with_draft:
            here.alone_needed.observe(needed)
            here.alone_by_lookup.observe(by_lookup)
            return
        here.with_draft.compare(needed, by_lookup)
        if not here.is_timed:
            timed = [known for known, one in self._loads.items() if one.is_timed]
            nearest = self._nearest(timed, load_size(load))
            gain = here.gain_as(here if nearest is None else self._loads[nearest])
            here.in_doubt |= here.is_doubtful(gain, cost_known=nearest is not None)
            return
        if here.fails_with(here.gain):
            here.until = self._clock() + here.pause
            here.with_draft, here.followed = _DraftedPasses(), _PassSeconds()
            here.pause = min(_LONGEST_PAUSE, 2 * here.pause)
        elif here.with_draft.needed.count >= _DROPPED[-1][0] and here.gain > _RECOVERED:
            here.pause = _FIRST_PAUSE

    def forget(self) -> None:
        """Another draft has connected: drop what was observed of the last one."""
        for here in self._loads.values():
            here.with_draft, here.followed = _DraftedPasses(), _PassSeconds()
            here.until, here.pause = 0.0, _FIRST_PAUSE
            here.in_doubt = False
