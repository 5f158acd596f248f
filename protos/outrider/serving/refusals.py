"""Log lines about refused callers, few of them."""

from __future__ import annotations

import logging
import time

from outrider.errors import OutriderError

# Between two lines with the same reason. Chosen: a log shows within a minute that refusals go on.
_SECONDS_BETWEEN = 10.0

logger = logging.getLogger(__name__)


class RefusalLog:
    """Logs which caller was refused and why; counts further refusals by reason, and logs the count with the next
    line."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}

    def add(self, method: str, peer: str, error: OutriderError) -> None:
        """A call was refused. Messages of errors hold nothing that callers wrote."""
        now = time.monotonic()
        logged_at, others = self._since.get(error.reason, (-_SECONDS_BETWEEN, 0))
        if now - logged_at < _SECONDS_BETWEEN:
            self._since[error.reason] = logged_at, others + 1
            return
        self._since[error.reason] = now, 0
        logger.warning("refused %s from %s: %s (and %d like it)", method, peer, error.message, others)
