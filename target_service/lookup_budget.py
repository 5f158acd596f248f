"""How many rows of every sequence the device drafts itself, from the sequence's own text: as many as pay.

Such a draft costs nobody a round trip, and what it makes is known only afterwards. So it is followed how far drafts
reached lately, over all sequences, and weighed against what passes with so many rows took.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

from outrider.sampling import VerificationMode
from target_service.commit import LiveSequence
from target_service.draft_times import Typical
from target_service.scheduler import Schedule
from target_service.step_cost import StepCost
from target_service.verifier import Verified

# Drafted rows of a sequence: with its root they fill the sizes that steps are captured for.
_SIZES = (3, 7, 15)
# What one pass moves how far drafts reach, and how far they are taken to reach where none were.
_SHARE, _SHARE_UNSEEN = 0.05, 0.01
# Before anything is known: the share of first tokens that are right, and of those behind a right one.
_FIRST, _NEXT = 0.4, 0.8
# Launches without drafts before a try, from the first to the longest pause, for nobody would know otherwise that they
# pay again.
_PAUSE, _LONGEST_PAUSE = 64, 1024
# Launches of a kind at one load before their time is believed, and launches until all are timed anew: contexts grow.
_ENOUGH, _REFRESH = 4, 512
# What is not timed yet is, where it seems to make this share of what the best does.
_WORTH_TIMING = 0.7
# What drafts have to make of several sequences, since those of which few are right pay for the others' with longer
# passes.
_MARGIN = 1.1


class LookupBudget:
    """Chooses launch by launch."""

    def __init__(
        self, most: int, cost: StepCost | None, live: Mapping[int, LiveSequence], disable_above: int = 1 << 30
    ) -> None:
        """`most` rows of a sequence, 0 for none at any time, and none with more sequences than `disable_above`. `cost`
        of None takes as many as that. `live` stays the engine's own table."""
        self.on = most > 0
        self._sizes = [size for size in _SIZES if size < most] + [most] * self.on
        self._cost = cost
        self._live = live
        self._disable_above = disable_above
        # [d]: share of passes of sequences that accept more than d rows.
        self._reached = [_FIRST * _NEXT**d for d in range(most)]
        self._since_drafts, self._pause = 0, _PAUSE
        # What a pass takes, by load in powers of two and drafted rows: as a multiple of what its roots should cost.
        self._times: dict[tuple[int, int], Typical] = {}
        self._since_timed = 0
        # Tokens that a pass without any other draft makes of a sequence, lately.
        self.tokens_each = 1.0

    def choose(self, schedule: Schedule, max_rows: int) -> int:
        """Rows to draft of every sequence, in a step of `max_rows`; 0 where that does not pay, or some sequence may not
        have any."""
        if not self.on or not all(chunk.takes_tree for chunk in schedule.chunks):
            return 0
        sequences, best = len(schedule.chunks), 0
        if sizes := self._allowed(schedule, max_rows):
            best = sizes[-1] if self._cost is None else self._tried(sizes, sequences)
        if not best:
            self.tokens_each += _SHARE * (1 - self.tokens_each)
        return best

    def _allowed(self, schedule: Schedule, max_rows: int) -> list[int]:
        sequences = len(schedule.chunks)
        if sequences > self._disable_above:
            return []
        most = min(self._most(self._live[chunk.sequence.sequence_id]) for chunk in schedule.chunks)
        return [rows for rows in self._sizes if rows <= most and sequences * (1 + rows) <= max_rows]

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

    def observe_time(self, sequences: int, rows: int, seconds: float) -> None:
        """Take note of what a pass took that was launched behind another, with so many drafted rows of each."""
        if self._cost is not None:
            times = self._times.setdefault((sequences.bit_length(), rows), Typical())
            times.observe(seconds / self._cost(sequences), _ENOUGH)

    def observe(self, rows: int, outcomes: SequenceOf[Verified | None]) -> None:
        """Learn from what passes with so many drafted rows accepted."""
        accepted = [count for outcome in outcomes if outcome is not None for count in outcome.looked_up]
        if not accepted:
            return
        reached = self._reached
        for d in range(rows):
            reached[d] += _SHARE * (sum(count > d for count in accepted) / len(accepted) - reached[d])
        # Of rows that were not there it is taken that they go on being right as often as the last two.
        going_on = reached[rows - 1] / max(reached[rows - 2], 1e-9) if rows > 1 else reached[0]
        for d in range(rows, len(reached)):
            reached[d] += _SHARE_UNSEEN * (reached[d - 1] * min(1.0, going_on) - reached[d])
        self.tokens_each += _SHARE * (1 + sum(accepted) / len(accepted) - self.tokens_each)

    @staticmethod
    def _most(live: LiveSequence) -> int:
        """Rows that the sequence may have."""
        request = live.sequence.request
        # Nothing is known of how likely such a draft is, and rejection sampling asks for that.
        lawful = live.verifier.on_device and request.mode is not VerificationMode.REJECTION
        return request.max_draft_nodes if lawful and request.speculate and not request.external else 0

    def _worth(self, sizes: SequenceOf[int], sequences: int) -> dict[int, float]:
        """Tokens of a sequence for what a pass takes, by drafted rows, plain first."""
        tokens = list(accumulate(self._reached, initial=1.0))
        worth = {rows: tokens[rows] / self._seconds(sequences, rows) for rows in (0, *sizes)}
        worth[0] *= _MARGIN if sequences > 1 else 1.0
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
        return base * self._cost(sequences * (1 + rows)) / self._cost(sequences)
