"""Threads for work on long texts, shared among tenants in turn. Belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from outrider.errors import QuotaExceeded
from target_service.core.quotas import TenantQuotas

Result = TypeVar("Result")

# One is not held up by another's text, and more would take processors from the engine. Chosen, not measured.
_THREADS = 2
# Texts of all tenants that wait: with messages of 4 MB at most, what they take of memory.
_MOST_WAITING = 128


class TextPool:
    """Runs work in threads: tenants take turns, and what is cancelled while it waits is never run.

    What has begun goes on to its end, since nothing stops a tokeniser; its thread is taken until then.
    """

    def __init__(self, quotas: TenantQuotas) -> None:
        """`quotas` say how many texts of a tenant may be here at once."""
        self._quotas = quotas
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
        self._free = _THREADS
        # By tenant, the one whose turn is next first.
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        """Texts whose turn has not come."""
        return sum(map(len, self._lines.values()))

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """What `work` returns. Raises `QuotaExceeded` where too many of the tenant's, or of all, wait."""
        with self._quotas.text(tenant):
            await self._turn(tenant)
            loop, future = asyncio.get_running_loop(), self._threads.submit(work)

            def done(_: object) -> None:
                # A loop that has ended waits for nobody's turn.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._pass_on)

            future.add_done_callback(done)
            return await asyncio.wrap_future(future)

    async def _turn(self, tenant: str) -> None:
        """Wait for a thread, and take it."""
        if self._free:
            self._free -= 1
            return
        if self.waiting >= _MOST_WAITING:
            raise QuotaExceeded("too many texts wait for the tokeniser", waiting=self.waiting)
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # Given a thread in the same turn of the loop.
                self._pass_on()
            else:
                self._leave(tenant, turn)
            raise

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant, deque())
        if turn in line:
            line.remove(turn)
        if not line:
            self._lines.pop(tenant, None)

    def _pass_on(self) -> None:
        """Give a thread that has become free to whoever is next."""
        while self._lines:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            turn = line.popleft()
            if line:
                # To the end of the round.
                self._lines[tenant] = line
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
