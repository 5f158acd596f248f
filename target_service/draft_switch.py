"""Whether to wait for drafts in the next step: by what drafted and plain steps take and yield at the present load.

The row budget knows what rows cost. What it cannot know is what drafting itself costs: waiting for the answer, and
that a step with drafts cannot be prepared before the one under way has ended. Both are measured here, as the time of
whole steps of either kind, and set against the tokens that sequences made of their drafts lately.
"""

from __future__ import annotations

from dataclasses import dataclass

# Steps of a kind at one load before its time is believed.
_ENOUGH = 8
# What one step moves the time of its kind, and how far from it a step is believed.
_SHARE = 0.1
_BOUND = 2.0
# Steps without drafts before the next try, from the first to the longest pause, and steps of a try.
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 1024
_TRY = 4
# Steps for which drafts have to pay before a pause is short again.
_RECOVERED = 16
# Drafting has to promise this much, so that noise does not switch it.
_MARGIN = 1.02
# Plain steps that a draft follows along, after a drafted one and before the next.
_FOLLOWED = 32
# Every so often plain steps are timed anew, a few of them.
_REFRESH = 2048


@dataclass(slots=True)
class _Kind:
    """Time of one kind of step at one load."""

    seconds: float = 0.0
    steps: int = 0

    def observe(self, seconds: float) -> None:
        self.steps += 1
        if self.steps == 1:
            self.seconds = seconds
            return
        ratio = min(_BOUND, max(1 / _BOUND, seconds / self.seconds))
        self.seconds *= 1 + max(_SHARE, 1 / self.steps) * (ratio - 1)


class DraftSwitch:
    """Turns drafting down step by step. Loads are told apart by powers of two."""

    def __init__(self) -> None:
        self._plain: dict[int, _Kind] = {}
        self._drafted: dict[int, _Kind] = {}
        self._left = 0
        self._pause = _FIRST_PAUSE
        self._trying = False
        self._paid = 0
        self._since_refresh = 0
        # In a row.
        self._plain_steps = 0

    @property
    def drafts_are_near(self) -> bool:
        """Whether a drafted step was lately, or may come soon, so that the draft had better follow along."""
        return self._plain_steps < _FOLLOWED or self._left < _FOLLOWED

    def drafts(self, load: int, promised: float) -> bool:
        """Whether the next step waits for drafts. Called once per step.

        Args:
            load: sequences that run.
            promised: tokens that a step with drafts makes of all of them, by what it made lately.
        """
        chosen = self._choose(load, promised)
        self._plain_steps = 0 if chosen else self._plain_steps + 1
        return chosen

    def _choose(self, load: int, promised: float) -> bool:
        plain, drafted = self._kinds(load)
        if plain.steps < _ENOUGH:
            return False
        self._since_refresh += 1
        if self._since_refresh > _REFRESH:
            # Contexts grow, and with them what a plain step takes.
            self._since_refresh, plain.steps = 0, 1
        if drafted.steps < _ENOUGH or promised > _MARGIN * load * drafted.seconds / plain.seconds:
            self._trying, self._left, self._paid = False, 0, self._paid + 1
            if self._paid > _RECOVERED:
                self._pause = _FIRST_PAUSE
            return True
        self._paid = 0
        return self._try()

    def _try(self) -> bool:
        """Whether a drafted step is due although drafts do not pay: else nobody would know that they pay again."""
        self._left -= 1
        if self._left <= 0:
            self._trying = not self._trying
            if self._trying:
                self._left = _TRY
            else:
                self._left, self._pause = self._pause, min(_LONGEST_PAUSE, 2 * self._pause)
        return self._trying

    def observe(self, load: int, seconds: float, *, drafted: bool) -> None:
        """Take note of a step that only decoded."""
        self._kinds(load)[drafted].observe(seconds)

    def _kinds(self, load: int) -> tuple[_Kind, _Kind]:
        size = load.bit_length()
        return self._plain.setdefault(size, _Kind()), self._drafted.setdefault(size, _Kind())
