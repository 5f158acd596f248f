"""The endpoints that answer: one ASGI application for each form of request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import Chunk, Result
from outrider_gateway.dispatch import Dispatcher
from outrider_gateway.endpoint import Endpoint, HttpCall
from outrider_gateway.failures import refusal
from outrider_gateway.generation_request import GenerationRequest
from outrider_gateway.http import while_connected


@dataclass
class GenerationEndpoint(Endpoint):
    """An endpoint that generates. `translate` makes a request from a body, for at most so many answers, and so many
    token ids in a prompt."""

    _translate: Callable[[Mapping[str, Any], int, int], GenerationRequest]

    async def _serve(self, call: HttpCall) -> None:
        config, most = self._config, self._models.longest_prompt
        request, size = await self._read(call, lambda body: self._translate(body, config.max_choices, most))
        # The bytes stay counted, once for each call that carries them.
        call.held.grow_to(size * request.choices)
        call.line.request = request
        call.line.results = await self._answer(call, request)

    async def _answer(self, call: HttpCall, request: GenerationRequest) -> list[Result]:
        timeout = self._config.request_seconds or None
        dispatcher = Dispatcher(self._targets, self._metrics, request, call.caller, timeout, call.arrived)
        write = self._stream if request.stream else self._whole
        try:
            with self._admission.answers(call.holder, request.answers):
                return await write(call, dispatcher)
        except (OutriderError, ServiceUnreachable) as error:
            raise refusal(error, request.fields) from error

    async def _stream(self, call: HttpCall, dispatcher: Dispatcher) -> list[Result]:
        request, writer = dispatcher.request, call.writer
        running, last = request.answers, b""
        builder = await self._models.response_builder(request)
        async with while_connected(call.receive):

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

    async def _whole(self, call: HttpCall, dispatcher: Dispatcher) -> list[Result]:
        builder = await self._models.response_builder(dispatcher.request)
        async with while_connected(call.receive):
            results = await dispatcher.write_answers(builder.started, builder.keep)
        await call.writer.whole(builder.whole(results))
        return results
