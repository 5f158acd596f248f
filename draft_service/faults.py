"""Bugs in a drafter: which sequences they end, and few log lines about them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outrider.errors import OutriderError
from outrider.log_limit import LogLimit

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
    text = " ".join(str(error).split())
    # Of an exception's text, which may hold a whole tensor. Chosen.
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


class FaultLog:
    """Logs bugs with their traceback; counts further ones of the same kind, and logs the count with the next line."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._limit = LogLimit()

    def refusal(self, error: Exception) -> OutriderError:
        """The error that the target gets for a sequence that failed. A bug is logged, and its text is not sent."""
        if isinstance(error, OutriderError):
            return error
        self.add(error)
        return OutriderError("internal error")

    def add(self, error: Exception) -> None:
        """Log a bug that no target hears of."""
        others = self._limit.due(type(error).__name__)
        if others is None:
            return
        logger.error(
            "bug in the drafter %s, which ends drafting for its sequences: %s (and %d like it)",
            self._drafter,
            text_of(error),
            others,
            exc_info=error,
        )
