"""Log lines about refused callers, few of them."""

from __future__ import annotations

import logging

from outrider.errors import OutriderError
from outrider.log_limit import LogLimit

logger = logging.getLogger(__name__)


class RefusalLog:
    """Logs which caller was refused and why; counts further refusals by reason, and logs the count with the next
    line."""

    def __init__(self) -> None:
        self._limit = LogLimit()

    def add(self, method: str, peer: str, error: OutriderError) -> None:
        """A call was refused. Messages of errors hold nothing that callers wrote."""
        others = self._limit.due(error.reason)
        if others is not None:
            logger.warning("refused %s from %s: %s (and %d like it)", method, peer, error.message, others)
