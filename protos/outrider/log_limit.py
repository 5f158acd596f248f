"""How often the log gets a line about what others can cause at will."""

from __future__ import annotations

import time

# Between two lines of a kind. Chosen: a log shows within a minute that it goes on.
_SECONDS_BETWEEN = 10.0


class LogLimit:
    """Lets one line of each kind through in ten seconds, and counts the others. Kinds must be few: they are kept."""

    def __init__(self) -> None:
        # By kind: when its last line was logged, in seconds of the monotonic clock, and the others since.
        self._kinds: dict[str, tuple[float, int]] = {}

    def due(self, kind: str = "") -> int | None:
        """Whether a line is to be logged now: the number of those left out since the last, or None for none."""
        now = time.monotonic()
        logged_at, others = self._kinds.get(kind, (-_SECONDS_BETWEEN, 0))
        if now - logged_at < _SECONDS_BETWEEN:
            self._kinds[kind] = logged_at, others + 1
            return None
        self._kinds[kind] = now, 0
        return others
