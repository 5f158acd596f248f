"""Aligns the answer that a caller expects with the tokens that the model generates, and drafts from it.

While the model follows the prediction, its next token is expected at the *place*, and the *run* counts the tokens
before it that came as predicted. Where the model leaves it, several places are possible: as if tokens had been
replaced, inserted or left out. They get low scores, until the longest run of the last tokens that stands in the
prediction shows where the answer is. All of this reads committed tokens only, so places that were not offered are
evaluated too, at no cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from target_service.execution.node_tables import PredictedChain

# All of these are chosen, not measured; scores are calibrated later (`tree_cuts.Calibration`).
# By the length of the run, from 0 on: the probability that the next token comes as predicted.
_RIGHT = (0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95)
# Tokens compared before a place, places compared, and tokens for which places are guessed after the model has left the
# prediction.
_LONGEST_RUN, _MOST_PLACES, _GUESSED = 16, 64, 4


@dataclass(slots=True, eq=False)
class PredictedAnswer:
    """One request's prediction, beside the tokens of its sequence."""

    # The prediction's.
    token_ids: tuple[int, ...]
    # The sequence's own list, which grows with each commit, and how many of its tokens were aligned.
    committed: list[int]
    seen: int
    # Where in the prediction the next token is expected, None if unknown; and the length of the run before it.
    _place: int | None = 0
    # Run that a prediction begins with.
    _run: int = 4
    # Where the model left the prediction, None if it never followed it, and the tokens since.
    _left: int | None = None
    _since_left: int = 0
    _followed: bool = False
    _failures: int = 0
    # Offered tokens that were accepted, and whether an offer had enough of them.
    _accepted: int = 0
    _proven: bool = False
    # The ends of each pair of neighbours; built when the model first leaves the prediction.
    _ends_of_pairs: dict[tuple[int, int], list[int]] | None = None

    @property
    def holds(self) -> bool:
        """Whether the model follows the prediction well enough not to wait for another draft."""
        # A run from which on no other draft is waited for.
        return self.has_offer and self._run >= 8 and self._failures == 0

    @property
    def has_offer(self) -> bool:
        """Whether there is anything to offer."""
        self._catch_up()
        return next(self._places(), None) is not None

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offered places minus the sequence's length. They do not change while the sequence follows them."""
        self._catch_up()
        return tuple([place - self.seen for place, _, _ in self._places()])

    @property
    def offer_limit(self) -> int:
        """Most tokens of an offer where rows are expensive: earlier gains bound what a wrong prediction may cost."""
        # Tokens of the first offer, and how many more each accepted one allows. Without this bound, a run of words that
        # two texts share by chance made a wrong offer of 34 rows, which took two and a half steps' time (fp32, one
        # thread, a row takes 0.07 of a step). A right prediction is offered whole with its third offer.
        return 4 + 4 * self._accepted

    def chains(self, most: int) -> list[PredictedChain]:
        """Chains of up to `most` tokens that may come next, the likeliest first."""
        self._catch_up()
        return [self._chain(place, first, run, most) for place, first, run in self._places()] if most else []

    def observe_offer(self, accepted: int) -> None:
        """An offer was verified, of which `accepted` tokens were. Without any, the next one needs a longer run."""
        self._accepted += accepted
        # Accepted tokens of an offer that reset this.
        if accepted >= 2:
            self._failures, self._proven = 0, True
        elif not accepted:
            # Offers in a row without an accepted token, up to this many, each double the run that the next offer needs.
            self._failures = min(6, self._failures + 1)

    def _places(self) -> Iterator[tuple[int, float, int]]:
        """(place, score of its token, run) of the places that are offered."""
        end = len(self.token_ids)
        needed = (1 if self._proven else 2) << self._failures if self._failures else 0
        if self._place is not None:
            if self._place < end and self._run >= needed:
                yield self._place, _right(self._run), self._run
            return
        if self._left is None or self._failures or self._since_left > _GUESSED:
            return
        # Scores of a place as if tokens had been replaced, and as if others had been inserted.
        guesses = ((self._left + self._since_left, 0.35), (self._left, 0.2))
        tokens: set[int] = set()
        for place, score in guesses:
            if place < end and self.token_ids[place] not in tokens:
                tokens.add(self.token_ids[place])
                yield place, score, 0

    def _chain(self, place: int, first: float, run: int, most: int) -> PredictedChain:
        token_ids = self.token_ids[place : place + most]
        later = (_right(run + behind) for behind in range(1, len(token_ids)))
        return PredictedChain(token_ids, (first, *later))

    def _catch_up(self) -> None:
        """Align the tokens that were committed since the last call."""
        for length in range(self.seen, len(self.committed)):
            self._place_token(self.committed[length], length + 1)
        self.seen = len(self.committed)

    def _place_token(self, token: int, length: int) -> None:
        place, tokens = self._place, self.token_ids
        if place is not None and place < len(tokens) and tokens[place] == token:
            self._place, self._run, self._followed = place + 1, self._run + 1, True
            return
        if place is not None:
            # A prediction that was never followed has no place to guess from.
            self._left, self._since_left = (place if self._followed else None), 0
        self._since_left += 1
        self._place, self._run = self._find(token, length)
        if self._place is not None:
            self._left = None

    def _find(self, token: int, length: int) -> tuple[int | None, int]:
        """The place after the longest run that ends with the sequence's token `length`, and the length of that run."""
        if self._ends_of_pairs is None:
            self._ends_of_pairs = {}
            for end, pair in enumerate(pairwise(self.token_ids), start=1):
                self._ends_of_pairs.setdefault(pair, []).append(end)
        ends = self._ends_of_pairs.get((self.committed[length - 2], token), []) if length > 1 else []
        best, longest = None, 0
        origin = self._left or 0
        # Of many, as where a text repeats a pair without end, only those around the origin are sorted.
        near = bisect_left(ends, origin)
        ends = ends[max(0, near - _MOST_PLACES) : near + _MOST_PLACES]
        for end in sorted(ends, key=lambda each: abs(each - origin))[:_MOST_PLACES]:
            run = self._run_at(end, length)
            if run > longest:
                best, longest = end + 1, run
        if best is None and self._left is not None:
            best = self._left_out(token)
            longest = int(best is not None)
        return best, longest

    def _left_out(self, token: int) -> int | None:
        """The place after the next such token, as if the tokens before it had been left out."""
        assert self._left is not None
        try:
            # The most tokens left out that a single token may reveal.
            return self.token_ids.index(token, self._left + 1, self._left + 16) + 1
        except ValueError:
            return None

    def _run_at(self, end: int, length: int) -> int:
        """Length of the run that ends at `end` in the prediction, and at `length` in the sequence."""
        longest, run = min(_LONGEST_RUN, end + 1, length), 0
        while run < longest and self.token_ids[end - run] == self.committed[length - 1 - run]:
            run += 1
        return run


def _right(run: int) -> float:
    """The probability that the token after such a run comes as predicted."""
    return _RIGHT[min(run, len(_RIGHT) - 1)]
