"""Chooses whether the next step waits for drafts, by the times of both kinds of step and the tokens of recent drafts.

The row budget covers the cost of rows. The cost of drafting itself is measured here: the wait for the answer, and that
a step with drafts cannot be prepared before the one under way has ended. It is the time that whole steps with drafts
take beyond plain ones with as many rows.
"""

from __future__ import annotations

from target_service.speculation.policy.draft_times import ENOUGH, ENOUGH_OF_MANY, LoadTimes, StepTime, enough_plain
from target_service.speculation.policy.launch_mode import MARGIN, TRYING, LaunchMode, load_size

# Longest wait for a draft, in plain steps: a step hardly ever yields more tokens.
_WORTH = 8.0
# Steps without drafts before the next try, from the first to the longest pause, and steps of a try.
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 16384
_TRY = 4
# The factor by which tries are more frequent at first than in the long run.
_EAGER = 2
# Steps for which drafts have to pay before pauses are short again.
_RECOVERED = 16
# Steps after which a few plain steps are timed again.
_REFRESH = 2048


class DraftSwitch:
    """Chooses step by step, by load in powers of two."""

    def __init__(self) -> None:
        self._loads: dict[int, LoadTimes] = {}
        self._left = 0
        self._pause = _FIRST_PAUSE
        self._trying = False
        self._paid = 0
        self._since_refresh = 0
        # In a row.
        self._plain_steps = 0

    def drafts_within(self, steps: int) -> bool:
        """Whether a drafted step was less than `steps` ago, or may come in less than `steps`."""
        return self._plain_steps < steps or self._left < steps

    def resume(self) -> None:
        """Drafted steps are about to come, in spite of a pause: sequences begin for which they are expected to pay."""
        self._plain_steps = 0

    def choose(self, load: int, expected: float, *, ahead: bool, sending: float = 0.0) -> LaunchMode:
        """How the next step uses drafts. Called once per step. `expected` are the tokens of the `load` sequences that
        run, with drafts, in the time of a plain step and the drafted rows; `ahead`: a plain step may be launched behind
        the one under way; `sending` is the time to send the draft what it needs for a try, in plain steps."""
        seen = self._at(load)
        enough = enough_plain(ahead=ahead)
        self._since_refresh += seen.plain.count >= enough
        if self._since_refresh > _REFRESH:
            # Contexts grow, and with them the time of a plain step.
            self._since_refresh, seen.plain.count = 0, 1 + enough - ENOUGH
        use = LaunchMode.RUN_AHEAD if seen.plain.count < enough else self._decide(seen, load, expected, sending)
        self._plain_steps = 0 if use is not LaunchMode.RUN_AHEAD else self._plain_steps + 1
        return use

    def best(self, load: int, expected: float) -> LaunchMode:
        """What pays by present knowledge, without tries: for steps whose time is not observed."""
        seen = self._at(load)
        if seen.plain.count < ENOUGH or not seen.known:
            return LaunchMode.RUN_AHEAD
        return LaunchMode.WAIT_FOR_DRAFT if seen.gain(load, expected) > MARGIN else LaunchMode.RUN_AHEAD

    def needs_unfed(self, load: int, *, ahead: bool) -> bool:
        """Whether plain steps that feed no head have to be timed, now that a head's drafts are. More are needed where
        steps are launched `ahead`."""
        seen = self._at(load)
        return seen.known and seen.unfed_steps < enough_plain(ahead=ahead)

    def max_wait(self, load: int) -> float:
        """Longest wait for a draft, in seconds."""
        seen = self._at(load)
        return _WORTH * seen.plain.value if seen.plain.count >= ENOUGH else float("inf")

    def _decide(self, seen: LoadTimes, load: int, expected: float, sending: float) -> LaunchMode:
        if not seen.known or seen.gain(load, expected) > MARGIN:
            self._trying, self._left, self._paid = False, 0, self._paid + 1
            if self._paid > _RECOVERED:
                self._pause = _FIRST_PAUSE
            return LaunchMode.WAIT_FOR_DRAFT
        self._paid = 0
        return LaunchMode.WAIT_FOR_DRAFT if self._try(_TRY * seen.overhead.value + sending) else LaunchMode.RUN_AHEAD

    def _try(self, cost: float) -> bool:
        """Whether a drafted step is due although drafts do not pay, to notice when they do again. `cost` is that of a
        few of them, in plain steps."""
        self._left -= 1
        if self._left <= 0:
            self._trying = not self._trying
            if self._trying:
                self._left = _TRY
            else:
                longest = max(_FIRST_PAUSE, min(_LONGEST_PAUSE, int(cost / TRYING)))
                self._left = max(longest // _EAGER, min(self._pause, longest))
                self._pause = 2 * self._left
        return self._trying

    def observe_plain(self, load: int, seconds: float, *, fed: bool = False, ahead: bool = True) -> None:
        """Observe a step that only decoded, without drafts. `fed`: a head was sent its hidden states; `ahead`: it was
        launched behind another."""
        self._at(load).observe_plain(seconds, fed=fed, ahead=ahead)

    def observe_after(self, load: int, seconds: float, row_cost: float, *, answered: bool = True) -> None:
        """Observe a step that only decoded and waited for drafts, which were `answered` or came too late; its rows cost
        `row_cost` plain steps."""
        if self._at(load).plain.count:
            self._at(load).observe_after(seconds, row_cost, answered=answered)

    def _at(self, load: int) -> LoadTimes:
        size = load_size(load)
        if size not in self._loads:
            lower = max((known for known in self._loads if known < size), default=None)
            if lower is not None:
                self._loads[size] = self._loads[lower].warm_start()
            else:
                self._loads[size] = LoadTimes(overhead=StepTime(first_few=ENOUGH_OF_MANY if size else ENOUGH))
        return self._loads[size]
