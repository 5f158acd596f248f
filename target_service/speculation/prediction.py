"""The answer that a caller expects, held beside what the model says: which of its tokens may come next.

Where the model follows the prediction, its next token stands at the *place*, and the *run* counts the tokens before it
that came as predicted. Where the model leaves it, several places are possible: as if tokens had been exchanged one for
one, as if others had been put in before, as if some had been left out. They are tried with little trust, until the
longest run of the last tokens that stands in the prediction says where the answer is. All of this looks at committed
tokens only, so that what is not offered is judged too, at no cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from target_service.core.predicted_chain import PredictedChain

# All of these are chosen, not measured; what scores are worth is learnt (`row_budget.Calibration`).
# By the length of the run, from 0 on: how often the next token comes as predicted.
_RIGHT = (0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95)
# Before the first token a prediction is trusted as after such a run.
_FIRST_RUN = 4
# Where tokens were exchanged, and where others were put in.
_EXCHANGED, _INSERTED = 0.35, 0.2
# Tokens that are compared behind a place, places that are compared, and tokens said since the model left the prediction
# for which places are guessed.
_LONGEST_RUN, _MOST_PLACES, _GUESSED = 16, 64, 4
# Tokens left out at most to be found by a single one.
_NEAR = 16
# A run after which nobody waits for another draft.
_SURE_RUN = 8
# With each offer in a row of which nothing was right, up to so many, the run that the next one takes doubles.
_MOST_DOUBLINGS = 6
# Accepted tokens of an offer that clear the record of those before.
_RIGHT_AGAIN = 2
# Tokens of a first offer, and how many more each accepted one allows. Where two texts share a run of words by chance,
# what follows it in the wrong one was offered in 34 rows, for two and a half steps' time (fp32, one thread, where a row
# takes 0.07 of a step). A right prediction is offered whole with its third offer.
_FIRST_OFFER, _FOR_EACH_RIGHT = 4, 4


@dataclass(slots=True, eq=False)
class PredictedAnswer:
    """One request's prediction, beside the tokens of its sequence."""

    # Of the prediction.
    token_ids: tuple[int, ...]
    # The sequence's own list, which grows with each commit, and how many of them have been looked at.
    committed: list[int]
    seen: int
    _place: int | None = 0
    _run: int = _FIRST_RUN
    # Where the model left the prediction, and the tokens that it has said since; none where it never followed it.
    _left: int | None = None
    _said: int = 0
    _followed: bool = False
    _failures: int = 0
    # Tokens that were offered and right, and whether any offer was.
    _accepted: int = 0
    _proven: bool = False
    # Where each pair of neighbours ends, made when the model first leaves the prediction.
    _ends_of_pairs: dict[tuple[int, int], list[int]] | None = None

    @property
    def place(self) -> int | None:
        """Where in the prediction the next token is expected; None where nobody knows."""
        self._catch_up()
        return self._place

    @property
    def leads(self) -> bool:
        """Whether the model follows the prediction so surely that no other draft is waited for."""
        return self.promises and self._run >= _SURE_RUN and self._failures == 0

    @property
    def promises(self) -> bool:
        """Whether there is anything to offer."""
        self._catch_up()
        return next(self._places(), None) is not None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of what is offered now: its places in the prediction less the sequence's length. They stay the same for as
        long as the sequence goes on as it did."""
        self._catch_up()
        return tuple([place - self.seen for place, _, _ in self._places()])

    @property
    def room(self) -> int:
        """Tokens that an offer may have where rows are dear: what a wrong prediction costs is bounded by what it has
        brought."""
        return _FIRST_OFFER + _FOR_EACH_RIGHT * self._accepted

    def chains(self, most: int) -> list[PredictedChain]:
        """What may come next, the likeliest first: chains of up to `most` tokens."""
        self._catch_up()
        return [self._chain(place, first, run, most) for place, first, run in self._places()] if most else []

    def judge(self, accepted: int) -> None:
        """So many tokens of what was offered came. Where none ever does, the next offer takes a longer run."""
        self._accepted += accepted
        if accepted >= _RIGHT_AGAIN:
            self._failures, self._proven = 0, True
        elif not accepted:
            self._failures = min(_MOST_DOUBLINGS, self._failures + 1)

    def _places(self) -> Iterator[tuple[int, float, int]]:
        """(place, score of its token, run) of what may come next and is believed enough to be offered."""
        end = len(self.token_ids)
        needed = (1 if self._proven else 2) << self._failures if self._failures else 0
        if self._place is not None:
            if self._place < end and self._run >= needed:
                yield self._place, _right(self._run), self._run
            return
        if self._left is None or self._failures or self._said > _GUESSED:
            return
        guesses = ((self._left + self._said, _EXCHANGED), (self._left, _INSERTED))
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
        """Look at the tokens that were committed since."""
        for length in range(self.seen, len(self.committed)):
            self._follow(self.committed[length], length + 1)
        self.seen = len(self.committed)

    def _follow(self, token: int, length: int) -> None:
        place, tokens = self._place, self.token_ids
        if place is not None and place < len(tokens) and tokens[place] == token:
            self._place, self._run, self._followed = place + 1, self._run + 1, True
            return
        if place is not None:
            # One that never was followed has no place to guess from.
            self._left, self._said = (place, 0) if self._followed else (None, 0)
        self._said += 1
        self._place, self._run = self._find(token, length)
        if self._place is not None:
            self._left = None

    def _find(self, token: int, length: int) -> tuple[int | None, int]:
        """Behind which place of the prediction the first `length` tokens of the sequence end, and in how long a run."""
        ends = self._pairs().get((self.committed[length - 2], token), ()) if length > 1 else ()
        best, longest = None, 0
        origin = self._left or 0
        for end in sorted(ends, key=lambda each: abs(each - origin))[:_MOST_PLACES] if ends else ():
            run = self._run_at(end, length)
            if run > longest:
                best, longest = end + 1, run
        if best is None and self._left is not None:
            best = self._left_out(token)
            longest = int(best is not None)
        return best, longest

    def _left_out(self, token: int) -> int | None:
        """The place behind the next such token, as if what is before it had been left out."""
        assert self._left is not None
        for place in range(self._left + 1, min(self._left + _NEAR, len(self.token_ids))):
            if self.token_ids[place] == token:
                return place + 1
        return None

    def _run_at(self, end: int, length: int) -> int:
        run = 0
        while run < _LONGEST_RUN and run <= end and run < length:
            if self.token_ids[end - run] != self.committed[length - 1 - run]:
                break
            run += 1
        return run

    def _pairs(self) -> dict[tuple[int, int], list[int]]:
        if self._ends_of_pairs is None:
            self._ends_of_pairs = {}
            for end in range(1, len(self.token_ids)):
                self._ends_of_pairs.setdefault((self.token_ids[end - 1], self.token_ids[end]), []).append(end)
        return self._ends_of_pairs


def _right(run: int) -> float:
    """How often the token behind such a run comes as predicted."""
    return _RIGHT[min(run, len(_RIGHT) - 1)]


def predicted_answer(prediction: SequenceOf[int], committed: list[int]) -> PredictedAnswer | None:
    """For a sequence that has said nothing yet; None where nothing is predicted."""
    return PredictedAnswer(tuple(prediction), committed, len(committed)) if prediction else None
