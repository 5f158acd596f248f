"""Bounds on what comes around a request's body, for which uvicorn and httptools have none."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.log_limit import LogLimit

logger = logging.getLogger(__name__)
# Of all connections: whoever reaches the port can send what is no HTTP.
_malformed = LogLimit()
# Of a request's first line and headers, and of what stands between or behind a body's chunks: extensions and trailers.
# Chosen: four times what common servers take, for long tokens and traces.
HEAD_BYTES = 64 * 1024
# Until a head is complete, from the connection's beginning or its own first byte; and for what is left of a body when
# its answer is complete. Chosen: as long as bodies have.
HEAD_SECONDS = 30.0


class BoundedHeads(HttpToolsProtocol):
    """A connection that is closed where a head or trailers grow past `HEAD_BYTES`, where a head takes longer than
    `HEAD_SECONDS`, and where a body goes on for longer than these when its answer is complete. Without the bound on
    bytes a caller fills the memory, without those on time it keeps a connection's place by sending nothing, or nothing
    that anybody reads. Trailers are read over, never taken for headers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        # Since the connection began, the last body's byte, or the last request's end.
        self._head_bytes = 0
        self._head_timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def feed(self, data: bytes) -> None:
        """Parse what has come, and refuse what is no HTTP."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if (others := _malformed.due()) is not None:
                peer = self.client[0] if self.client else "a socket"
                logger.warning("refused what is no HTTP from %s (and %d like it)", peer, others)
            if not self.transport.is_closing():
                self.send_400_response("Invalid HTTP request received.")

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self.feed(data)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            part = "head has" if self._in_head else "trailers have"
            self.send_400_response(f"The request's {part} more than {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._wait_for_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # The parser hands trailers over likewise. The application may not have looked at its headers yet.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        # What comes next is another request's.
        self._in_head, self._head_bytes = True, 0
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._head_timeout = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timeout is not None:
            self._head_timeout.cancel()
            self._head_timeout = None
