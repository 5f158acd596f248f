"""How many calls there may be at once, and whose: the tenants' together, one tenant's, and health apart from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.errors import QuotaExceeded

# One tenant's share of all calls, where tenants are known by their tokens. Chosen, not measured.
_TENANT_SHARE = 0.75


@dataclass(frozen=True)
class CallLimits:
    """Calls at once, health not among them; `health` is its own. `refused` are those that wait to be told so."""

    total: int = 1024
    health: int = 64
    refused: int = 1024

    @property
    def per_tenant(self) -> int:
        """Of one tenant, where there are several."""
        return max(1, int(self.total * _TENANT_SHARE))

    @property
    def per_connection(self) -> int:
        """Of one connection; a client waits with what is more. Half of all, unless that is few."""
        return min(self.total, max(64, self.total // 2))

    @property
    def backstop(self) -> int:
        """Of the server, with room for those that are about to be refused."""
        return self.total + 2 * self.health + self.refused


class Calls:
    """The calls under way. Belongs to the server's event loop."""

    def __init__(self, limits: CallLimits, *, by_tenant: bool) -> None:
        """`by_tenant`: callers are who they say, so that a limit on each of them means something."""
        self.limits = limits
        self._by_tenant = by_tenant
        self._tenants: Counter[str] = Counter()
        self._health = 0

    @contextmanager
    def health(self) -> Iterator[None]:
        """A health call. Raises `QuotaExceeded` instead."""
        if self._health >= self.limits.health:
            raise QuotaExceeded("too many health calls", limit=self.limits.health)
        self._health += 1
        try:
            yield
        finally:
            self._health -= 1

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """Any other call of a tenant. Raises `QuotaExceeded` instead."""
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
