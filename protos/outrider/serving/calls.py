"""Bounds on concurrent calls: of all tenants, of one tenant, and of health calls, which are counted apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from outrider.admission.shares import TENANT_FACTOR, Shares
from outrider.errors import QuotaExceeded
from outrider.settings import FIRST_MESSAGE_SECONDS, MAX_MESSAGE_BYTES

# Of one call, as HTTP/2 counts them.
MAX_METADATA_BYTES = 16 * 1024


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
    def per_connection(self) -> int:
        """Of one connection; a client holds back further calls. Half of all, at least 64, at most all."""
        return min(self.total, max(64, self.total // 2))

    @property
    def backstop(self) -> int:
        """Of the whole server, with room for calls that are about to be refused."""
        return self.total + 3 * self.health + self.refused


class Calls:
    """The calls in flight. Belongs to the server's event loop."""

    def __init__(self, limits: CallLimits, *, by_tenant: bool) -> None:
        """`by_tenant`: tenants are authenticated, so each has its own limit."""
        self.limits = limits
        self._shares = Shares("calls", limits.total, {"tenant": TENANT_FACTOR})
        self._by_tenant = by_tenant
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

    def of(self, tenant: str) -> AbstractContextManager[None]:
        """Count any other call of a tenant while the block runs. Raises `QuotaExceeded` on entry."""
        return self._shares.using(tenant=tenant) if self._by_tenant else self._shares.using()
