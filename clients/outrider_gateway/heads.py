"""Bounds on what comes before a request's body, for which uvicorn and httptools have none."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Of a request's first line and headers. Chosen: four times what common servers take, for long tokens and traces.
HEAD_BYTES = 64 * 1024
# Until they are complete, from the connection's beginning or their own first byte. Chosen: as long as bodies have.
HEAD_SECONDS = 30.0


class BoundedHeads(HttpToolsProtocol):
    """A connection that is closed where a head grows past `HEAD_BYTES`, or takes longer than `HEAD_SECONDS`.

    Without the one a caller fills the memory, without the other it keeps a connection's place by saying nothing.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._head_bytes = 0
        self._giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        # What comes next is another request's.
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._giving_up = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
