"""What passes take whose rows the device chooses, and what they make: one estimate of each, for every decision.

Both hold at every load: times are multiples of what rows cost, and what a sequence gains by so many rows hardly depends
on how many sequences there are.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from target_service.compiling import compiled
from target_service.core.running_means import RunningMean, RunningTime
from target_service.speculation.policy.launch_mode import LaunchMode, load_size
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.node_table.layout import PROSPECTS

# Launches of a kind at one load before their time is used.
ENOUGH = 4
# Launches of a kind in a row whose longest bounds its time: what slowed earlier ones may be over.
_IN_A_ROW = 4
# The weight of one launch in the time of its kind, a mean of some ten; and a launch counts for at most this many times
# its kind's mean and a plain pass together, so that a pause of the machine does not decide. Chosen.
_SHARE, _BOUND = 0.1, 2.0
Mode = LaunchMode | None
# Rows of a sequence, on average, for which expected tokens are known: `PROSPECTS`, and fewer than one of each sequence,
# which go to the surest. With many sequences a captured size has no more room.
POOLED = (0.25, 0.5, *map(float, PROSPECTS))
# Expected tokens of these before any pass: those of prompt lookup alone, on the answers that `layout.RIGHT` is from, of
# which fewer rows than sequences take their part, as if all were as sure.
_FIRST_PROSPECTS = (0.1, 0.2, 0.4, 0.7, 0.9, 1.0, 1.0, 1.0)
# Between two of them lies the geometric mean.
_BORDERS = [(one * other) ** 0.5 for one, other in pairwise(POOLED)]
_COUNTS, _POOLED = np.array(PROSPECTS, np.float64), np.array(POOLED, np.float64)
# The weight of the initial values in launches.
_PRIOR = 3
# Of steps that waited for trees that the host cuts: the weight of a plain pass's time in their means, half of whose
# weight lies in 35 such passes then. Chosen; what it makes: `benchmarks/results/2026-12-01-cpu-waits-for-cuts.md`.
_WAITED_SHARE = 0.02
# What is expected of a sequence's last rows comes true less often than what is expected of its first: with 64 sequences
# seven rows of each made no more tokens than three, and were chosen
# (`benchmarks/results/2026-11-28-h200-whole-answers.md`). So what was expected is corrected by the rows of a pass: the
# passes of sequences that are remembered, and the expected tokens for which the quotient of all passes counts. Chosen:
# with 64 sequences a size is judged after some five launches.
_REMEMBERED, _PRIOR_TOKENS = 4096, 384.0
Reals = npt.NDArray[np.float64]


@dataclass(slots=True)
class PassTime(RunningTime):
    """The time of launches of a kind, in plain passes; never more than the longest of the last few."""

    share: float = _SHARE
    first_few: int = ENOUGH
    most: float = _BOUND
    unit: float = 1.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_IN_A_ROW))

    def observe(self, value: float) -> None:
        is_first = self.is_first
        self.last.append(value)
        RunningTime.observe(self, value)
        # A time that is always long shows after a few launches.
        if not is_first and len(self.last) == _IN_A_ROW:
            self.value = min(self.value, max(self.last))


class PassTimes:
    """Times are multiples of the cost of a pass of the sequences' roots, so that what a size takes at one load is known
    at the others; None is the mode of passes without a draft."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        # By load in powers of two and mode: by rows, 0 for a plain pass.
        self._times: dict[tuple[int, Mode], dict[int, PassTime]] = {}
        # By load and mode: the time in which the device does nothing before a pass.
        self._gaps = defaultdict[tuple[int, Mode], PassTime](PassTime)

    def observe_pass(self, sequences: int, rows: int, seconds: float, mode: Mode) -> None:
        """Observe the `seconds` of a pass on the device; `rows` is 0 for a plain one."""
        times = self._times.setdefault((load_size(sequences), mode), {})
        if rows not in times:
            times[rows] = PassTime()
        times[rows].observe(seconds / self.cost(sequences))

    def observe_gap(self, sequences: int, seconds: float, mode: Mode) -> None:
        """Observe for how long the device had nothing to do before a pass."""
        self._gaps[load_size(sequences), mode].observe(max(0.0, seconds) / self.cost(sequences))

    def gap(self, sequences: int, mode: Mode) -> float | None:
        """Seconds in which the device does nothing before a pass, as measured at this load, else at the nearest; None
        where that was not measured."""
        size = load_size(sequences)
        known = [load for (load, of), gap in self._gaps.items() if of is mode and gap.count >= ENOUGH]
        nearest = min(known, key=lambda load: (abs(load - size), load), default=None)
        return None if nearest is None else self._gaps[nearest, mode].value * self.cost(sequences)

    def gaps_observed(self, sequences: int, mode: Mode) -> int:
        """At this load, how many gaps were observed."""
        size = load_size(sequences)
        return self._gaps[size, mode].count if (size, mode) in self._gaps else 0

    def measured(self, sequences: int, mode: Mode) -> dict[int, float]:
        """By rows, 0 for a plain pass, the measured times."""
        times = self._times.get((load_size(sequences), mode), {})
        return {rows: one.value for rows, one in times.items() if one.count >= ENOUGH}

    def expected(self, sizes: SequenceOf[int], sequences: int, mode: Mode) -> dict[int, float]:
        """By rows, the times as measured, or that of a plain pass scaled by the cost of the rows."""
        measured, cost = self.measured(sequences, mode), self.cost(sequences)
        plain = measured.get(0) or self._scale(sequences, mode)
        return {
            rows: measured[rows] if rows in measured else plain * self.cost(max(sequences, rows)) / cost
            for rows in sizes
        }

    def _scale(self, sequences: int, mode: Mode) -> float:
        """What passes of this load take of their cost: in this mode, else in another, else 1."""
        for other in (mode, LaunchMode.RUN_AHEAD, LaunchMode.WAIT_FOR_DRAFT, None):
            measured, cost = self.measured(sequences, other), self.cost(sequences)
            if measured:
                return min(times * cost / self.cost(max(sequences, rows)) for rows, times in measured.items())
        return 1.0

    def forget(self, sizes: SequenceOf[int], sequences: int, mode: Mode) -> None:
        """Measure passes of these sizes anew."""
        times = self._times.get((load_size(sequences), mode), {})
        for rows in sizes:
            times.pop(rows, None)


