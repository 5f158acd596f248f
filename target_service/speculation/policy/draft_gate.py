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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from target_service.core.running_means import RunningMean, RunningTime
from target_service.speculation.policy.launch_mode import MARGIN, TRYING, load_size

# Passes without a draft that are timed at a load: a quarter of a second at 8B size.
_ALONE_FIRST = 48
# Comparisons from which a draft is judged at a load: one request yields one for about eight passes, and more of them up
# to four. Chosen.
_ENOUGH = 6
# Passes without the draft after it was dropped, for each with which it was followed: doubled each time, until tries
# take no more than they may. With one sequence a good draft is back within three seconds; with 128 a try takes more
# than a second, and pauses of 1.5 s lost 4 % of the tokens (`benchmarks/results/2026-11-29-cpu-draft-gate.md`).
_FIRST_PAUSE = 8
# Where no load has shown what a draft costs of a pass: passes before that is timed, the most that a pause is a multiple
# of, and the gain from which it need not be timed, as it would have to be half of a pass. Chosen.
_UNJUDGED, _BEYOND_DOUBT = 128, 1.5
# Passes of about as many rows, of either kind, from which their times are compared, and such numbers of rows for each
# doubling: within a fifth. Chosen.
_FEW, _CLASSES = 4, 4
# Weight of one comparison in the mean passes: some sixty, or two seconds at 8B size, in which a draft may change.
_PASS_SHARE = 0.03
# Weight of one pass in the mean times: some two hundred passes.
_times, _passes = partial(RunningTime, 0.01), partial(RunningMean, _PASS_SHARE)


