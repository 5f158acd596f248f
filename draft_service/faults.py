"""Bugs in a drafter: which sequences they end, and few log lines about them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from outrider.errors import OutriderError

# Between two log lines about the same kind of exception. Chosen: a log shows within a minute that it goes on.
_SECONDS_BETWEEN = 10.0
_MAX_TEXT = 200

logger = logging.getLogger(__name__)


class DrafterFailed(Exception):
    """A call of the drafter for several sequences failed. The caller must close them; they are still open."""

    def __init__(self, sequence_ids: Sequence[int], error: Exception) -> None:
        super().__init__(text_of(error))
        self.sequence_ids = sequence_ids
        self.error = error


def text_of(error: BaseException) -> str:
    """The exception in one short line."""
    if isinstance(error, OutriderError):
        return error.message
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:_MAX_TEXT]}" if said else type(error).__name__


class FaultLog:
    """Logs bugs with their traceback; counts further ones of the same kind, and logs the count with the next line."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._since: dict[str, tuple[float, int]] = {}

    def refusal(self, error: Exception) -> OutriderError:
        """What is said of a sequence that failed. A bug is logged, and its text is not sent."""
        if isinstance(error, OutriderError):
            return error
        self._add(error)
        return OutriderError("internal error")

    def _add(self, error: Exception) -> None:
        kind, now = type(error).__name__, time.monotonic()
        logged_at, others = self._since.get(kind, (-_SECONDS_BETWEEN, 0))
        if now - logged_at < _SECONDS_BETWEEN:
            self._since[kind] = logged_at, others + 1
            return
        self._since[kind] = now, 0
        logger.error(
            "bug in the drafter %s, which ends drafting for its sequences: %s (and %d like it)",
            self._drafter,
            text_of(error),
            others,
            exc_info=error,
        )
