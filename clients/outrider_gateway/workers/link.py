"""A worker's side of the socket to its parent: responses that the parent keeps, the page of metrics, and orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from outrider.processes.framing import FrameCutter
from outrider.telemetry.registry import Figures
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.stored_responses import StoredResponse
from outrider_gateway.workers import messages


class ParentLink(asyncio.Protocol):
    """An `outrider_gateway.shared_state.ResponseStore`, and what else the parent does for a worker."""

    def __init__(self, on_drain: Callable[[bool], None]) -> None:
        """`on_drain` is called with whether the worker has to end at once, also when the parent has ended."""
        self._on_drain = on_drain
        self._frames = FrameCutter()
        self._transport: asyncio.Transport | None = None
        self._calls = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._figures: Callable[[], Figures] | None = None

    def send(self, message: messages.FromWorker) -> None:
        """Send a message; nothing where the parent has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.pack_for_parent(message))

    async def count(self, figures: Callable[[], Figures]) -> None:
        """Send `figures` from now on, once a second and when the parent asks, until this is cancelled."""
        self._figures = figures
        while True:
            await asyncio.sleep(1.0)
            self.send(messages.Counted(figures()))

    async def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        return bool(await self._ask(lambda call: messages.Keep(call, tenant, response_id, response)))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        found: StoredResponse | None = await self._ask(lambda call: messages.Find(call, tenant, response_id))
        return found

    async def delete(self, tenant: str, response_id: str) -> bool:
        return bool(await self._ask(lambda call: messages.Delete(call, tenant, response_id)))

    async def metrics_page(self, _own: GatewayMetrics) -> bytes:
        """The text of /metrics, of all workers together."""
        page: bytes = await self._ask(messages.AskPage)
        return page

    async def _ask(self, question: Callable[[int], messages.FromWorker]) -> Any:
        self._calls += 1
        call = self._calls
        self._waiting[call] = future = asyncio.get_running_loop().create_future()
        try:
            self.send(question(call))
            return await future
        finally:
            self._waiting.pop(call, None)

    # `asyncio.Protocol`.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in map(messages.for_worker, self._frames.feed(data)):
            if isinstance(message, messages.Drain):
                self._on_drain(message.at_once)
            elif isinstance(message, messages.AskFigures):
                if self._figures is not None:
                    self.send(messages.Counted(self._figures(), asked=True))
            elif isinstance(message, messages.ParentAnswer):
                future = self._waiting.get(message.call)
                if future is not None and not future.done():
                    future.set_result(message.value)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._on_drain(True)
