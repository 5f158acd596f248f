"""How the next step uses drafts, if at all: by what either way takes, and what drafts made lately.

The row budget knows what rows cost. What it cannot know is what drafting itself costs: waiting for the answer, and
that a step with drafts cannot be prepared before the one under way has ended. That overhead is measured here, as what
whole steps with drafts take longer than plain ones of as many rows.

Where drafts come late beside what a step takes, there is another way: a plain pass runs while the draft answers, and
what is verified behind it is guessed past the token that the pass will say. The device is never idle then, and two
tokens are sure in the time of two steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Steps of a kind at one load before their time is believed: fewer drafted ones of several sequences, which cost more,
# and more plain ones where they are launched ahead, which until then have found how many passes to launch at once.
_ENOUGH, _ENOUGH_OF_MANY, _ENOUGH_AHEAD = 8, 4, 40
# Steps that what a lower load has shown counts for.
_INHERITED = 2
# What one step moves the time of its kind, and how far from it a step is believed.
_SHARE = 0.1
_BOUND = 2.0
# Plain steps that waiting for a draft may last: more tokens than that a step hardly ever makes.
_WORTH = 8.0
# The same, where a plain pass runs meanwhile, once it has ended: another one then is as good.
_WORTH_AHEAD = 0.5
# Steps without drafts before the next try, from the first to the longest pause, and steps of a try.
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 16384
_TRY = 4
# Share of the time that tries may cost in the long run, and how much more often they come at first.
_TRYING_SHARE = 0.01
_EAGER = 2
# Steps for which drafts have to pay before a pause is short again.
_RECOVERED = 16
# Drafting has to promise this much, so that noise does not switch it.
_MARGIN = 1.02
# What drafts in hand have to promise per sequence, in tokens, at least and where pairs were not timed yet.
_LEAST_PREMIUM, _PREMIUM = 0.1, 0.5
# Every so often plain steps are timed anew, a few of them.
_REFRESH = 2048


class Use(Enum):
    """How a step uses drafts."""

    # Not.
    PLAIN = "plain"
    # It waits for those of the tokens that are known, and nothing runs meanwhile.
    AFTER = "after"
    # It is launched behind a plain pass, with those guessed past the token that the pass will say.
    AHEAD = "ahead"


class Promise(NamedTuple):
    """Tokens that drafts make of the sequences that run, by the way they are used."""

    # In the time that a plain step and the drafted rows take.
    after: float
    # In a drafted step and the plain pass behind it.
    ahead: float


@dataclass(slots=True)
class _Load:
    """What steps take at one load: a plain one in seconds, the others in plain ones."""

    plain: float = 0.0
    plain_steps: int = 0
    # Those of them in which no head was fed, and what plain ones took before the first of these.
    unfed_steps: int = 0
    fed: float = 0.0
    # What a step that waited for drafts takes beyond its rows.
    overhead: float = 0.0
    drafted_steps: int = 0
    # A drafted step launched behind another, and the plain pass behind it.
    pair: float = 0.0
    pairs: int = 0
    # Drafted steps of a kind that are enough to know it.
    enough: int = _ENOUGH
    # Ways known from a lower load, until steps of this one say otherwise.
    inherited: frozenset[Use] = frozenset()

    def observe_plain(self, seconds: float, *, fed: bool) -> None:
        if fed and self.unfed_steps:
            return
        if not fed and not self.unfed_steps:
            self.fed, self.plain_steps = self.plain, 0
        self.plain_steps += 1
        self.unfed_steps += not fed
        if self.plain_steps == 1:
            self.plain = seconds
        else:
            ratio = min(_BOUND, max(1 / _BOUND, seconds / self.plain))
            self.plain *= 1 + max(_SHARE, 1 / self.plain_steps) * (ratio - 1)
        if self.fed and self.unfed_steps == _ENOUGH_AHEAD:
            # What drafts take was counted in longer steps.
            ratio, self.fed = self.fed / self.plain, 0.0
            self.overhead, self.pair = max(0.0, (1 + self.overhead) * ratio - 1), self.pair * ratio

    def observe_after(self, seconds: float, row_cost: float) -> None:
        self.drafted_steps += 1
        # A pause of the machine counts for little, what always takes long is known after a few steps.
        overhead = min(_BOUND * (1 + self.overhead), max(0.0, seconds / self.plain - row_cost))
        self.overhead += max(_SHARE, 1 / self.drafted_steps) * (overhead - self.overhead)

    def observe_ahead(self, seconds: float) -> None:
        self.pairs += 1
        pair = seconds / self.plain
        if self.pairs > 1:
            pair = min(_BOUND * self.pair, max(self.pair / _BOUND, pair))
        self.pair += max(_SHARE, 1 / self.pairs) * (pair - self.pair)

    def gain(self, use: Use, load: int, promise: Promise) -> float:
        """Tokens for each that plain steps would make in the same time."""
        if use is Use.AFTER:
            return promise.after / load / (1 + self.overhead)
        return promise.ahead / load / self.pair

    def known(self, use: Use) -> bool:
        """Whether enough was seen of drafts that are used so."""
        return use in self.inherited or (self.drafted_steps if use is Use.AFTER else self.pairs) >= self.enough

    def heir(self) -> _Load:
        """What is taken for true at the next load, where drafts hardly ever come cheaper; a few steps outweigh it."""
        known = frozenset(use for use in (Use.AFTER, Use.AHEAD) if self.known(use))
        seen = {"drafted_steps": min(self.drafted_steps, _INHERITED), "pairs": min(self.pairs, _INHERITED)}
        return _Load(overhead=self.overhead, pair=self.pair, enough=_ENOUGH_OF_MANY, inherited=known, **seen)


class DraftSwitch:
    """Chooses step by step. Loads are told apart by powers of two."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._left = 0
        self._pause = _FIRST_PAUSE
        self._trying = False
        self._paid = 0
        self._since_refresh = 0
        # In a row.
        self._plain_steps = 0
        # Seconds of the host for laying out and launching a step.
        self.launching = 0.0

    def drafts_are_near(self, steps: int) -> bool:
        """Whether a drafted step was less than so many steps ago, or may come in as many, so that the draft had better
        follow along."""
        return self._plain_steps < steps or self._left < steps

    def choose(self, load: int, promise: Promise, *, ahead: bool, telling: float = 0.0) -> Use:
        """How the next step uses drafts. Called once per step.

        Args:
            load: sequences that run.
            promise: of drafts.
            ahead: a step may be launched behind the one under way.
            telling: plain steps that it takes to tell the draft what it has to know for a try.
        """
        seen = self._at(load)
        ways = (Use.AFTER, Use.AHEAD) if ahead else (Use.AFTER,)
        # One way after the other, until all are known.
        way = next((way for way in ways if not seen.known(way)), None)
        way = way or max(ways, key=lambda way: seen.gain(way, load, promise))
        enough = _ENOUGH_AHEAD if ahead else _ENOUGH
        self._since_refresh += seen.plain_steps >= enough
        if self._since_refresh > _REFRESH:
            # Contexts grow, and with them what a plain step takes.
            self._since_refresh, seen.plain_steps = 0, 1 + enough - _ENOUGH
        use = Use.PLAIN if seen.plain_steps < enough else self._decide(seen, way, load, promise, telling)
        self._plain_steps = 0 if use is not Use.PLAIN else self._plain_steps + 1
        return use

    def best(self, load: int, promise: Promise, *, ahead: bool) -> Use:
        """What pays by what is known, for steps that must not be tries since nobody would learn from them."""
        seen = self._at(load)
        ways = [way for way in (Use.AFTER, Use.AHEAD) if seen.known(way) and (ahead or way is Use.AFTER)]
        if seen.plain_steps < _ENOUGH or not ways:
            return Use.PLAIN
        way = max(ways, key=lambda way: seen.gain(way, load, promise))
        return way if seen.gain(way, load, promise) > _MARGIN else Use.PLAIN

    def to_be_unfed(self, load: int) -> bool:
        """Whether it is known what drafts of a head take, and not yet what a plain step takes that feeds none."""
        seen = self._at(load)
        return seen.known(Use.AFTER) and seen.known(Use.AHEAD) and seen.unfed_steps < _ENOUGH_AHEAD

    def plain_seconds(self, load: int) -> float:
        """What a plain step takes; 0 before the first."""
        return self._at(load).plain

    def patience(self, load: int) -> float:
        """Seconds for which to wait for a draft at most."""
        seen = self._at(load)
        return _WORTH * seen.plain if seen.plain_steps >= _ENOUGH else float("inf")

    def choose_in_hand(self, load: int, promise: Promise) -> Use:
        """How the next step uses drafts where those behind the step under way are looked at one by one, and used if
        they promise enough: in that way, unless waiting for all has shown to make more."""
        seen = self._at(load)
        use = Use.AHEAD
        if seen.plain_steps >= _ENOUGH_AHEAD:
            if not seen.known(Use.AFTER):
                use = Use.AFTER
            elif seen.known(Use.AHEAD):
                after = seen.gain(Use.AFTER, load, promise)
                use = Use.AFTER if after > max(_MARGIN, seen.gain(Use.AHEAD, load, promise)) else Use.AHEAD
        return use

    def patience_ahead(self, load: int, promise: Promise, left: float, answers_in: float) -> float:
        """Seconds for which to wait for a draft at most while the step under way has so many `left`, and the draft is
        expected to answer in `answers_in`."""
        seen = self._at(load)
        worth = left + _WORTH_AHEAD * seen.plain
        # Until the device would have nothing to do, and on where drafts make much lately and will soon be here.
        pays = not seen.known(Use.AHEAD) or seen.gain(Use.AHEAD, load, promise) > _MARGIN
        return max(0.0, worth if pays and answers_in < worth else left - self.launching)

    def observe_launching(self, seconds: float) -> None:
        """Take note of how long the host took to lay out and launch a step."""
        self.launching += _SHARE * (seconds - self.launching)

    def _decide(self, seen: _Load, way: Use, load: int, promise: Promise, telling: float) -> Use:
        if not seen.known(way) or seen.gain(way, load, promise) > _MARGIN:
            self._trying, self._left, self._paid = False, 0, self._paid + 1
            if self._paid > _RECOVERED:
                self._pause = _FIRST_PAUSE
            return way
        self._paid = 0
        cost = seen.overhead if way is Use.AFTER else max(0.0, seen.pair / 2 - 1)
        return way if self._try(_TRY * cost + telling) else Use.PLAIN

    def _try(self, cost: float) -> bool:
        """Whether a drafted step is due although drafts do not pay: else nobody would know that they pay again. A few
        of them cost this many plain steps."""
        self._left -= 1
        if self._left <= 0:
            self._trying = not self._trying
            if self._trying:
                self._left = _TRY
            else:
                longest = max(_FIRST_PAUSE, min(_LONGEST_PAUSE, int(cost / _TRYING_SHARE)))
                self._left = max(longest // _EAGER, min(self._pause, longest))
                self._pause = 2 * self._left
        return self._trying

    def observe_plain(self, load: int, seconds: float, *, fed: bool = False) -> None:
        """Take note of a step that only decoded, without drafts; `fed`, a head was given what it reads of it."""
        self._at(load).observe_plain(seconds, fed=fed)

    def observe_after(self, load: int, seconds: float, row_cost: float) -> None:
        """Take note of a step that only decoded, and waited for drafts.

        `row_cost` is what its rows take, as a multiple of what a plain step's take.
        """
        if self._at(load).plain:
            self._at(load).observe_after(seconds, row_cost)

    def observe_ahead(self, load: int, seconds: float) -> None:
        """Take note of a drafted step that was launched behind another, and the plain pass launched behind it."""
        if self._at(load).plain:
            self._at(load).observe_ahead(seconds)

    def premium(self, load: int) -> float:
        """Plain steps that such a pair takes more than two of them."""
        seen = self._at(load)
        known = seen.known(Use.AHEAD) and seen.plain_steps >= _ENOUGH_AHEAD
        return max(_LEAST_PREMIUM, seen.pair - 2) if known else _PREMIUM

    def _at(self, load: int) -> _Load:
        size = load.bit_length()
        if size not in self._loads:
            lower = max((known for known in self._loads if known < size), default=None)
            if lower is not None:
                self._loads[size] = self._loads[lower].heir()
            else:
                self._loads[size] = _Load(enough=_ENOUGH if size == 1 else _ENOUGH_OF_MANY)
        return self._loads[size]
