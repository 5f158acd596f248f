"""Whether to wait for drafts in the next step: by what drafting costs beside the rows, and what it made lately.

The row budget knows what rows cost. What it cannot know is what drafting itself costs: waiting for the answer, and
that a step with drafts cannot be prepared before the one under way has ended. That overhead is measured here, as what
whole steps with drafts take longer than plain ones of as many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

# Steps of a kind at one load before its time is believed.
_ENOUGH = 8
# What one step moves the time of its kind, and how far from it a step is believed.
_SHARE = 0.1
_BOUND = 2.0
# Plain steps that waiting for a draft may last: more tokens than that a step hardly ever makes.
_WORTH = 8.0
# Steps without drafts before the next try, from the first to the longest pause, and steps of a try.
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 16384
_TRY = 4
# Share of the time that tries may cost in the long run.
_TRYING_SHARE = 0.02
# Steps for which drafts have to pay before a pause is short again.
_RECOVERED = 16
# Drafting has to promise this much, so that noise does not switch it.
_MARGIN = 1.02
# Every so often plain steps are timed anew, a few of them.
_REFRESH = 2048


@dataclass(slots=True)
class _Load:
    """Seconds of a plain step at one load, and what a step with drafts takes beyond its rows."""

    plain: float = 0.0
    plain_steps: int = 0
    overhead: float = 0.0
    drafted_steps: int = 0

    def observe_plain(self, seconds: float) -> None:
        self.plain_steps += 1
        if self.plain_steps == 1:
            self.plain = seconds
            return
        ratio = min(_BOUND, max(1 / _BOUND, seconds / self.plain))
        self.plain *= 1 + max(_SHARE, 1 / self.plain_steps) * (ratio - 1)

    def observe_drafted(self, seconds: float, row_cost: float) -> None:
        self.drafted_steps += 1
        # A pause of the machine counts for little, what always takes long is known after a few steps.
        bound = _BOUND * (self.plain + self.overhead)
        overhead = min(bound, max(0.0, seconds - self.plain * row_cost))
        self.overhead += max(_SHARE, 1 / self.drafted_steps) * (overhead - self.overhead)


class DraftSwitch:
    """Turns drafting down step by step. Loads are told apart by powers of two."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
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

    def drafts(self, load: int, promised: float) -> bool:
        """Whether the next step waits for drafts. Called once per step.

        Args:
            load: sequences that run.
            promised: tokens that drafts make of them, in the time that a plain step and the drafted rows take.
        """
        chosen = self._choose(self._at(load), load, promised)
        self._plain_steps = 0 if chosen else self._plain_steps + 1
        return chosen

    def pays(self, load: int, promised: float) -> bool:
        """Whether drafts pay by what is known, for steps that must not be tries since nobody would learn from them."""
        seen = self._at(load)
        return min(seen.plain_steps, seen.drafted_steps) >= _ENOUGH and self._gains(seen, load, promised)

    def patience(self, load: int) -> float:
        """Seconds for which to wait for a draft at most."""
        seen = self._at(load)
        return _WORTH * seen.plain if seen.plain_steps >= _ENOUGH else float("inf")

    def _gains(self, seen: _Load, load: int, promised: float) -> bool:
        return promised > _MARGIN * load * (1 + seen.overhead / seen.plain)

    def _choose(self, seen: _Load, load: int, promised: float) -> bool:
        if seen.plain_steps < _ENOUGH:
            return False
        self._since_refresh += 1
        if self._since_refresh > _REFRESH:
            # Contexts grow, and with them what a plain step takes.
            self._since_refresh, seen.plain_steps = 0, 1
        if seen.drafted_steps < _ENOUGH or self._gains(seen, load, promised):
            self._trying, self._left, self._paid = False, 0, self._paid + 1
            if self._paid > _RECOVERED:
                self._pause = _FIRST_PAUSE
            return True
        self._paid = 0
        return self._try(seen.overhead / seen.plain)

    def _try(self, overhead: float) -> bool:
        """Whether a drafted step is due although drafts do not pay: else nobody would know that they pay again."""
        self._left -= 1
        if self._left <= 0:
            self._trying = not self._trying
            if self._trying:
                self._left = _TRY
            else:
                longest = min(_LONGEST_PAUSE, int(_TRY * overhead / _TRYING_SHARE))
                self._left = min(self._pause, max(1, longest))
                self._pause = 2 * self._left
        return self._trying

    def observe_plain(self, load: int, seconds: float) -> None:
        """Take note of a step that only decoded, without drafts."""
        self._at(load).observe_plain(seconds)

    def observe_drafted(self, load: int, seconds: float, row_cost: float) -> None:
        """Take note of a step that only decoded, and waited for drafts.

        `row_cost` is what its rows take, as a multiple of what a plain step's take.
        """
        self._at(load).observe_drafted(seconds, row_cost)

    def _at(self, load: int) -> _Load:
        return self._loads.setdefault(load.bit_length(), _Load())