class _Correction:
    """What passes with about so many rows made of what was expected of them."""

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0

    def observe_launch(self, sequences: int, accepted: float, expected: float) -> None:
        """Observe the tokens of all sequences of a launch."""
        kept = _REMEMBERED / (_REMEMBERED + sequences)
        self._accepted = kept * self._accepted + accepted
        self._expected = kept * self._expected + expected

    def quotient(self, usual: float) -> float:
        """Accepted for each expected token, where all passes have the `usual` one."""
        return (self._accepted + _PRIOR_TOKENS * usual) / (self._expected + _PRIOR_TOKENS)


class PassYield(Protocol):
    """What a pass made of one sequence, and what was expected; as in `DevicePass`."""

    @property
    def drafted(self) -> int:
        """Rows beside the root; 0 where what was expected is right for any number of them, as behind a calibration."""

    @property
    def accepted(self) -> float:
        """Drafted rows that were accepted."""

    @property
    def expected(self) -> float:
        """Sum of the path probabilities of the verified rows."""

    @property
    def prospects(self) -> SequenceOf[float]:
        """[len(PROSPECTS)] the same of its best 1, 3, 7 .. rows."""


class TokenYield:
    """Expected and accepted tokens of recent passes of one mode, at any load: what a sequence gains by so many rows
    hardly depends on how many sequences there are."""

    def __init__(self) -> None:
        # Weight of one launch in the means of expected and accepted tokens: some fifty launches, a quarter of a second
        # at 8B size.
        share = 0.02
        # Expected tokens of a sequence by its rows, see `POOLED`.
        self._prospects = [RunningMean(share, tokens, _PRIOR) for tokens in _FIRST_PROSPECTS]
        # Of all passes, whatever their rows.
        self._accepted, self._expected = RunningMean(share, 1.0, _PRIOR), RunningMean(share, 1.0, _PRIOR)
        self._corrections = [_Correction() for _ in POOLED]
        # Tokens of a sequence by its rows, see `POOLED`; None until they are asked for.
        self._tokens: list[float] | None = None
        # Launches since the first, whatever was restarted.
        self.count = 0

    def restart(self) -> None:
        """Learn quickly again, since a draft is used again."""
        for mean in (self._accepted, self._expected, *self._prospects):
            mean.count = _PRIOR

    def observe_passes(self, passes: SequenceOf[PassYield]) -> None:
        count = len(passes)
        self.count += 1
        self._tokens = None
        accepted, expected = sum([one.accepted for one in passes]), sum([one.expected for one in passes])
        self._accepted.observe(accepted / count)
        self._expected.observe(expected / count)
        drafted = sum([one.drafted for one in passes]) / count
        # What one sequence makes varies by as much as it is, and its rows are not ranked against others'.
        if drafted and count > 1:
            self._corrections[_nearest(drafted)].observe_launch(count, accepted, expected)
        for prospect, own in zip(self._prospects, pooled([one.prospects for one in passes]), strict=True):
            prospect.observe(own)

    def tokens(self, drafted: float) -> float:
        """Tokens of a sequence in a pass with `drafted` rows for each sequence, on average."""
        if not drafted:
            return 1.0
        if self._tokens is None:
            # The smallest mean of expected tokens that is divided by.
            usual = self._accepted.value / max(self._expected.value, 1e-3)
            corrected = zip(self._corrections, self._prospects, strict=True)
            made = [one.quotient(usual) * prospect.value for one, prospect in corrected]
            # More rows never make fewer tokens.
            self._tokens = list(accumulate(made, max))
        return 1 + _between(drafted, self._tokens)


