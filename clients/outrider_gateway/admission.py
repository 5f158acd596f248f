"""Who is let in, how much of it, and in what share: the rules of the services, applied before a target is asked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Scope

from outrider.admission.shares import Shares
from outrider.admission.text_pool import TextPool
from outrider.errors import QuotaExceeded
from outrider_gateway.caller import HttpCaller
from outrider_gateway.failures import Refused, TooMany
from outrider_gateway.known_callers import KnownCallers
from outrider_gateway.peers import peer_name
from outrider_gateway.shared_state import SharedState
from outrider_gateway.targets import Targets

Result = TypeVar("Result")
# Bytes of a body that are not counted: what a connection holds of every body before anybody reads it.
UNCOUNTED_BYTES = 64 * 1024
# A body that takes a millisecond or more is read by a thread, which takes some 0.2 ms itself. Parsing and checking take
# 5 us for each object, such as a message, and 2 to 8 us for each KB beside them
# (`benchmarks/results/2026-11-29-cpu-next-turn-host.md`).
_LONG_BODY, _OBJECT_BYTES = 128 * 1024, 640


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds what a request takes: a tenant, at a peer's address."""

    tenant: str
    peer: str


class GatewayAdmission:
    """What all requests share. Belongs to the event loop."""

    def __init__(self, state: SharedState, targets: Targets) -> None:
        self._known = KnownCallers(targets)
        self._answers, self._bytes = state.places.answers, state.places.body_bytes
        self._pace = state.pace
        self._texts = TextPool()

    @contextlib.asynccontextmanager
    async def admitted(self, caller: HttpCaller, scope: Scope) -> AsyncIterator[Holder]:
        """Who holds what a request takes, once a target has accepted its caller. Raises `Refused`. Refusals, also those
        that the block raises, are sent no sooner than `RefusalPace` allows; whom no target knows is known by its
        address."""
        peer = peer_name((scope.get("client") or ("",))[0])
        pace_of = f"peer {peer}"
        try:
            tenant = await self._known.tenant(caller)
            pace_of = f"tenant {tenant}"
            yield Holder(tenant, peer)
        except Refused as refused:
            if refused.status == 401:
                self._known.refused(caller)
            if refused.status in (401, 429):
                await self._pace.wait(pace_of)
            raise

    @contextlib.contextmanager
    def answers(self, holder: Holder, count: int) -> Iterator[None]:
        """Places for so many answers while the block runs. Raises `TooMany` on entry."""
        with _refusing():
            self._answers.reserve(count, tenant=holder.tenant, peer=holder.peer)
        try:
            yield
        finally:
            self._answers.give_back(count, tenant=holder.tenant, peer=holder.peer)

    @contextlib.asynccontextmanager
    async def asking(self, caller: HttpCaller, scope: Scope) -> AsyncIterator[None]:
        """A call to targets that is no request for an answer, in the place of one. Raises `Refused`."""
        async with self.admitted(caller, scope) as holder:
            with self.answers(holder, 1):
                yield

    @contextlib.contextmanager
    def body(self, holder: Holder) -> Iterator[HeldBytes]:
        """What counts a request's bytes while the block runs."""
        held = HeldBytes(self._bytes, holder)
        try:
            yield held
        finally:
            held.give_back()

    async def read(self, holder: Holder, raw: bytes | bytearray, work: Callable[[], Result]) -> Result:
        """Read a body by `work`: one that takes long in a thread, in its tenant's turn. Raises `TooMany` where too many
        wait for that, and what `work` raises."""
        if len(raw) < _LONG_BODY and len(raw) + _OBJECT_BYTES * raw.count(b"{") < _LONG_BODY:
            return work()
        with _refusing():
            return await self._texts.call(holder.tenant, work)


class HeldBytes:
    """Bytes of one request that are counted against its holder."""

    def __init__(self, shares: Shares, holder: Holder) -> None:
        self._shares, self._holder, self._counted = shares, holder, 0

    def grow_to(self, size: int) -> None:
        """Count a request of `size` bytes. Raises `TooMany`."""
        more = size - UNCOUNTED_BYTES - self._counted
        if more > 0:
            with _refusing():
                self._shares.reserve(more, tenant=self._holder.tenant, peer=self._holder.peer)
            self._counted += more

    def give_back(self) -> None:
        if self._counted:
            self._shares.give_back(self._counted, tenant=self._holder.tenant, peer=self._holder.peer)
            self._counted = 0


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except QuotaExceeded as error:
        raise TooMany(error.message) from None
