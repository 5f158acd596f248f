"""ASGI by hand where it must be exact: reading a body within limits, writing events, noticing that a client left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from outrider_gateway.failures import Refused, TooLarge
from outrider_gateway.http_versions import BodyAtOnce

_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of nginx's kind would collect events.
    (b"x-accel-buffering", b"no"),
)


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


async def read_body(
    scope: Scope, receive: Receive, limit: int, seconds: float, grow_to: Callable[[int], None]
) -> bytearray:
    """The body of a request of JSON, of which nothing is looked at. `grow_to` is called with the bytes so far, and may
    refuse them. Raises `Refused`, or `ClientGone`."""
    headers = dict(scope["headers"])
    # Browsers ask before they send JSON to another origin, and send plain text without asking.
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise Refused(415, "the body must be application/json")
    if (coding := headers.get(b"content-encoding", b"identity").strip().lower()) != b"identity":
        raise Refused(
            415, f"the body must not be compressed, and its content-encoding is {coding[:40].decode('latin-1')}"
        )
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit:
        raise TooLarge(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                size = len(body) + len(message.get("body", b""))
                if size > limit:
                    raise TooLarge(limit)
                grow_to(size)
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    return body
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {seconds:g} s") from None


def json_object(raw: bytes | bytearray) -> Mapping[str, Any]:
    """The JSON object that a body is. Raises `Refused`."""
    # orjson refuses what protobuf could not carry on: halves of surrogate pairs, NaN, any depth.
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not valid JSON: {error.msg}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object", code="invalid_json")
    return body


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run the block, and cancel it when the client goes away: `ClientGone` is raised then. For after the body."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # Other code may have cancelled as well, such as a server that is about to stop.
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


class ResponseWriter:
    """Writes the answer to a request, whole or as server-sent events. It begins with the first of these, so that until
    then it can still be an error."""

    def __init__(self, send: Send, request_id: str, at_once: BodyAtOnce | None = None) -> None:
        """`at_once` is how the server writes outside of a task, where it can."""
        # The body of an error, and the event of one behind the first event.
        self.error_body: Callable[[Refused], Mapping[str, Any]] = lambda refused: refused.body()
        self.failure: Callable[[Refused], bytes] = lambda refused: event_bytes(refused.body())
        self._send = send
        self._request_id = request_id
        self._at_once = at_once
        # Choices are written by tasks of their own, and none may come before the answer's head.
        self._turn = asyncio.Lock()
        self._begun = False
        # Whether the head was taken, and every task may write.
        self._open = False

    async def write(self, events: bytes) -> None:
        """Write whole events, see `event_bytes`. Returns when the client's connection takes more."""
        if not self._open:
            await self._begin()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    def ready(self) -> bool:
        """Whether `write_now` may be called."""
        return self._open and self._at_once is not None and self._at_once.ready()

    def write_now(self, events: bytes) -> None:
        """Write whole events without waiting, and without a task; none for no bytes."""
        if events and self._at_once is not None:
            self._at_once.write(events)

    async def end(self, events: bytes) -> None:
        """The last events, and the end of the stream."""
        if not self._open:
            await self._begin()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def whole(self, body: Mapping[str, Any]) -> None:
        """The answer that is no stream."""
        await send_json(self._send, 200, body, self._request_id)

    async def refuse(self, refused: Refused) -> int:
        """Report that it failed: as the answer, or as the last event of one that has begun. Returns the status."""
        if self._begun:
            await self.end(self.failure(refused))
        else:
            body = self.error_body(refused)
            await send_json(self._send, refused.status, body, self._request_id, refused.headers())
        return refused.status

    async def _begin(self) -> None:
        async with self._turn:
            if not self._begun:
                self._begun = True
                headers = [*_EVENTS, (b"x-request-id", self._request_id.encode())]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self._open = True


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """A server-sent event with this JSON."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


# Stands for an event's text while its frame is made.
TEXT = "text"


def framed_text(event: bytes) -> tuple[bytes, bytes]:
    """What stands before and behind the text in an event that was made with `TEXT` for it. What follows the text must
    not hold the same."""
    before, _, after = event.rpartition(orjson.dumps(TEXT))
    return before, after


def named_event(name: str, event: Mapping[str, Any]) -> bytes:
    """A server-sent event of a type, with this JSON."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


async def send_json(
    send: Send, status: int, body: Mapping[str, Any], request_id: str, headers: Mapping[str, str] | None = None
) -> None:
    """A whole answer."""
    data = orjson.dumps(body)
    pairs = {"content-length": str(len(data)), "x-request-id": request_id, **(headers or {})}
    raw = [(b"content-type", b"application/json"), *((name.encode(), value.encode()) for name, value in pairs.items())]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})
