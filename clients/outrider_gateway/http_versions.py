"""Offers of another protocol than HTTP/1.1 are ignored, and HTTP/1.0 is answered in its own way.

`uvicorn` refuses the first, which RFC 9110 (7.8) lets a server ignore and Java's HttpClient sends with every request,
and sends chunks to the second, which has none.
"""

from __future__ import annotations

from typing import Any

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from outrider_gateway.heads import BoundedHeads

# Headers that offer another protocol.
_OFFERS = (b"upgrade", b"http2-settings")


# The ASGI extension by which an application gets a `BodyAtOnce`.
AT_ONCE, BODY = "outrider.body_at_once", "body"


class BodyAtOnce:
    """Writes pieces of an answer's body outside of the application's task, once its head was sent. ASGI's `send` is
    awaited by a task, which takes longer to wake than the piece to write."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether the connection takes a piece now."""
        cycle = self._cycle
        return cycle.response_started and not cycle.response_complete and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        """Write a piece, not empty. To a client that has left nothing is written, as by `send`."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if cycle.chunked_encoding else body)


class HttpProtocol(BoundedHeads):
    """A connection that speaks HTTP/1.0 and HTTP/1.1, whatever else the client offers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # A head that offers another protocol, after which the parser takes what follows for that protocol's.
        self._offered = False

    def feed(self, data: bytes) -> None:
        try:
            super().feed(data)
        except httptools.HttpParserUpgrade as offer:
            self._offered = False
            head, self.parser = self._head_without_offer(), httptools.HttpRequestParser(self)
            # As of every parser here: what follows a request that closes is no error.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.feed(head + data[offer.args[0] :])

    def on_headers_complete(self) -> None:
        # A tunnel is no offer, but what is asked for. There is none here.
        self._offered = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._offered:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offered:
            super().on_message_complete()

    def _head_without_offer(self) -> bytes:
        """The head that was read last, for a parser that has not seen the offer."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                value = b", ".join(option for option in options if option.lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(name + b": " + value)
        return b"\r\n".join((*lines, b"", b""))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        cycle.scope["extensions"] = {AT_ONCE: {BODY: BodyAtOnce(cycle)}}
        if cycle.scope["http_version"] == "1.0":
            # Which knows no answers of that kind (RFC 9110, 10.1.1).
            cycle.waiting_for_100_continue = False
            app = _ended_by_the_close(cycle, app)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]


def _ended_by_the_close(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """`app`, an answer of which without a length has no chunks: it ends where the connection is closed."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        unbounded = False

        async def send_unchunked(message: Any) -> None:
            nonlocal unbounded
            if message["type"] == "http.response.start":
                unbounded = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unbounded:
                    cycle.chunked_encoding = False
            elif unbounded:
                # Of each piece, which is then as long as its head announced.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return application