@dataclass(slots=True)
class _ComparedPasses:
    """Means of stretches of text: the passes that they needed, those by lookup alone, and the square of what either is
    more than the other, as shares of their means."""

    needed: RunningMean = field(default_factory=_passes)
    by_lookup: RunningMean = field(default_factory=_passes)
    varied: RunningMean = field(default_factory=_passes)

    def compare(self, needed: float, by_lookup: float) -> None:
        self.needed.observe(needed)
        self.by_lookup.observe(by_lookup)
        self.varied.observe((needed / self.needed.value - by_lookup / self.by_lookup.value) ** 2)

    @property
    def count(self) -> float:
        """Comparisons that the means are of."""
        return min(self.needed.count, 2 / _PASS_SHARE)

    @property
    def ratio(self) -> float:
        """Passes of lookup alone for each pass that was needed."""
        return self.by_lookup.value / self.needed.value if self.needed.value else 1.0

    @property
    def error(self) -> float:
        """The standard error of the ratio, as a share of it."""
        return math.sqrt(self.varied.value / max(1.0, self.count))


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
    # Times of passes without a draft and with one, and the passes of stretches of text.
    alone: _PassSeconds = field(default_factory=_PassSeconds)
    followed: _PassSeconds = field(default_factory=_PassSeconds)
    without_draft: _ComparedPasses = field(default_factory=_ComparedPasses)
    with_draft: _ComparedPasses = field(default_factory=_ComparedPasses)
    # Passes without the draft until it is followed again, and of the next pause for each that was followed.
    paused: int = 0
    pause: float = _FIRST_PAUSE
    # Whether passes without a draft are timed although it was followed, since it is in doubt.
    in_doubt: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether passes without a draft were timed."""
        return self.alone.count >= _ALONE_FIRST

    @property
    def is_judged(self) -> bool:
        """Whether it is known if the draft pays."""
        enough = self.pause > _FIRST_PAUSE or self.with_draft.count >= _ENOUGH
        return enough and (self.is_timed or not self.in_doubt)

    @property
    def cost(self) -> float:
        """What passes with the draft have to make of those without one, to make as many tokens a second: seconds for
        each of theirs, and passes of lookup alone for each of theirs, which are more than one by recycled tokens."""
        # Comparisons without a draft that count as much as the assumption that lookup is all there is. Chosen.
        share = self.without_draft.count / (self.without_draft.count + 16)
        return self.followed.for_each_of(self.alone) * (1.0 + share * (max(1.0, self.without_draft.ratio) - 1.0))

    @property
    def gain(self) -> float:
        """Tokens that passes with the draft make in the time in which the others make one."""
        return self.with_draft.ratio / (self.cost if self.is_timed else 1.0)

    @property
    def at_best(self) -> float:
        """The gain with the error allowed for; infinite before enough comparisons."""
        if self.with_draft.count < _ENOUGH:
            return math.inf
        # Standard errors allowed for. With 2, a draft that makes 30 % more was kept in 59 of 60 simulated runs of 5,000
        # passes whose comparisons vary by 0.6 of their mean, and in 57 of 60 with 20 % more (the `Engine` of
        # test_draft_gate.py). A worthless draft's vary little: its rows are not taken.
        return self.gain * math.exp(2.0 * self.with_draft.error)

    def is_doubtful(self, cost: float | None) -> bool:
        """Whether passes without the draft are to be timed, whose cost is this one at another load, None where that is
        unknown: in doubt, or once they lose no more than tries may."""
        if cost is None:
            return self.at_best < MARGIN or (self.followed.count >= _UNJUDGED and self.gain < _BEYOND_DOUBT)
        return _ALONE_FIRST * (1 - cost / max(cost, self.at_best)) <= TRYING * self.followed.count


class DraftGate:
    """Decides by load, see `load_size`."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _LoadGain] = defaultdict(_LoadGain)

    def uses_draft(self, load: int) -> bool:
        """Whether a draft is used at this load."""
        here = self._loads.get(load_size(load))
        if here is not None and (here.is_timed or here.in_doubt):
            return here.is_timed and not here.paused
        gain = self.gain(load)
        return gain is None or gain > 1.0

    def measures(self, load: int) -> bool:
        """Whether passes without a draft are still being timed at this load."""
        here = self._loads.get(load_size(load))
        return (here is None or not here.is_timed) and not self.uses_draft(load)

    def gain(self, load: int) -> float | None:
        """Tokens of passes with the draft for each of those without one in the same time, at the nearest load where
        that was judged; None where it was nowhere."""
        nearest = self._nearest(load, lambda one: one.is_judged)
        if nearest is None:
            return None
        return 1.0 if nearest.paused else nearest.gain

    def _nearest(self, load: int, is_known: Callable[[_LoadGain], bool]) -> _LoadGain | None:
        """What is known of the nearest load in powers of two. A larger one says more than a smaller one, as drafts gain
        less with more sequences."""
        size, known = load_size(load), [of for of, one in self._loads.items() if is_known(one)]
        nearest = min(known, key=lambda of: (abs(of - size), -of), default=None)
        return None if nearest is None else self._loads[nearest]

    def observe_pass(self, load: int, rows: int, seconds: float, *, with_draft: bool) -> None:
        """Observe the time of a pass of so many `rows`, those of prompts among them, from the end of the one before."""
        here = self._loads[load_size(load)]
        (here.followed if with_draft else here.alone).observe_pass(rows, seconds)
        if not with_draft and here.paused:
            here.paused -= 1

    def compare(self, load: int, needed: float, by_lookup: float, *, with_draft: bool = True) -> None:
        """Observe the passes `with_draft` or without that a stretch of text needed, and those that lookup alone would
        have needed."""
        here = self._loads[load_size(load)]
        (here.with_draft if with_draft else here.without_draft).compare(needed, by_lookup)
        if not with_draft:
            return
        if not here.is_timed:
            nearest = self._nearest(load, lambda one: one.is_timed)
            here.in_doubt |= here.is_doubtful(None if nearest is None else nearest.cost)
        elif here.at_best < 1.0:
            here.paused = round(here.pause * min(_UNJUDGED, here.followed.count))
            here.with_draft, here.followed = _ComparedPasses(), _PassSeconds()
            here.pause = min(1 / TRYING, 2 * here.pause)
        elif here.with_draft.count >= _ENOUGH and here.gain > MARGIN:
            here.pause = _FIRST_PAUSE

    def forget(self) -> None:
        """Another draft has connected: drop what was observed of the last one."""
        for here in self._loads.values():
            here.with_draft, here.followed = _ComparedPasses(), _PassSeconds()
            here.paused, here.pause = 0, _FIRST_PAUSE
            here.in_doubt = False
