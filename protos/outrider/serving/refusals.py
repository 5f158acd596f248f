"""A line in the log for callers that are turned away, and not a line for each of them."""

from __future__ import annotations

import logging
import time

from outrider.errors import OutriderError

# Between two lines about the same. Chosen: whoever reads a log sees within a minute that it goes on.
_SECONDS_BETWEEN = 10.0

logger = logging.getLogger(__name__)


class RefusalLog:
    """Says who was turned away from where and why; counts the rest, by reason, and tells of them with the next line."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}

    def add(self, method: str, peer: str, error: OutriderError) -> None:
        """A call was refused. Texts of errors hold nothing that callers wrote."""
        now = time.monotonic()
        said_at, others = self._since.get(error.reason, (-_SECONDS_BETWEEN, 0))
        if now - said_at < _SECONDS_BETWEEN:
            self._since[error.reason] = said_at, others + 1
            return
        self._since[error.reason] = now, 0
        logger.warning("refused %s from %s: %s (and %d like it)", method, peer, error.message, others)
