"""How many rows a pass gets whose rows the device chooses.

The device ranks drafted nodes by path probability and takes the best (`tree_kernels.node_table`). How many it may take
is chosen here, among the sizes that steps are captured for: the size that makes most tokens a second. Its tokens are
known for every size at once, since each pass reports the expected tokens of every sequence's best 1, 3, 7 .. rows,
which are scaled by what was accepted. Its time is measured, by load and size.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from target_service.compiling import compiled
from target_service.core.running_means import RunningMean
from target_service.core.schedule import Schedule
from target_service.core.sequence import DevicePass
from target_service.execution.batch import DeviceRows
from target_service.model.cuda_graphs.sizes import row_sizes
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.draft_times import StepTime
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.node_table.layout import KEPT, PROSPECTS

Reals = npt.NDArray[np.float64]

# Weight of one launch in the means of expected and accepted tokens: some fifty launches, a quarter of a second at 8B
# size.
_SHARE = 0.02
# Rows of a sequence, on average, for which expected tokens are known: `PROSPECTS`, and fewer than one of each sequence,
# which go to the surest. With many sequences a captured size has no more room.
POOLED = (0.25, 0.5, *map(float, PROSPECTS))
# Expected tokens of these before any pass: those of prompt lookup alone, on the answers that `layout.RIGHT` is from, of
# which fewer rows than sequences take their part, as if all were as sure.
_FIRST_PROSPECTS = (0.1, 0.2, 0.4, 0.7, 0.9, 1.0, 1.0, 1.0)
_COUNTS, _POOLED = np.array(PROSPECTS, np.float64), np.array(POOLED, np.float64)
# Rows for each token that a sequence may still generate. Chosen: as many children as a head's nodes have. A page or two
# are held for them at the end.
_GUESSES = 8
# The smallest mean of expected tokens that is divided by.
_LEAST_EXPECTED = 1e-3
# Launches of a mode at one load before their time is used, and launches until all are timed again: contexts grow.
_ENOUGH, _REFRESH = 4, 512
# Share of the best rate that a size needs, as estimated, to be timed.
_WORTH_TIMING = 0.7
# Launches without drafts before a try, from the first to the longest pause: some five seconds at 8B size. Shorter where
# tries then still take less than this share of the time, so that a new draft, or a text that begins to repeat itself,
# is noticed soon. Chosen: the design allows a hundredth of the time for tries.
_PAUSE, _LONGEST_PAUSE, _TRYING = 64, 1024, 0.01
# Rate of drafted passes that is needed against plain ones, so that noise does not decide.
_MARGIN = 1.02
# Launches of a try, and the weight of the initial values in launches.
_TRY, _PRIOR = 6, 3
# Change of the trust in a draft's scores by one pass, for each token expected too much; a larger one follows the noise
# of single passes (0.02 moved trust by a seventh up and down in a simulation).
_TRUST_SHARE = 0.005
# Bounds, chosen, not measured: from the lower one, where hardly a row pays, some 600 passes that each bring a token
# more than expected lead back to full trust; the upper one keeps a lucky run from filling passes with wrong rows.
_LEAST_TRUST, _MOST_TRUST = 0.05, 1.25


class _Yield:
    """Expected and accepted tokens of recent passes of one mode."""

    def __init__(self) -> None:
        # Expected tokens of a sequence by its rows, see `POOLED`.
        self._prospects = [RunningMean(_SHARE, tokens, _PRIOR) for tokens in _FIRST_PROSPECTS]
        # Their quotient scales expected tokens.
        self._accepted, self._expected = RunningMean(_SHARE, 1.0, _PRIOR), RunningMean(_SHARE, 1.0, _PRIOR)

    def restart(self) -> None:
        """Learn quickly again, since a draft is used again."""
        for mean in (self._accepted, self._expected, *self._prospects):
            mean.count = _PRIOR

    def observe_passes(self, passes: SequenceOf[DevicePass]) -> None:
        count = len(passes)
        self._accepted.observe(sum([one.accepted for one in passes]) / count)
        self._expected.observe(sum([one.expected for one in passes]) / count)
        for prospect, expected in zip(self._prospects, pooled([one.prospects for one in passes]), strict=True):
            prospect.observe(expected)

    def tokens(self, drafted: float) -> float:
        """Tokens of a sequence in a pass with `drafted` rows for each sequence, on average."""
        if not drafted:
            return 1.0
        scale = self._accepted.value / max(self._expected.value, _LEAST_EXPECTED)
        return 1 + scale * _between(drafted, self._prospects)


class RowPolicy:
    """Chooses the rows of each launch."""

    def __init__(
        self, most: int, cost: StepCost | None, live: Mapping[int, LiveSequence], disable_above: int = 1 << 30
    ) -> None:
        """A sequence gets at most `most` rows, and none above `disable_above` sequences; 0 turns the policy off. `cost`
        of None takes as many rows as are allowed. `live` is the engine's own table."""
        self.on = most > 0
        if self.on:
            # Compile now, not at the first pass.
            pooled([_FIRST_PROSPECTS[-len(PROSPECTS) :]] * 2)
        self._limit = min(most, KEPT)
        self._cost = cost
        self._live = live
        self._disable_above = disable_above
        self._yields = {mode: _Yield() for mode in (None, *LaunchMode)}
        self._since_drafts, self._pause, self._left = 0, _PAUSE, 0
        self._was_alone = True
        # By load in powers of two and mode: the time of a pass by its rows, 0 for a plain one, as a multiple of its
        # roots' cost.
        self._times: dict[tuple[int, LaunchMode | None], dict[int, StepTime]] = {}
        self._since_timed = 0
        # Tokens of a sequence in a recent pass.
        self.tokens_each = RunningMean.settled(_SHARE, 1.0)
        # See `NodeTables.trust`.
        self.trust = 1.0

    def choose(
        self, schedule: Schedule, max_rows: int, mode: LaunchMode | None, waits: float = 0.0, cut_rows: int = 0
    ) -> DeviceRows | None:
        """The rows of a step of at most `max_rows`, which waits `waits` seconds for its drafts, with those of the
        sequences whose rows the host lays out, `cut_rows` drafted ones among them; None where a plain step is better,
        or there are only such sequences."""
        if not self.on:
            return None
        live, chunks, laid_out = self._live, schedule.chunks, schedule.laid_out
        if len(chunks) > self._disable_above:
            return None
        limits = [self._max_rows(live[chunk.sequence.sequence_id]) for chunk in chunks[laid_out:]]
        if not any(limits):
            return None
        rows = cut_rows + sum([chunk.count for chunk in chunks[:laid_out]])
        best = self._best(limits, rows, max_rows, mode, waits)
        return DeviceRows(best, (*[0] * laid_out, *limits), laid_out, rows) if best else None

    def _best(
        self, limits: SequenceOf[int], laid_out_rows: int, max_rows: int, mode: LaunchMode | None, waits: float
    ) -> int:
        """Rows of a pass of sequences with these limits, beside those that the host lays out; 0 for a plain one."""
        # Sizes of passes without those, which the device could run instead.
        sizes, sequences = _sizes(limits, 0, max_rows), len(limits)
        beside = _sizes(limits, laid_out_rows, max_rows) if laid_out_rows else sizes
        if not beside or self._cost is None:
            return beside[-1] if beside else 0
        if not laid_out_rows:
            return self._tried(sizes, sequences, mode, waits)
        rate = sequences * max(self._rates(sizes, sequences, mode, waits).values())
        tokens = {rows: sequences * self._tokens(sequences, rows - laid_out_rows, mode) for rows in beside}
        # Rows pay if they bring more than passes without the others do in the time that they take.
        profit = {rows: tokens[rows] - rate * self._cost(rows) for rows in beside}
        best = max(beside, key=lambda rows: profit[rows])
        plain = row_sizes(max_rows)[bisect.bisect_left(row_sizes(max_rows), laid_out_rows + sequences)]
        return best if profit[best] > _MARGIN * sequences - rate * self._cost(plain) else 0

    def seconds_without_prompts(self, seconds: float, rows: int, prompt_rows: int) -> float:
        """Of the `seconds` of a pass those that its rows of prompts did not add, as costs were measured."""
        if not prompt_rows or self._cost is None:
            return seconds
        added = self._cost(rows) - self._cost(max(1, rows - prompt_rows))
        # Where most of the time was theirs, what is left is mostly noise.
        return max(seconds - added, seconds / 4)

    def seconds(self, sequences: int, rows: int, mode: LaunchMode | None) -> float:
        """Measured seconds of a pass with `rows`, 0 for a plain one; 0 while unknown."""
        measured = self._measured(sequences, mode).get(rows)
        return 0.0 if measured is None or self._cost is None else measured * self._cost(sequences)

    def _measured(self, sequences: int, mode: LaunchMode | None) -> dict[int, float]:
        """By rows, 0 for a plain pass, the measured times of passes as multiples of the cost of their roots."""
        times = self._times.get((sequences.bit_length(), mode), {})
        return {rows: one.value for rows, one in times.items() if one.count >= _ENOUGH}

    def observe_time(
        self, sequences: int, device_rows: DeviceRows | None, seconds: float, mode: LaunchMode | None
    ) -> None:
        if self._cost is not None:
            rows = device_rows.rows if device_rows is not None else 0
            times = self._times.setdefault((sequences.bit_length(), mode), {})
            if rows not in times:
                times[rows] = StepTime(first_few=_ENOUGH)
            times[rows].observe(seconds / self._cost(sequences))

    def observe_passes(
        self, outcomes: SequenceOf[Verified | None], mode: LaunchMode | None, drafted: SequenceOf[bool]
    ) -> None:
        """Learn from passes whose rows the device chose. `drafted`: the sequence's table holds only a draft's nodes."""
        passes = [one for outcome in outcomes if outcome is not None for one in outcome.device_passes]
        if not passes:
            self.tokens_each.observe(1.0)
            return
        self._yields[mode].observe_passes(passes)
        self.tokens_each.observe(1 + sum([one.accepted for one in passes]) / len(passes))
        known = zip(outcomes, drafted, strict=True)
        drafted_passes = [one for outcome, has in known if has and outcome is not None for one in outcome.device_passes]
        if mode is not None and drafted_passes:
            from_table = sum([one.accepted_from_table for one in drafted_passes]) / len(drafted_passes)
            excess = from_table - sum([one.expected_from_table for one in drafted_passes]) / len(drafted_passes)
            self.trust = min(_MOST_TRUST, max(_LEAST_TRUST, self.trust * (1 + _TRUST_SHARE * excess)))

    def _max_rows(self, live: LiveSequence) -> int:
        """Drafted rows that the sequence may have."""
        request, grammar = live.sequence.request, live.verifier.grammar
        if not request.speculate or (grammar is not None and grammar.slow):
            return 0
        # The target samples the last token itself.
        return max(0, min(self._limit, request.max_draft_nodes, _GUESSES * (live.sequence.remaining - 1)))

    def _tried(self, sizes: SequenceOf[int], sequences: int, mode: LaunchMode | None, waits: float) -> int:
        """The size with the highest rate, or at times another one, to measure it again."""
        if self._was_alone and mode is not None:
            self._yields[mode].restart()
            self._since_drafts, self._pause = _PAUSE // 2, _PAUSE
        self._was_alone = mode is None
        self._since_timed += 1
        if self._since_timed > _REFRESH:
            self._since_timed = 0
            times = self._times.get((sequences.bit_length(), mode), {})
            for rows in (0, *sizes):
                times.pop(rows, None)
        rates, measured = self._rates(sizes, sequences, mode, waits), self._measured(sequences, mode)
        rates[0] *= _MARGIN
        best = max(rates, key=rates.__getitem__)
        for rows, rate in rates.items():
            if rows not in measured and rate > _WORTH_TIMING * rates[best]:
                return rows
        if best:
            self._since_drafts, self._pause = 0, _PAUSE
            return best
        if self._left:
            self._left -= 1
            return sizes[0]
        self._since_drafts += 1
        expected = self._expected_times((0, sizes[0]), sequences, mode)
        slower = expected[sizes[0]] / expected[0] - 1
        if self._since_drafts <= min(self._pause, max(_TRY, _TRY * slower / _TRYING)):
            return 0
        self._since_drafts, self._pause, self._left = 0, min(_LONGEST_PAUSE, 2 * self._pause), _TRY - 1
        return sizes[0]

    def _rates(self, sizes: SequenceOf[int], sequences: int, mode: LaunchMode | None, waits: float) -> dict[int, float]:
        """Tokens a second of a sequence by the rows of a pass, 0 for a plain one; others wait `waits` seconds."""
        assert self._cost is not None
        cost = self._cost(sequences)
        return {
            rows: self._tokens(sequences, rows, mode) / (cost * multiple + (waits if rows else 0.0))
            for rows, multiple in self._expected_times((0, *sizes), sequences, mode).items()
        }

    def _tokens(self, sequences: int, rows: int, mode: LaunchMode | None) -> float:
        """Tokens of each sequence in a pass with `rows`."""
        return self._yields[mode].tokens(max(0, rows - sequences) / sequences)

    def _expected_times(self, sizes: SequenceOf[int], sequences: int, mode: LaunchMode | None) -> dict[int, float]:
        """By rows, the times of passes as multiples of the cost of their roots: as measured, or that of a plain pass
        scaled by the cost of the rows."""
        assert self._cost is not None
        measured, cost = self._measured(sequences, mode), self._cost(sequences)
        plain = measured.get(0, 1.0)
        return {
            rows: measured[rows] if rows in measured else plain * self._cost(max(sequences, rows)) / cost
            for rows in sizes
        }


def _sizes(limits: SequenceOf[int], prefill_rows: int, max_rows: int) -> list[int]:
    """Sizes that a pass may have with rows of prompts, one root for each limit, and drafted rows up to the limits."""
    held = prefill_rows + len(limits)
    sizes = row_sizes(max_rows)
    first = bisect.bisect_right(sizes, held)
    # The smallest size that holds all, and those below.
    return list(sizes[first : 1 + bisect.bisect_left(sizes, held + sum(limits), first)])


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


def _between(drafted: float, prospects: SequenceOf[RunningMean]) -> float:
    """Expected tokens of `drafted` rows of a sequence, interpolated linearly."""
    before, expected = 0.0, 0.0
    for count, known in zip(POOLED, prospects, strict=True):
        if drafted <= count:
            return expected + (known.value - expected) * (drafted - before) / (count - before)
        before, expected = count, known.value
    return expected
