"""Waiting for what anybody may keep others waiting with, bounded in number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NewestWaits:
    """Waits of which at most so many go on. Beyond `most`, the oldest is ended for each new one: what comes at once, as
    the request of every client with its headers, is there before others push it out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deadlines: list[asyncio.Timeout] = []

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Wait in the block. Raises `TimeoutError` after `seconds`, or when too many others wait."""
        if len(self._deadlines) >= self._most:
            self._deadlines.pop(0).reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(seconds) as deadline:
            self._deadlines.append(deadline)
            try:
                yield
            finally:
                # It is gone already where the call was ended for another.
                if deadline in self._deadlines:
                    self._deadlines.remove(deadline)
