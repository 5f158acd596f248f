"""How the next step uses drafts, if at all: by what either way takes, and what drafts made lately.

The row budget knows what rows cost. What it cannot know is what drafting itself costs: waiting for the answer, and
that a step with drafts cannot be prepared before the one under way has ended. That overhead is measured here, as what
whole steps with drafts take longer than plain ones of as many rows.
"""

from __future__ import annotations

from target_service.speculation.policy.draft_times import ENOUGH, ENOUGH_OF_MANY, LoadTimes, StepTime, Use, enough_plain

# Plain steps that waiting for a draft may last: more tokens than that a step hardly ever makes.
_WORTH = 8.0
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

    def drafts_are_near(self, steps: int) -> bool:
        """Whether a drafted step was less than so many steps ago, or may come in as many, so that the draft had better
        follow along."""
        return self._plain_steps < steps or self._left < steps

    def choose(self, load: int, expected: float, *, ahead: bool, sending: float = 0.0) -> Use:
        """How the next step uses drafts. Called once per step.

        Args:
            load: sequences that run.
            expected: tokens that drafts make of them in the time that a plain step and the drafted rows take.
            ahead: a plain step may be launched behind the one under way.
            sending: plain steps that it takes to send the draft what it has to know for a try.
        """
        seen = self._at(load)
        enough = enough_plain(ahead=ahead)
        self._since_refresh += seen.plain.count >= enough
        if self._since_refresh > _REFRESH:
            # Contexts grow, and with them what a plain step takes.
            self._since_refresh, seen.plain.count = 0, 1 + enough - ENOUGH
        use = Use.PLAIN if seen.plain.count < enough else self._decide(seen, load, expected, sending)
        self._plain_steps = 0 if use is not Use.PLAIN else self._plain_steps + 1
        return use

    def best(self, load: int, expected: float) -> Use:
        """What pays by what is known, for steps that must not be tries since nobody would learn from them."""
        seen = self._at(load)
        if seen.plain.count < ENOUGH or not seen.known:
            return Use.PLAIN
        return Use.AFTER if seen.gain(load, expected) > _MARGIN else Use.PLAIN

    def to_be_unfed(self, load: int, *, ahead: bool) -> bool:
        """Whether it is known what drafts of a head take, and not yet what a plain step takes that feeds none. There is
        more to know where steps are launched `ahead`."""
        seen = self._at(load)
        return seen.known and seen.unfed_steps < enough_plain(ahead=ahead)

    def max_wait(self, load: int) -> float:
        """Seconds for which to wait for a draft at most."""
        seen = self._at(load)
        return _WORTH * seen.plain.value if seen.plain.count >= ENOUGH else float("inf")

    def _decide(self, seen: LoadTimes, load: int, expected: float, sending: float) -> Use:
        if not seen.known or seen.gain(load, expected) > _MARGIN:
            self._trying, self._left, self._paid = False, 0, self._paid + 1
            if self._paid > _RECOVERED:
                self._pause = _FIRST_PAUSE
            return Use.AFTER
        self._paid = 0
        return Use.AFTER if self._try(_TRY * seen.overhead.value + sending) else Use.PLAIN

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
        if self._at(load).plain.count:
            self._at(load).observe_after(seconds, row_cost, answered=answered)

    def _at(self, load: int) -> LoadTimes:
        size = load.bit_length()
        if size not in self._loads:
            lower = max((known for known in self._loads if known < size), default=None)
            if lower is not None:
                self._loads[size] = self._loads[lower].warm_start()
            else:
                self._loads[size] = LoadTimes(overhead=StepTime.of(ENOUGH if size == 1 else ENOUGH_OF_MANY))
        return self._loads[size]
