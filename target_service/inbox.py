"""The events of one sequence on their way to a reader that may be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from outrider.errors import QuotaExceeded
from target_service.sequence import SequenceEvent, Verdict


class Inbox:
    """A queue of one sequence's events that gives the sequence up when it grows past its limit."""

    def __init__(self, limit: int, cancel: Callable[[int], None]) -> None:
        """`cancel` gets the id of a sequence whose reader lags by more than `limit` steps."""
        self._limit = limit
        self._cancel = cancel
        self._events: deque[SequenceEvent] = deque()
        self._arrived = asyncio.Event()
        self._overflowed = False

    def put(self, event: SequenceEvent) -> None:
        """Add an event. At the limit, drop what waits and end the sequence: its memory is needed now."""
        if isinstance(event, Verdict) and len(self._events) >= self._limit:
            self._overflowed = True
            self._events.clear()
            self._cancel(event.sequence_id)
        else:
            self._events.append(event)
        self._arrived.set()

    async def get(self) -> SequenceEvent:
        """The next event. Raises `QuotaExceeded` when the reader was too slow."""
        while not self._events:
            if self._overflowed:
                raise QuotaExceeded("the client reads too slowly", steps=self._limit)
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()
