"""Counts what each tenant uses against its limits. Belongs to the event loop; idle tenants take no memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from outrider.errors import QuotaExceeded
from outrider.limits import TenantTable
from target_service.core.sequence import SequenceRequest


@dataclass(slots=True)
class _Account:
    """What one tenant has open, and its token bucket at `filled_at`."""

    # Streams and texts, by name of their limit.
    open: Counter[str] = field(default_factory=Counter)
    # Open sequences, and those of them without a token yet.
    sequences: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    spent: float = 0.0
    filled_at: float = 0.0

    def leak(self, rate: float, now: float) -> None:
        """Drain the bucket by the time since the last request."""
        self.spent = max(0.0, self.spent - rate * (now - self.filled_at))
        self.filled_at = now


class TenantQuotas:
    """Checks each tenant's use against its limits. Every `QuotaExceeded` names the limit and when to retry."""

    def __init__(self, table: TenantTable | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self.table = table or TenantTable()
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def counted(self, tenant: str, what: Literal["streams", "texts"]) -> Iterator[None]:
        """Count one call, to its end, or one text, while it waits for the tokenizer or is tokenized. Raises
        `QuotaExceeded` on entry."""
        account = self._account(tenant)
        _check(what, account.open[what], getattr(self.table.of(tenant), what))
        account.open[what] += 1
        try:
            yield
        finally:
            account.open[what] -= 1

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
        """A sequence was submitted. One whose client drafts does not count as waiting: it waits for a tree."""
        account = self._account(request.tenant)
        account.sequences.add(sequence_id)
        if not request.external:
            account.waiting.add(sequence_id)

    def began(self, sequence_id: int, tenant: str) -> None:
        self._account(tenant).waiting.discard(sequence_id)

    def ended(self, sequence_id: int, tenant: str) -> None:
        account = self._account(tenant)
        account.sequences.discard(sequence_id)
        account.waiting.discard(sequence_id)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            # Accounts without anything open are removed once there are this many accounts.
            if len(self._accounts) >= 1024:
                self._sweep()
            account = self._accounts[tenant] = _Account(filled_at=self._clock())
        return account

    def _sweep(self) -> None:
        """Remove accounts with nothing open and a full bucket: callers can invent any number of tenants."""
        now = self._clock()
        for tenant, account in list(self._accounts.items()):
            account.leak(self.table.of(tenant).requests_per_second, now)
            if not (account.open.total() or account.sequences or account.spent):
                del self._accounts[tenant]


def _check(what: str, taken: int, limit: int) -> None:
    if limit and taken >= limit:
        raise QuotaExceeded(f"the tenant has as many {what} as it may", quota=what, limit=limit)
