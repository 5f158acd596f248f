"""When callers are told that they are refused: at once, unless they come back faster than callers who heed it."""

from __future__ import annotations

import asyncio
import time

# Refusals of one tenant that are told at once after a pause, and how many a second are told from then on. Chosen: short
# storms go unnoticed, and a tenant that is refused all day takes little of the thread that serves everybody.
_BURST, _PER_SECOND = 64, 20.0
# Bytes of a request that count as a refusal more. Chosen: another tenant's 99th percentile was nine times its quiet
# value while texts of 4 MB were refused at once, six times while those of 16 KB were tokenised first; now below twice.
_BYTES = 8 * 1024
# The longest that anybody waits to hear it. Chosen: connections through proxies that close idle ones outlast it.
_MOST_SECONDS = 10.0


def is_large(size: int) -> bool:
    """Whether a request of so many bytes costs more than a refusal, whatever it is refused for."""
    return size > _BYTES


class RefusalPace:
    """Makes those wait who are refused often. Belongs to the server's event loop; remembers nobody who is not refused.

    330 callers of one tenant that came back at once made another's steps four times as long on two cores: to refuse
    is cheap, but not free.
    """

    def __init__(self, room: int) -> None:
        """`room`: calls that may wait; the others are told at once."""
        self._room = room
        self._waiting = 0
        # By tenant: when all that were refused will have been told, at the pace.
        self._told_by: dict[str, float] = {}

    async def wait(self, whose: str, size: int = 0) -> None:
        """Return when a call of a tenant, or of nobody known, whose request has `size` bytes, is to be told that it is
        refused."""
        delay = self._delay(whose, max(1.0, size / _BYTES), time.monotonic())
        if delay <= 0 or self._waiting >= self._room:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(delay)
        finally:
            self._waiting -= 1

    def _delay(self, whose: str, count: float, now: float) -> float:
        """Count a refusal, as so many; seconds until it is told."""
        if whose not in self._told_by:
            self._told_by = {name: at for name, at in self._told_by.items() if at > now}
        at = max(self._told_by.get(whose, now), now)
        delay = min(at - now - (_BURST - 1) / _PER_SECOND, _MOST_SECONDS)
        if delay < _MOST_SECONDS:
            self._told_by[whose] = at + count / _PER_SECOND
        return delay
