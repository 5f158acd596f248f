"""The endpoints that answer: one ASGI application for chat and one for completions."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import Chunk, Result
from outrider_gateway.answering import Answering
from outrider_gateway.asked import Asked
from outrider_gateway.caller import caller_from
from outrider_gateway.config import GatewayConfig
from outrider_gateway.failures import Refused, refusal
from outrider_gateway.http import ClientGone, EventWriter, event_bytes, read_json, send_json, while_connected
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.names import Names
from outrider_gateway.targets import Targets

logger = logging.getLogger(__name__)

# As nginx counts a client that left; it is never sent.
_CLIENT_GONE = 499


class Generating:
    """An endpoint that generates. `translate` makes what is asked from a body, for at most so many answers."""

    def __init__(
        self,
        name: str,
        translate: Callable[[Mapping[str, Any], int], Asked],
        config: GatewayConfig,
        targets: Targets,
        names: Names,
        metrics: GatewayMetrics,
    ) -> None:
        self._name = name
        self._translate = translate
        self._config = config
        self._targets = targets
        self._names = names
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = perf_counter()
        request = _Request(send, uuid.uuid4().hex)
        # What is counted for a request that the server's end cuts off.
        status = _CLIENT_GONE
        try:
            status = await self._serve(request, scope, receive, arrived)
        except ClientGone:
            pass
        except Refused as refused:
            status = await request.refuse(refused)
        except Exception:
            # The last resort: what is said of it must not quote the request.
            logger.exception("a request failed")
            status = await request.refuse(Refused(500, "the gateway failed", kind="server_error"))
        finally:
            self._metrics.ended(self._name, status, perf_counter() - arrived)

    async def _serve(self, request: _Request, scope: Scope, receive: Receive, arrived: float) -> int:
        caller = caller_from(scope["headers"])
        config = self._config
        body = await read_json(scope, receive, config.max_body_bytes, config.body_seconds)
        asked = self._translate(body, config.max_choices)
        answering = Answering(self._targets, self._metrics, asked, caller, config.request_seconds or None, arrived)
        write = self._stream if asked.stream else self._whole
        try:
            await write(request, receive, asked, answering)
        except (OutriderError, ServiceUnreachable) as error:
            raise refusal(error, asked.fields) from error
        return 200

    async def _stream(self, request: _Request, receive: Receive, asked: Asked, answering: Answering) -> None:
        writer = request.writer = EventWriter(request.send, request.id)
        results: dict[int, Result] = {}
        last = b""

        async def on_chunk(index: int, chunk: Chunk) -> None:
            events = answers.chunk(index, chunk)
            if events:
                await writer.write(events)

        async def on_result(index: int, result: Result) -> None:
            nonlocal last
            results[index] = result
            last = answers.last(index, result)
            # What ends the last answer goes with the end of the stream.
            if len(results) < asked.answers:
                await writer.write(last)

        with self._targets.admitting(asked.answers, self._config.max_running):
            answers = await self._names.answers(asked)
            async with while_connected(receive):
                await answering.run(on_chunk, on_result)
        if asked.include_usage:
            last += answers.usage_event([results[index] for index in range(asked.answers)])
        await writer.end(last, done=True)

    async def _whole(self, request: _Request, receive: Receive, asked: Asked, answering: Answering) -> None:
        results: dict[int, Result] = {}

        async def on_chunk(index: int, chunk: Chunk) -> None:
            answers.keep(index, chunk)

        async def on_result(index: int, result: Result) -> None:
            results[index] = result

        with self._targets.admitting(asked.answers, self._config.max_running):
            answers = await self._names.answers(asked)
            async with while_connected(receive):
                await answering.run(on_chunk, on_result)
        body = answers.whole([results[index] for index in range(asked.answers)])
        await send_json(request.send, 200, body, request.id)


class _Request:
    """One request's way back to its client."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.send = send
        self.id = request_id
        self.writer: EventWriter | None = None

    async def refuse(self, refused: Refused) -> int:
        """Say that it failed: as the answer, or as the last event of one that has begun. Returns the status."""
        if self.writer is not None and self.writer.begun:
            await self.writer.end(event_bytes(refused.body()), done=False)
        else:
            await send_json(self.send, refused.status, refused.body(), self.id, refused.headers())
        return refused.status