@dataclass(slots=True)
class WaitYield:
    """What steps that waited for their drafts made of a sequence, at one load, and what their drafted rows took. Many
    have no drafted row, since nothing good enough was drafted; others pay for them. So what is right for the mean tree
    is not what they make."""

    # All steps; and of recent ones the sums, in which the weight of each falls with the time since.
    count: int = 0
    _steps: float = 0.0
    _tokens: float = 0.0
    _extra: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens of a sequence in a step."""
        return self._tokens / self._steps

    @property
    def extra(self) -> float:
        """Time of the drafted rows, in plain passes."""
        return self._extra / self._steps

    def observe_step(self, tokens: float, extra: float, took: float) -> None:
        """Observe a step that `took` so many plain passes, the wait and the drafted rows among them."""
        kept = 1 / (1 + _WAITED_SHARE * took)
        self.count += 1
        self._steps, self._tokens, self._extra = (
            kept * before + new for before, new in ((self._steps, 1), (self._tokens, tokens), (self._extra, extra))
        )

    def restart(self) -> None:
        """Learn quickly again, since drafts are tried again."""
        kept = min(1.0, _PRIOR / self._steps)
        self._steps, self._tokens, self._extra = kept * self._steps, kept * self._tokens, kept * self._extra


def _nearest(drafted: float) -> int:
    """The place in `POOLED` of about so many rows, by their ratio."""
    return bisect.bisect_left(_BORDERS, drafted)


def compile_pooled() -> None:
    """Compile now, not at the first pass."""
    pooled([_FIRST_PROSPECTS[-len(PROSPECTS) :]] * 2)


def pooled(prospects: SequenceOf[SequenceOf[float]]) -> list[float]:
    """Expected tokens of a sequence for the rows per sequence of `POOLED` [len(POOLED)], where the rows go to the best
    of all sequences. `prospects` [B][len(PROSPECTS)] are those of each sequence's own best rows, concave in the
    rows."""
    found: list[float] = _pooled(np.array(prospects), _COUNTS, _POOLED).tolist()
    return found


@compiled
def _pooled(prospects: Reals, counts: Reals, wanted: Reals) -> Reals:
    """See `pooled`: of the sequences' next ranges of rows, that with the most tokens a row is taken, again and again.
    `prospects` is [B, N], `counts` [N] and `wanted` rise. Compiled: numpy's calls take longer than a few hundred
    figures."""
    sequences, sizes = prospects.shape[0], len(wanted)
    place = np.zeros(sequences, np.int64)
    rates = prospects[:, 0] / counts[0]
    found, size, rows, tokens = np.zeros(sizes), 0, 0.0, 0.0
    while size < sizes:
        best = np.argmax(rates)
        here = place[best]
        more = counts[here] - (counts[here - 1] if here else 0.0)
        while size < sizes and rows + more >= wanted[size] * sequences:
            found[size] = (tokens + rates[best] * (wanted[size] * sequences - rows)) / sequences
            size += 1
        rows, tokens, place[best] = rows + more, tokens + rates[best] * more, here + 1
        rates[best] = -np.inf
        if here + 1 < len(counts):
            rates[best] = (prospects[best, here + 1] - prospects[best, here]) / (counts[here + 1] - counts[here])
    return found


def _between(drafted: float, tokens: SequenceOf[float]) -> float:
    """Tokens of `drafted` rows of a sequence, interpolated linearly between those of `POOLED`."""
    before, expected = 0.0, 0.0
    for count, known in zip(POOLED, tokens, strict=True):
        if drafted <= count:
            return expected + (known - expected) * (drafted - before) / (count - before)
        before, expected = count, known
    return expected
