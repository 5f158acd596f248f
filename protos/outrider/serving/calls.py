"""Bounds on concurrent calls: of all tenants, of one tenant, and of health calls, which are counted apart."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from outrider.errors import QuotaExceeded
from outrider.settings import FIRST_MESSAGE_SECONDS, MAX_MESSAGE_BYTES

# One tenant's share of all calls, where tenants are known by their tokens. Chosen, not measured.
_TENANT_SHARE = 0.75


@dataclass(frozen=True)
class CallLimits:
    """Concurrent calls, and how long and large their requests may be."""

    total: int = 1024  # without health
    health: int = 64  # of checks and of watches, each
    refused: int = 1024  # that wait for their refusal
    request_seconds: float = 10.0  # from the headers of a call to its single request
    first_message_seconds: float = FIRST_MESSAGE_SECONDS  # from the headers of a stream to its first message
    message_bytes: int = MAX_MESSAGE_BYTES

    @property
    def per_tenant(self) -> int:
        """Of one tenant, where tenants are known by their tokens."""
        return max(1, int(self.total * _TENANT_SHARE))

    @property
    def per_connection(self) -> int:
        """Of one connection; a client holds back further calls. Half of all, at least 64, at most all."""
        return min(self.total, max(64, self.total // 2))

    @property
    def backstop(self) -> int:
        """Of the whole server, with room for calls that are about to be refused."""
        return self.total + 3 * self.health + self.refused


class Unread:
    """Calls whose request is still to come. Beyond `most`, the oldest is ended for each new one: whoever sends its
    request with the headers, as every client does, is read before others push it out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deadlines: list[asyncio.Timeout] = []

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Wait for a request. Raises `TimeoutError` after `seconds`, or when too many others wait."""
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


class Calls:
    """The calls in flight. Belongs to the server's event loop."""

    def __init__(self, limits: CallLimits, *, by_tenant: bool) -> None:
        """`by_tenant`: tenants are authenticated, so each has its own limit."""
        self.limits = limits
        self._by_tenant = by_tenant
        self._tenants: Counter[str] = Counter()
        # By whether they watch.
        self._health: Counter[bool] = Counter()

    @contextmanager
    def health(self, *, watches: bool = False) -> Iterator[None]:
        """Count a health call, or raise `QuotaExceeded`. Those that watch never end and need no token, so they are
        counted apart: together they would keep out every probe."""
        if self._health[watches] >= self.limits.health:
            raise QuotaExceeded("too many health calls", limit=self.limits.health)
        self._health[watches] += 1
        try:
            yield
        finally:
            self._health[watches] -= 1

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """Count any other call of a tenant, or raise `QuotaExceeded`."""
        if self._by_tenant and self._tenants[tenant] >= self.limits.per_tenant:
            raise QuotaExceeded("too many calls of this tenant at once", limit=self.limits.per_tenant)
        if self._tenants.total() >= self.limits.total:
            raise QuotaExceeded("too many calls at once", limit=self.limits.total)
        self._tenants[tenant] += 1
        try:
            yield
        finally:
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
