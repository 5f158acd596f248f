"""When the next pass has to be launched, so that the device never waits for its host and drafts have all the time."""

from __future__ import annotations

# Before the launch itself there is the wake-up of a thread, and the clock of the host is not the device's. Always kept,
# and as much again until launches show what is needed; chosen, not measured.
_SLACK_NS = 150_000
_MOST_SLACK_NS = 3_000_000
# A launch that came too late adds so much, and each one takes a small part back: where half a millisecond is needed,
# one launch in eighty is late.
_LATER_NS, _EARLIER = 200_000, 0.995
# A launch that took so many times as long as they usually do was late for that, and says nothing of the slack: on an
# H200's host 4 in 100 were, of 1.5 to 7 ms where 0.85 are usual, and beginning each launch 1.4 ms early for them kept
# the whole trees of nearly all passes out (`benchmarks/results/2026-11-22-h200-waiting-step.md`).
_UNUSUAL = 1.5
# What one launch moves the time that one takes, and how many times as long as usual it counts for at most.
_SHARE, _MOST = 0.1, 3.0


class LaunchTime:
    """Finds how long before the end of the pass under way the next one has to be begun to be launched."""

    def __init__(self) -> None:
        self._takes_ns = 0.0
        self._slack_ns = float(_SLACK_NS)

    @property
    def seconds(self) -> float:
        """What a launch takes the host, lately; 0 before the first."""
        return self._takes_ns * 1e-9

    def latest(self, begun_ns: int, seconds: float) -> int:
        """The latest time to begin a launch behind a pass that began at `begun_ns` (monotonic) and takes `seconds`; 0
        where nobody knows what it takes, which is now."""
        if not seconds:
            return 0
        return begun_ns + int(seconds * 1e9 - self._takes_ns - _SLACK_NS - self._slack_ns)

    def observe(self, took_ns: int, *, late: bool) -> None:
        """A launch behind another pass took so long; `late`, the pass had ended by then."""
        usual_ns = self._takes_ns = self._takes_ns or float(took_ns)
        self._takes_ns += _SHARE * (min(took_ns, _MOST * usual_ns) - self._takes_ns)
        short_of_slack = late and took_ns <= _UNUSUAL * usual_ns
        self._slack_ns = min(_MOST_SLACK_NS, self._slack_ns * _EARLIER + (_LATER_NS if short_of_slack else 0))
