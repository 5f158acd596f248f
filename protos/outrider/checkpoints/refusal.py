"""The one error of this package, and lists of names that fit its line."""

from __future__ import annotations

from collections.abc import Iterable

# Enough to recognise what is missing, in a line that can still be read. Chosen.
_SHOWN = 10


class CheckpointRefused(ValueError):
    """The folder cannot be read whole, or is of a kind that is not read; the message is one line with the reason."""


def some(names: Iterable[str]) -> str:
    """The first ten names, sorted, and how many more there are."""
    listed = sorted(names)
    more = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
