"""What each tenant has taken, and who is refused for it. Belongs to the event loop; holds nothing of idle tenants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.errors import QuotaExceeded
from outrider.limits import TenantTable
from target_service.core.fairness import Share
from target_service.core.sequence import SequenceRequest

# What is remembered of tenants that have nothing open is swept once they are this many.
_SWEPT_ABOVE = 1024


@dataclass(slots=True)
class _Account:
    """What one tenant has open, and its token bucket as of `filled_at`."""

    streams: int = 0
    texts: int = 0
    # Open sequences, and those of them that have not said a token.
    sequences: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    spent: float = 0.0
    filled_at: float = 0.0

    def leak(self, rate: float, now: float) -> None:
        """Forget requests that are long enough ago."""
        self.spent = max(0.0, self.spent - rate * (now - self.filled_at))
        self.filled_at = now


class TenantQuotas:
    """Counts by tenant against its limits. Every `QuotaExceeded` says which limit, and when to come again."""

    def __init__(self, table: TenantTable | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that never go back."""
        self.table = table or TenantTable()
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @property
    def remembered(self) -> int:
        """Tenants of whom anything is remembered."""
        return len(self._accounts)

    def share(self, tenant: str) -> Share:
        """What the engine is to know of a tenant."""
        limits = self.table.of(tenant)
        return Share(limits.weight, limits.running, limits.kv_tokens)

    @contextmanager
    def stream(self, tenant: str) -> Iterator[None]:
        """One call, to its end. Raises `QuotaExceeded`."""
        account, limits = self._account(tenant), self.table.of(tenant)
        _check("streams", account.streams, limits.streams)
        account.streams += 1
        try:
            yield
        finally:
            account.streams -= 1

    @contextmanager
    def text(self, tenant: str) -> Iterator[None]:
        """One text, while it waits for the tokeniser or is tokenised. Raises `QuotaExceeded`."""
        account, limits = self._account(tenant), self.table.of(tenant)
        _check("texts", account.texts, limits.texts)
        account.texts += 1
        try:
            yield
        finally:
            account.texts -= 1

    def request(self, tenant: str) -> None:
        """Take a request out of the tenant's token bucket. Raises `QuotaExceeded`."""
        account, limits, now = self._account(tenant), self.table.of(tenant), self._clock()
        rate = limits.requests_per_second
        if not rate:
            return
        account.leak(rate, now)
        if account.spent + 1.0 > limits.burst:
            wait = (account.spent + 1.0 - limits.burst) / rate
            raise QuotaExceeded("the tenant's requests a second are used up", limit=rate).after(wait)
        account.spent += 1.0

    def check_sequence(self, request: SequenceRequest) -> None:
        """Raise `QuotaExceeded` unless the tenant may open one sequence more."""
        account, limits = self._account(request.tenant), self.table.of(request.tenant)
        _check("sequences", len(account.sequences), limits.sequences)
        if not request.external:
            _check("waiting", len(account.waiting), limits.waiting)
        tokens = len(request.token_ids) + request.max_tokens
        if limits.kv_tokens and tokens > limits.kv_tokens:
            raise QuotaExceeded(
                "prompt and output are more than the tenant may hold", limit=limits.kv_tokens, tokens=tokens
            ).after(None)

    def opened(self, sequence_id: int, request: SequenceRequest) -> None:
        """A sequence was submitted. One whose client drafts says nothing before it has a tree, and does not wait."""
        account = self._account(request.tenant)
        account.sequences.add(sequence_id)
        if not request.external:
            account.waiting.add(sequence_id)

    def began(self, sequence_id: int, tenant: str) -> None:
        """It has said a token."""
        self._account(tenant).waiting.discard(sequence_id)

    def ended(self, sequence_id: int, tenant: str) -> None:
        """It is gone."""
        account = self._account(tenant)
        account.sequences.discard(sequence_id)
        account.waiting.discard(sequence_id)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= _SWEPT_ABOVE:
                self._sweep()
            account = self._accounts[tenant] = _Account(filled_at=self._clock())
        return account

    def _sweep(self) -> None:
        """Forget tenants that have nothing open and whose bucket is full. Names cost nothing to make up."""
        now = self._clock()
        for tenant, account in list(self._accounts.items()):
            account.leak(self.table.of(tenant).requests_per_second, now)
            if not (account.streams or account.texts or account.sequences or account.spent):
                del self._accounts[tenant]


def _check(what: str, taken: int, limit: int) -> None:
    if limit and taken >= limit:
        raise QuotaExceeded(f"the tenant has as many {what} as it may", quota=what, limit=limit)
