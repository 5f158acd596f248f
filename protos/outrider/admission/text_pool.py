"""Threads for work on long texts, shared among tenants in turn. Belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from outrider.admission.shares import TENANT_FACTOR, Shares

Result = TypeVar("Result")

# Two, so that one long text does not block all others; more would take processors from the engine. Chosen.
_THREADS = 2
# Most texts that wait, of all tenants. Bounds their memory: messages have at most 4 MB.
_MOST_WAITING = 128


class TextPool:
    """Runs work in threads: tenants take turns, and work that is cancelled while it waits is never run. Work that has
    begun runs to its end, since a tokenizer cannot be stopped; its thread is busy until then."""

    def __init__(
        self,
        counted: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        most_waiting: int | None = None,
    ) -> None:
        """`counted` is entered for each text of a tenant, and may refuse it. `most_waiting` bounds the texts that wait,
        of all tenants."""
        self._counted = counted
        self._waiting = Shares("texts that wait for a thread", most_waiting or _MOST_WAITING, {"tenant": TENANT_FACTOR})
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
        self._free = _THREADS
        # By tenant, the next one first.
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        return self._waiting.taken

    async def call(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run `work` and return its result. Raises `QuotaExceeded` where too many of the tenant's, or of all, wait."""
        with self._counted(tenant):
            await self._turn(tenant)
            loop, future = asyncio.get_running_loop(), self._threads.submit(work)

            def done(_: object) -> None:
                # The loop may have ended.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._pass_on)

            future.add_done_callback(done)
            return await asyncio.wrap_future(future)

    async def _turn(self, tenant: str) -> None:
        """Wait for a thread, and take it."""
        if self._free:
            self._free -= 1
            return
        with self._waiting.using(tenant=tenant):
            await self._in_line(tenant)

    async def _in_line(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was given a thread in the same iteration of the loop.
                self._pass_on()
            else:
                line = self._lines.get(tenant, deque())
                if turn in line:
                    line.remove(turn)
                if not line:
                    self._lines.pop(tenant, None)
            raise

    def _pass_on(self) -> None:
        """Give a thread that has become free to the next text."""
        while self._lines:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            turn = line.popleft()
            if line:
                # Last in the round.
                self._lines[tenant] = line
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
