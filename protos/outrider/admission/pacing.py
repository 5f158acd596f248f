"""When refusals are sent: at once, unless a tenant calls again faster than its refusals allow."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

# Refusals of one tenant that are sent at once after a pause, and per second from then on. Chosen: short bursts are not
# delayed, and a tenant that is refused all day takes little of the event loop.
_BURST, _PER_SECOND = 64, 20.0
# Bytes of a request that count as one more refusal: reading more costs more than refusing. Chosen: another tenant's
# 99th percentile was nine times its quiet value while texts of 4 MB were refused at once, six times while those of
# 16 KB were tokenised first; now below twice.
LARGE_BYTES = 8 * 1024
# The longest delay. Chosen: shorter than the idle time-out of proxies.
_MOST_SECONDS = 10.0


class RefusalTimes(Protocol):
    """By tenant: the monotonic time by which all its refusals will have been sent."""

    def exclusive(self) -> AbstractContextManager[object]:
        """While the block runs, nobody else changes a time."""

    def get(self, tenant: str, now: float) -> float:
        """The tenant's time; `now` where that is past or not known."""

    def put(self, tenant: str, sent_by: float) -> None: ...


class OwnRefusalTimes:
    """The times of one thread; those that are past take no memory for long."""

    def __init__(self) -> None:
        self._sent_by: dict[str, float] = {}

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def get(self, tenant: str, now: float) -> float:
        if tenant not in self._sent_by:
            self._sent_by = {name: at for name, at in self._sent_by.items() if at > now}
        return max(self._sent_by.get(tenant, now), now)

    def put(self, tenant: str, sent_by: float) -> None:
        self._sent_by[tenant] = sent_by


class RefusalPace:
    """Delays the refusals of tenants that are refused often. Belongs to the server's event loop. 330 callers of one
    tenant that called again at once made another's steps four times as long on two cores."""

    def __init__(self, room: int, times: RefusalTimes | None = None) -> None:
        """`room`: calls that may wait; further ones are refused at once. `times` are those of this object alone where
        they are not given."""
        self._room = room
        self._waiting = 0
        # At `_PER_SECOND`.
        self._times: RefusalTimes = OwnRefusalTimes() if times is None else times

    async def wait(self, tenant: str, size: int = 0) -> None:
        """Return when the refusal of a tenant's call, whose request has `size` bytes, shall be sent."""
        delay = self._delay(tenant, max(1.0, size / LARGE_BYTES), time.monotonic())
        if delay <= 0 or self._waiting >= self._room:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(delay)
        finally:
            self._waiting -= 1

    def _delay(self, tenant: str, count: float, now: float) -> float:
        """Count a refusal as `count` of them; returns seconds until it is sent."""
        with self._times.exclusive():
            at = self._times.get(tenant, now)
            delay = min(at - now - (_BURST - 1) / _PER_SECOND, _MOST_SECONDS)
            if delay < _MOST_SECONDS:
                self._times.put(tenant, at + count / _PER_SECOND)
        return delay
