"""How many rows a pass gets whose rows the device chooses.

The device ranks what is drafted by the probability of its path and takes the best (`tree_kernels.node_table`). How many
it may take is chosen here, among the sizes that steps are captured for: those that make most tokens a second. What they
make is known for every size at once, since each pass says what every sequence's best 1, 3, 7 .. rows promised, of which
the device takes the best of all; promises are held to what was accepted. What they take is measured, by load and size.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from enum import Enum

import numpy as np

from outrider.sampling import VerificationMode
from target_service.core.running_means import RunningMean
from target_service.core.schedule import Schedule
from target_service.core.sequence import DevicePass
from target_service.execution.batch import DeviceRows
from target_service.model.cuda_graphs.sizes import row_sizes
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.draft_times import StepTime
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.node_table import KEPT, PROSPECTS

# What one launch moves what promises are worth, and what passes promise: the mean of some fifty launches, which is a
# quarter of a second at 8B size.
_SHARE = 0.02
# What the best 1, 3, 7 .. rows of a sequence are taken to bring before anything is known: prompt lookup alone, on the
# answers that `lookup_costs.RIGHT` is from.
_FIRST_PROSPECTS = (0.4, 0.7, 0.9, 1.0, 1.0, 1.0)
# Rows for each token that a sequence may still say. Chosen: as many children as a head's nodes have. A page or two are
# held for them at the end.
_GUESSES = 8
# Below this a promise says nothing.
_LEAST_EXPECTED = 1e-3
# Launches of a kind at one load before their time is believed, and launches until all are timed anew: contexts grow.
_ENOUGH, _REFRESH = 4, 512
# A size that is not timed yet is tried where it seems to make this share of what the best does.
_WORTH_TIMING = 0.7
# Launches without drafts before a try, from the first to the longest pause: some five seconds at 8B size. Shorter where
# tries take less than this share of the time even so: a draft that has just begun, or a text that begins to repeat
# itself, is found soon. Chosen: the design grants a hundredth of the time to trying.
_PAUSE, _LONGEST_PAUSE, _TRYING = 64, 1024, 0.01
# What drafted passes have to make beyond plain ones, so that noise does not choose.
_MARGIN = 1.02
# Launches of a try, and what the first guess counts for in launches.
_TRY, _PRIOR = 6, 3
# What one pass moves the trust in a draft's scores for each token that it promised too much; a larger one follows the
# noise of single passes (0.02 moved trust by a seventh up and down in a simulation).
_TRUST_SHARE = 0.005
# Ends that are chosen, not measured: from the lower one, where hardly a row pays, some 600 passes that each bring a
# token more than promised lead back to full trust; the upper one keeps a lucky run from filling passes with wrong rows.
_LEAST_TRUST, _MOST_TRUST = 0.05, 1.25


class Kind(Enum):
    """What passes have, beside the sequences' own texts: no draft, one that is behind by a pass, or one that was waited
    for."""

    ALONE = "alone"
    AHEAD = "ahead"
    HELD = "held"


class _Seen:
    """What passes of a kind were expected to bring, and brought, lately."""

    def __init__(self) -> None:
        # Of the best 1, 3, 7 .. rows a sequence.
        self._prospects = [RunningMean(_SHARE, tokens, _PRIOR) for tokens in _FIRST_PROSPECTS]
        # Their quotient is what an expectation is worth.
        self._accepted, self._expected = RunningMean(_SHARE, 1.0, _PRIOR), RunningMean(_SHARE, 1.0, _PRIOR)

    def restart(self) -> None:
        """Learn quickly again: a draft is followed anew."""
        for mean in (self._accepted, self._expected, *self._prospects):
            mean.count = _PRIOR

    def observe(self, passes: SequenceOf[DevicePass]) -> None:
        count = len(passes)
        self._accepted.observe(sum(one.accepted for one in passes) / count)
        self._expected.observe(sum(one.expected for one in passes) / count)
        for prospect, promised in zip(self._prospects, pooled([one.prospects for one in passes]), strict=True):
            prospect.observe(promised)

    def tokens(self, drafted: float) -> float:
        """Of a sequence in a pass with so many drafted rows of it, on average."""
        worth = self._accepted.value / max(self._expected.value, _LEAST_EXPECTED)
        return 1 + worth * _between(drafted, self._prospects)


class RowPolicy:
    """Chooses launch by launch."""

    def __init__(
        self,
        most: int,
        cost: StepCost | None,
        live: Mapping[int, LiveSequence],
        disable_above: int = 1 << 30,
    ) -> None:
        """`most` rows of a sequence, 0 for none at any time, and none with more sequences than `disable_above`. `cost`
        of None takes as many rows as are allowed, always. `live` stays the engine's own table."""
        self.on = most > 0
        self._limit = min(most, KEPT)
        self._cost = cost
        self._live = live
        self._disable_above = disable_above
        self._seen = {kind: _Seen() for kind in Kind}
        self._since_drafts, self._pause, self._left = 0, _PAUSE, 0
        self._was_alone = True
        # What a pass takes, by load in powers of two, rows (0 for a plain one) and kind: as a multiple of what its
        # roots should cost.
        self._times: dict[tuple[int, int, Kind], StepTime] = {}
        self._since_timed = 0
        self._tokens_each = RunningMean.settled(_SHARE, 1.0)
        # See `NodeTables.trust`.
        self.trust = 1.0

    @property
    def tokens_each(self) -> float:
        """Tokens that a pass makes of a sequence, lately."""
        return self._tokens_each.value

    def choose(self, schedule: Schedule, max_rows: int, kind: Kind, waits: float = 0.0) -> DeviceRows | None:
        """The rows of a step of at most `max_rows` that `waits` so many seconds for its drafts; None where a plain step
        is better, or some sequence's distribution does not allow any other."""
        if not self.on:
            return None
        every = [self._most(self._live[chunk.sequence.sequence_id]) for chunk in schedule.chunks]
        reading, allowed = schedule.reading, [limit for limit in every if limit is not None]
        if len(allowed) < len(every) or len(every) > self._disable_above or not any(allowed[reading:]):
            return None
        limits = (*[0] * reading, *allowed[reading:])
        read_rows = sum(chunk.count for chunk in schedule.chunks[:reading])
        best = self._best(limits[reading:], read_rows, max_rows, kind, waits)
        return DeviceRows(best, limits, reading, read_rows) if best else None

    def _best(self, limits: SequenceOf[int], read_rows: int, max_rows: int, kind: Kind, waits: float) -> int:
        """Rows of a pass of sequences with these limits, beside so many that are read; 0 for a plain one."""
        # Beside none: what else the device may do in the same time.
        sizes, sequences = _sizes(limits, 0, max_rows), len(limits)
        if not read_rows:
            if not sizes or self._cost is None:
                return sizes[-1] if sizes else 0
            return self._tried(sizes, sequences, kind, waits)
        beside = _sizes(limits, read_rows, max_rows)
        if not beside or self._cost is None:
            return beside[-1] if beside else 0
        rate = max(sequences * self._rate(sequences, rows, kind, waits) for rows in (0, *sizes))
        tokens = {rows: sequences * self._tokens(sequences, rows - read_rows, kind) for rows in beside}
        # Rows pay that bring more than passes without a prompt make of the time that they take. Up to the size that a
        # step has anyway they take none.
        worth = {rows: tokens[rows] - rate * self._cost(rows) for rows in beside}
        best = max(beside, key=lambda rows: worth[rows])
        return best if tokens[best] > _MARGIN * sequences else 0

    def seconds(self, sequences: int, rows: int, kind: Kind) -> float:
        """What a pass of so many sequences and `rows`, 0 for a plain one, takes; 0 where nobody knows yet."""
        times = self._times.get((sequences.bit_length(), rows, kind))
        if times is None or times.count < _ENOUGH or self._cost is None:
            return 0.0
        return times.value * self._cost(sequences)

    def observe_time(self, sequences: int, device_rows: DeviceRows | None, seconds: float, kind: Kind) -> None:
        """Take note of what a pass took."""
        if self._cost is not None:
            rows = device_rows.rows if device_rows is not None else 0
            times = self._times.setdefault((sequences.bit_length(), rows, kind), StepTime.of(_ENOUGH))
            times.observe(seconds / self._cost(sequences))

    def observe(self, outcomes: SequenceOf[Verified | None], kind: Kind, drafted: SequenceOf[bool]) -> None:
        """Learn from what passes accepted whose rows the device chose; `drafted`, the draft has drafted for the
        sequence by now."""
        passes = [one for outcome in outcomes if outcome is not None for one in outcome.device_passes]
        if not passes:
            self._tokens_each.observe(1.0)
            return
        self._seen[kind].observe(passes)
        self._tokens_each.observe(1 + sum(one.accepted for one in passes) / len(passes))
        known = zip(outcomes, drafted, strict=True)
        followed = [one for outcome, has in known if has and outcome is not None for one in outcome.device_passes]
        if kind is not Kind.ALONE and followed:
            from_table = sum(one.accepted_from_table for one in followed) / len(followed)
            excess = from_table - sum(one.expected_from_table for one in followed) / len(followed)
            self.trust = min(_MOST_TRUST, max(_LEAST_TRUST, self.trust * (1 + _TRUST_SHARE * excess)))

    def _most(self, live: LiveSequence) -> int | None:
        """Rows that the sequence may have, None if its distribution does not allow any beside it."""
        request = live.sequence.request
        # What is verified is chosen by what it says, and rejection sampling does not allow that.
        if not live.verifier.on_device or request.mode is VerificationMode.REJECTION or request.external:
            return None
        sequence = live.sequence
        # The target says the last token itself. Of few that are left several may be guessed for each.
        left = request.max_tokens - sequence.totals.completion_tokens - sequence.pending_tokens - 1
        return max(0, min(self._limit, request.max_draft_nodes, _GUESSES * left)) if request.speculate else 0

    def _tried(self, sizes: SequenceOf[int], sequences: int, kind: Kind, waits: float) -> int:
        """What makes most, or at times another, for else nobody would know what that takes by now."""
        if self._was_alone and kind is not Kind.ALONE:
            self._seen[kind].restart()
            self._since_drafts, self._pause = _PAUSE // 2, _PAUSE
        self._was_alone = kind is Kind.ALONE
        self._since_timed += 1
        if self._since_timed > _REFRESH:
            self._since_timed = 0
            for rows in (0, *sizes):
                self._times.pop((sequences.bit_length(), rows, kind), None)
        rates = {rows: self._rate(sequences, rows, kind, waits) for rows in (0, *sizes)}
        rates[0] *= _MARGIN
        best = max(rates, key=lambda rows: rates[rows])
        for rows in rates:
            if not self.seconds(sequences, rows, kind) and rates[rows] > _WORTH_TIMING * rates[best]:
                return rows
        if best:
            self._since_drafts, self._pause = 0, _PAUSE
            return best
        if self._left:
            self._left -= 1
            return sizes[0]
        self._since_drafts += 1
        dearer = self._expected_seconds(sequences, sizes[0], kind) / self._expected_seconds(sequences, 0, kind) - 1
        if self._since_drafts <= min(self._pause, max(_TRY, _TRY * dearer / _TRYING)):
            return 0
        self._since_drafts, self._pause, self._left = 0, min(_LONGEST_PAUSE, 2 * self._pause), _TRY - 1
        return sizes[0]

    def _rate(self, sequences: int, rows: int, kind: Kind, waits: float) -> float:
        """Tokens of a sequence a second, in passes of so many rows, 0 for plain ones, that wait so long."""
        tokens = self._tokens(sequences, rows, kind)
        return tokens / (self._expected_seconds(sequences, rows, kind) + (waits if rows else 0.0))

    def _tokens(self, sequences: int, rows: int, kind: Kind) -> float:
        """Of each sequence, in a pass of so many rows of theirs."""
        return self._seen[kind].tokens(max(0, rows - sequences) / sequences)

    def _expected_seconds(self, sequences: int, rows: int, kind: Kind) -> float:
        """As measured, or by what rows cost beside those of a size that was."""
        assert self._cost is not None
        measured = self.seconds(sequences, rows, kind)
        if measured:
            return measured
        plain = self.seconds(sequences, 0, kind) or self._cost(sequences)
        return plain * self._cost(max(sequences, rows)) / self._cost(sequences)


