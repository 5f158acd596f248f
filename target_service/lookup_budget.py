"""How many rows the device drafts itself, from the sequences' own texts: as many as pay.

Such a draft costs nobody a round trip, and what it makes is known only afterwards. The device shares the rows of a pass
out to those whose text repeats itself (`tree_kernels.row_shares`); how many there are is chosen here, among the sizes
that steps are captured for: by what drafts made lately, over all sequences, and what passes of so many rows took.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from outrider.sampling import VerificationMode
from target_service.batch import Lookup
from target_service.commit import LiveSequence
from target_service.draft_times import Typical
from target_service.model.buckets import row_sizes
from target_service.scheduler import Schedule
from target_service.step_cost import StepCost
from target_service.verifier import Verified

# Of the drafted tokens that could be right, the share that is missed for each row a sequence that there is on average:
# of one sequence, and how much less of many, whose rows go where they are likeliest to be right. From the answers that
# `row_shares.RIGHT` is from.
_MISSED, _MISSED_BY_MANY = 0.65, 0.33
# What one launch moves the tokens that drafts make, and those before anything is known.
_SHARE = 0.05
_FIRST = 1.5
# Launches without drafts before a try, from the first to the longest pause, for nobody would know otherwise that they
# pay again.
_PAUSE, _LONGEST_PAUSE = 64, 1024
# Launches of a kind at one load before their time is believed, and launches until all are timed anew: contexts grow.
_ENOUGH, _REFRESH = 4, 512
# What is not timed yet is, where it seems to make this share of what the best does.
_WORTH_TIMING = 0.7
# What drafts have to make of several sequences: those of which few are right pay for the others' with longer passes.
_MARGIN = 1.05


class LookupBudget:
    """Chooses launch by launch."""

    def __init__(
        self, most: int, cost: StepCost | None, live: Mapping[int, LiveSequence], disable_above: int = 1 << 30
    ) -> None:
        """`most` rows of a sequence, 0 for none at any time, and none with more sequences than `disable_above`. `cost`
        of None takes as many as that. `live` stays the engine's own table."""
        self.on = most > 0
        self._limit = most
        self._cost = cost
        self._live = live
        self._disable_above = disable_above
        # Drafted tokens that a pass would make of a sequence if it had rows for all that are right.
        self._right = _FIRST
        self._since_drafts, self._pause = 0, _PAUSE
        # What a pass takes, by load in powers of two and rows, 0 for a plain one: as a multiple of what its roots
        # should cost.
        self._times: dict[tuple[int, int], Typical] = {}
        self._since_timed = 0
        # Tokens that a pass without any other draft makes of a sequence, lately.
        self.tokens_each = 1.0

    def choose(self, schedule: Schedule, max_rows: int) -> Lookup | None:
        """What the device drafts in a step of `max_rows`; None where that does not pay, or some sequence's law does not
        allow it."""
        if not self.on or not all(chunk.takes_tree for chunk in schedule.chunks):
            return None
        sequences, best = len(schedule.chunks), 0
        limits = [self._most(self._live[chunk.sequence.sequence_id]) for chunk in schedule.chunks]
        if sizes := self._sizes(limits, max_rows):
            best = sizes[-1] if self._cost is None else self._tried(sizes, sequences)
        if not best:
            self.tokens_each += _SHARE * (1 - self.tokens_each)
            return None
        return Lookup(best, tuple(limit or 0 for limit in limits))

    def _sizes(self, limits: SequenceOf[int | None], max_rows: int) -> list[int]:
        """Rows of all that a pass may have, those of its roots among them."""
        sequences, allowed = len(limits), [limit for limit in limits if limit is not None]
        if len(allowed) < sequences or sequences > self._disable_above or not any(allowed):
            return []
        larger = [size for size in row_sizes(max_rows) if size > sequences]
        # The smallest that holds all, and those below.
        return larger[: 1 + sum(size < sequences + sum(allowed) for size in larger)]

    def _tried(self, sizes: SequenceOf[int], sequences: int) -> int:
        """What makes most, or at times another, for else nobody would know what that takes or makes by now."""
        self._since_timed += 1
        if self._since_timed > _REFRESH:
            self._since_timed = 0
            for rows in (0, *sizes):
                self._times.pop((sequences.bit_length(), rows), None)
        worth = self._worth(sizes, sequences)
        best = max(worth, key=lambda rows: worth[rows])
        for rows in worth:
            if not self._timed(sequences, rows) and worth[rows] > _WORTH_TIMING * worth[best]:
                return rows
        if best:
            self._since_drafts, self._pause = 0, _PAUSE
            return best
        self._since_drafts += 1
        if self._since_drafts <= self._pause:
            return 0
        self._since_drafts, self._pause = 0, min(_LONGEST_PAUSE, 2 * self._pause)
        return sizes[0]

    def observe_time(self, sequences: int, lookup: Lookup | None, seconds: float) -> None:
        """Take note of what a pass took that was launched behind another, with such drafts."""
        if self._cost is not None:
            rows = lookup.rows if lookup is not None else 0
            times = self._times.setdefault((sequences.bit_length(), rows), Typical())
            times.observe(seconds / self._cost(sequences), _ENOUGH)

    def observe(self, lookup: Lookup | None, outcomes: SequenceOf[Verified | None]) -> None:
        """Learn from what passes with such drafts accepted."""
        accepted = [count for outcome in outcomes if outcome is not None for count in outcome.right]
        if lookup is None or not accepted:
            return
        each = sum(accepted) / len(accepted)
        self._right += _SHARE * (each / _found(len(outcomes), lookup.rows) - self._right)
        self.tokens_each += _SHARE * (1 + each - self.tokens_each)

    def _most(self, live: LiveSequence) -> int | None:
        """Rows that the sequence may have, None if its law does not allow any beside it."""
        request = live.sequence.request
        # Nothing is known of how likely such a draft is, and rejection sampling asks for that.
        if not live.verifier.on_device or request.mode is VerificationMode.REJECTION or request.external:
            return None
        return min(self._limit, request.max_draft_nodes) if request.speculate else 0

    def _worth(self, sizes: SequenceOf[int], sequences: int) -> dict[int, float]:
        """Tokens of a sequence for what a pass takes, by rows of the pass, plain first."""
        worth = {0: (_MARGIN if sequences > 1 else 1.0) / self._seconds(sequences, 0)}
        for rows in sizes:
            worth[rows] = (1 + self._right * _found(sequences, rows)) / self._seconds(sequences, rows)
        return worth

    def _timed(self, sequences: int, rows: int) -> bool:
        times = self._times.get((sequences.bit_length(), rows))
        return times is not None and times.count >= _ENOUGH

    def _seconds(self, sequences: int, rows: int) -> float:
        """What a pass takes, as a multiple of what its roots alone should cost: as measured, or by what its rows cost
        beside those of a plain one."""
        assert self._cost is not None
        measured = self._times.get((sequences.bit_length(), rows))
        if measured is not None and measured.count >= _ENOUGH:
            return measured.value
        plain = self._times.get((sequences.bit_length(), 0))
        base = plain.value if plain is not None else 1.0
        return base * self._cost(max(sequences, rows)) / self._cost(sequences)


def _found(sequences: int, rows: int) -> float:
    """Of the drafted tokens that could be right, the share for which a pass of so many rows has room."""
    missed = _MISSED_BY_MANY + (_MISSED - _MISSED_BY_MANY) / sequences
    left: float = missed ** ((rows - sequences) / sequences)
    return 1 - left
