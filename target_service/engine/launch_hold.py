"""How long the launch of a step may be held while the one before it runs, so that requests which arrive meanwhile are
in it."""

from __future__ import annotations

from collections import deque


class LaunchHold:
    """Estimates how long before the end of a running step the next one has to be launched."""

    def __init__(self) -> None:
        # Launches of which the longest counts. Chosen: some, since a pass with a prompt takes longer to launch than
        # others.
        self._launches = deque[float](maxlen=16)
        self._scale = 1.0
        self._since_request = 0

    @property
    def lead(self) -> float:
        """Seconds before the end; infinite before any launch, and where no request is expected."""
        # Launches behind the last request for which others are expected. Chosen: half a second of passes at 8B size.
        # Where nobody comes, nothing is gained by a hold.
        if self._since_request > 64:
            return float("inf")
        # Of a launch, in the longest of the last few and seconds: what the host needs, and what a thread may wake late.
        # Chosen: a device that waits for its host loses all the time that it waits, and a request that comes too late a
        # pass.
        return self._scale * (2.0 * max(self._launches, default=float("inf")) + 5e-4)

    def observe_request(self) -> None:
        """Observe that a request has come."""
        self._since_request = 0

    def observe_launch(self, seconds: float, *, late: bool | None) -> None:
        """Observe the host's time for a launch behind a step, and whether that had ended by then, None where it was not
        held."""
        self._launches.append(seconds)
        self._since_request += 1
        if late is not None:
            # What a launch needs is more after one that came too late, and again less with each that did not. Chosen:
            # it is halved after some 350 launches, two seconds of passes at 8B size.
            self._scale = min(8.0, 2.0 * self._scale) if late else max(1.0, 0.998 * self._scale)
