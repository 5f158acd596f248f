"""How the next step uses drafts, if at all: by what either way takes, and what drafts made lately.

The row budget knows what rows cost. What it cannot know is what drafting itself costs: waiting for the answer, and
that a step with drafts cannot be prepared before the one under way has ended. That overhead is measured here, as what
whole steps with drafts take longer than plain ones of as many rows.

Where drafts come late beside what a step takes, there is another way: a plain pass runs while the draft answers, and
what is verified behind it is guessed past the token that the pass will say. The device is never idle then, and two
tokens are sure in the time of two steps.
"""

from __future__ import annotations

from target_service.draft_times import ENOUGH, ENOUGH_AHEAD, ENOUGH_OF_MANY, LoadTimes, Promise, Use, enough_plain

# What one launch moves the time that one takes.
_SHARE = 0.1
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


class DraftSwitch:
    """Chooses step by step. Loads are told apart by powers of two."""

    def __init__(self) -> None:
        self._loads: dict[int, LoadTimes] = {}
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

    def choose(self, load: int, promise: Promise, *, ahead: bool, guesses: bool = True, telling: float = 0.0) -> Use:
        """How the next step uses drafts. Called once per step.

        Args:
            load: sequences that run.
            promise: of drafts.
            ahead: a step may be launched behind the one under way.
            guesses: one that is may have drafts.
            telling: plain steps that it takes to tell the draft what it has to know for a try.
        """
        seen = self._at(load)
        ways = (Use.AFTER, Use.AHEAD) if ahead and guesses else (Use.AFTER,)
        # One way after the other, until all are known.
        way = next((way for way in ways if not seen.known(way)), None)
        way = way or max(ways, key=lambda way: seen.gain(way, load, promise))
        enough = enough_plain(ahead=ahead)
        self._since_refresh += seen.plain_steps >= enough
        if self._since_refresh > _REFRESH:
            # Contexts grow, and with them what a plain step takes.
            self._since_refresh, seen.plain_steps = 0, 1 + enough - ENOUGH
        use = Use.PLAIN if seen.plain_steps < enough else self._decide(seen, way, load, promise, telling)
        self._plain_steps = 0 if use is not Use.PLAIN else self._plain_steps + 1
        return use

    def best(self, load: int, promise: Promise, *, ahead: bool) -> Use:
        """What pays by what is known, for steps that must not be tries since nobody would learn from them."""
        seen = self._at(load)
        ways = [way for way in (Use.AFTER, Use.AHEAD) if seen.known(way) and (ahead or way is Use.AFTER)]
        if seen.plain_steps < ENOUGH or not ways:
            return Use.PLAIN
        way = max(ways, key=lambda way: seen.gain(way, load, promise))
        return way if seen.gain(way, load, promise) > _MARGIN else Use.PLAIN

    def to_be_unfed(self, load: int, *, ahead: bool) -> bool:
        """Whether it is known what drafts of a head take, and not yet what a plain step takes that feeds none. There is
        more to know where steps are launched `ahead`."""
        seen = self._at(load)
        return seen.known(Use.AFTER) and seen.unfed_steps < enough_plain(ahead=ahead)

    def plain_seconds(self, load: int) -> float:
        """What a plain step takes; 0 before the first."""
        return self._at(load).plain

    def patience(self, load: int) -> float:
        """Seconds for which to wait for a draft at most."""
        seen = self._at(load)
        return _WORTH * seen.plain if seen.plain_steps >= ENOUGH else float("inf")

    def choose_in_hand(self, load: int, promise: Promise) -> Use:
        """How the next step uses drafts where those behind the step under way are looked at one by one, and used if
        they promise enough: in that way, unless waiting for all has shown to make more."""
        seen = self._at(load)
        use = Use.AHEAD
        if seen.plain_steps >= ENOUGH_AHEAD:
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
        pays = not seen.known(Use.AHEAD) or seen.gain_of_pair(load, promise) > _MARGIN
        return max(0.0, worth if pays and answers_in < worth else left - self.launching)

    def observe_launching(self, seconds: float) -> None:
        """Take note of how long the host took to lay out and launch a step."""
        self.launching += _SHARE * (seconds - self.launching)

    def _decide(self, seen: LoadTimes, way: Use, load: int, promise: Promise, telling: float) -> Use:
        if not seen.known(way) or seen.gain(way, load, promise) > _MARGIN:
            self._trying, self._left, self._paid = False, 0, self._paid + 1
            if self._paid > _RECOVERED:
                self._pause = _FIRST_PAUSE
            return way
        self._paid = 0
        cost = seen.overhead.value if way is Use.AFTER else max(0.0, seen.pair.value / 2 - 1)
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

    def observe_plain(self, load: int, seconds: float, *, fed: bool = False, ahead: bool = True) -> None:
        """Take note of a step that only decoded, without drafts; `fed`, a head was given what it reads of it, and
        `ahead`, it was launched behind another."""
        self._at(load).observe_plain(seconds, fed=fed, ahead=ahead)

    def observe_after(self, load: int, seconds: float, row_cost: float, *, answered: bool = True) -> None:
        """Take note of a step that only decoded, and waited for drafts, in vain unless it was `answered`.

        `row_cost` is what its rows take, as a multiple of what a plain step's take.
        """
        if self._at(load).plain:
            self._at(load).observe_after(seconds, row_cost, answered=answered)

    def observe_ahead(self, load: int, seconds: float) -> None:
        """Take note of a drafted step that was launched behind another, and the plain pass launched behind it."""
        if self._at(load).plain:
            self._at(load).observe_ahead(seconds)

    def observe_missed(self, load: int) -> None:
        """Take note of a step that was to be launched behind another with drafts, and had none."""
        self._at(load).observe_missed()

    def premium(self, load: int) -> float:
        """Plain steps that such a pair takes more than two of them."""
        seen = self._at(load)
        known = seen.known(Use.AHEAD) and seen.plain_steps >= ENOUGH_AHEAD
        return max(_LEAST_PREMIUM, seen.pair.value - 2) if known and seen.pair.count else _PREMIUM

    def _at(self, load: int) -> LoadTimes:
        size = load.bit_length()
        if size not in self._loads:
            lower = max((known for known in self._loads if known < size), default=None)
            if lower is not None:
                self._loads[size] = self._loads[lower].heir()
            else:
                self._loads[size] = LoadTimes(enough=ENOUGH if size == 1 else ENOUGH_OF_MANY)
        return self._loads[size]
