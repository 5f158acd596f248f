"""The endpoints that answer: one ASGI application for chat and one for completions."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.log_limit import LogLimit
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import Chunk, Result
from outrider_gateway.admission import GatewayAdmission, HeldBytes, Holder
from outrider_gateway.caller import HttpCaller, caller_from
from outrider_gateway.config import GatewayConfig
from outrider_gateway.dispatch import Dispatcher
from outrider_gateway.failures import GatewayFailed, Refused, refusal
from outrider_gateway.generation_request import GenerationRequest
from outrider_gateway.http import ClientGone, ResponseWriter, json_object, read_body, while_connected
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.request_log import RequestLine
from outrider_gateway.served_models import ServedModels
from outrider_gateway.targets import Targets

logger = logging.getLogger(__name__)
# As nginx counts a client that left; it is never sent.
_CLIENT_GONE = 499


@dataclass
class GenerationEndpoint:
    """An endpoint that generates. `translate` makes a request from a body, for at most so many answers, and so many
    token ids in a prompt."""

    _name: str
    _translate: Callable[[Mapping[str, Any], int, int], GenerationRequest]
    _config: GatewayConfig
    _admission: GatewayAdmission
    _targets: Targets
    _models: ServedModels
    _metrics: GatewayMetrics
    _failures: LogLimit = field(default_factory=LogLimit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = perf_counter()
        line = RequestLine(self._name, uuid.uuid4().hex)
        writer = ResponseWriter(send, line.request_id)
        # What is counted for a request that the server's end cuts off.
        status = _CLIENT_GONE
        try:
            status = await self._serve(writer, scope, receive, arrived, line)
        except ClientGone:
            pass
        except Refused as refused:
            status = await writer.refuse(refused)
        except Exception:
            # The last resort: the answer must not quote the request.
            if (others := self._failures.due()) is not None:
                logger.exception("a request failed (and %d others)", others)
            status = await writer.refuse(GatewayFailed())
        finally:
            seconds = perf_counter() - arrived
            self._metrics.ended(self._name, status, seconds)
            if self._config.log_requests:
                line.write(status, seconds)

    async def _serve(
        self, writer: ResponseWriter, scope: Scope, receive: Receive, arrived: float, line: RequestLine
    ) -> int:
        caller = caller_from(scope["headers"])
        line.tenant = caller.tenant
        async with self._admission.admitted(caller, scope) as holder:
            with self._admission.body(holder) as held:
                request = await self._read(scope, receive, holder, held)
                line.request = request
                line.results = await self._answer(writer, receive, request, holder, caller, arrived)
        return 200

    async def _read(self, scope: Scope, receive: Receive, holder: Holder, held: HeldBytes) -> GenerationRequest:
        """The request that the body makes. Its bytes stay counted, once for each call that will carry them."""
        config, most = self._config, self._models.longest_prompt
        raw = await read_body(scope, receive, config.max_body_bytes, config.body_seconds, held.grow_to)

        def read() -> GenerationRequest:
            return self._translate(json_object(raw), config.max_choices, most)

        request = await self._admission.read(holder, len(raw), read)
        held.grow_to(len(raw) * request.choices)
        return request

    async def _answer(
        self,
        writer: ResponseWriter,
        receive: Receive,
        request: GenerationRequest,
        holder: Holder,
        caller: HttpCaller,
        arrived: float,
    ) -> list[Result]:
        timeout = self._config.request_seconds or None
        dispatcher = Dispatcher(self._targets, self._metrics, request, caller, timeout, arrived)
        write = self._stream if request.stream else self._whole
        try:
            with self._admission.answers(holder, request.answers):
                return await write(writer, receive, dispatcher)
        except (OutriderError, ServiceUnreachable) as error:
            raise refusal(error, request.fields) from error

    async def _stream(self, writer: ResponseWriter, receive: Receive, dispatcher: Dispatcher) -> list[Result]:
        request = dispatcher.request
        running, last = request.answers, b""
        builder = await self._models.response_builder(request)
        async with while_connected(receive):

            async def on_chunk(index: int, chunk: Chunk) -> None:
                events = builder.chunk(index, chunk)
                if events:
                    await writer.write(events)

            async def on_result(index: int, result: Result) -> None:
                nonlocal running, last
                running, last = running - 1, builder.last(index, result)
                # What ends the last answer goes with the end of the stream.
                if running:
                    await writer.write(last)

            results = await dispatcher.write_answers(builder.started, on_chunk, on_result)
        if request.include_usage:
            last += builder.usage_event(results)
        await writer.end(last, done=True)
        return results

    async def _whole(self, writer: ResponseWriter, receive: Receive, dispatcher: Dispatcher) -> list[Result]:
        builder = await self._models.response_builder(dispatcher.request)
        async with while_connected(receive):
            results = await dispatcher.write_answers(builder.started, builder.keep)
        await writer.whole(builder.whole(results))
        return results