def _sizes(limits: SequenceOf[int], read_rows: int, max_rows: int) -> list[int]:
    """Rows of all that a pass may have, of which so many are read, and those of its roots are others."""
    held = read_rows + len(limits)
    larger = [size for size in row_sizes(max_rows) if size > held]
    # The smallest that holds all, and those below.
    return larger[: 1 + sum(size < held + sum(limits) for size in larger)]


def pooled(prospects: SequenceOf[SequenceOf[float]]) -> SequenceOf[float]:
    """What 1, 3, 7 .. rows for each of B sequences promise a sequence where they go to the best of all, as the device
    gives them out, and not as many to each.

    Args:
        prospects: [B][len(PROSPECTS)] what each sequence's own best promise: rising, by less and less for a row.

    Returns:
        [len(PROSPECTS)], on straight lines between what is known.
    """
    if len(prospects) == 1:
        return prospects[0]
    promised = np.array(prospects)
    steps = np.diff(PROSPECTS, prepend=0)
    gains = np.diff(promised, prepend=0.0)
    # Stretches of rows, the most promising first.
    order = np.argsort(-(gains / steps).ravel(), kind="stable")
    rows = np.cumsum(np.broadcast_to(steps, gains.shape).ravel()[order])
    wanted = np.array(PROSPECTS) * len(promised)
    found = np.interp(wanted, np.append(0, rows), np.append(0.0, np.cumsum(gains.ravel()[order])))
    return list((found / len(promised)).tolist())


def _between(drafted: float, prospects: SequenceOf[RunningMean]) -> float:
    """What so many rows of a sequence promise, on straight lines between those that are known."""
    before, expected = 0.0, 0.0
    for count, known in zip(PROSPECTS, prospects, strict=True):
        if drafted <= count:
            return expected + (known.value - expected) * (drafted - before) / (count - before)
        before, expected = float(count), known.value
    return expected
