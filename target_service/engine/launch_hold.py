"""How long the launch of a step may be held while the one before it runs, so that requests which arrive meanwhile are
in it."""

from __future__ import annotations

from collections import deque

# Of a launch, in the longest of the last few and seconds: what the host needs, and what a thread may wake late. Chosen:
# a device that waits for its host loses all the time that it waits, and a request that comes too late a pass.
_LAUNCHES, _LATEST_WAKE = 2.0, 5e-4
# Launches of which the longest counts. Chosen: some, since a pass with a prompt takes longer to launch than others.
_LAST = 16
# What a launch needs is more after one that came too late, and again less with each that did not. Chosen: it is halved
# after some 350 launches, two seconds of passes at 8B size.
_LATE, _IN_TIME, _MOST = 2.0, 0.998, 8.0
# Launches behind the last request for which others are expected. Chosen: half a second of passes at 8B size. Where
# nobody comes, nothing is gained by a hold.
_EXPECTS = 64


class LaunchHold:
    """Estimates how long before the end of a running step the next one has to be launched."""

    def __init__(self) -> None:
        self._launches = deque[float](maxlen=_LAST)
        self._scale = 1.0
        self._since_request = 0

    @property
    def lead(self) -> float:
        """Seconds before the end; infinite before any launch, and where no request is expected."""
        if self._since_request > _EXPECTS:
            return float("inf")
        return self._scale * (_LAUNCHES * max(self._launches, default=float("inf")) + _LATEST_WAKE)

    def observe_request(self) -> None:
        """Observe that a request has come."""
        self._since_request = 0

    def observe_launch(self, seconds: float, *, late: bool | None) -> None:
        """Observe the host's time for a launch behind a step, and whether that had ended by then, None where it was not
        held."""
        self._launches.append(seconds)
        self._since_request += 1
        if late is not None:
            self._scale = min(_MOST, _LATE * self._scale) if late else max(1.0, _IN_TIME * self._scale)
