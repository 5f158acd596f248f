"""The endpoints that answer: one ASGI application for each form of request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from outrider.errors import OutriderError
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import Chunk, Result
from outrider_gateway.answer_builder import BuildAnswer, Built, Request
from outrider_gateway.dispatch import Dispatcher
from outrider_gateway.endpoint import Endpoint, HttpCall
from outrider_gateway.failures import refusal
from outrider_gateway.http import while_connected


@dataclass
class GenerationEndpoint(Endpoint, Generic[Request, Built]):
    """An endpoint that generates. `translate` makes a request from a body, for at most so many answers, and so many
    token ids in a prompt, and `build` makes what writes its answers."""

    _translate: Callable[[Mapping[str, Any], int, int], Request]
    _build: BuildAnswer[Request, Built]

    async def _serve(self, call: HttpCall) -> None:
        config, most = self._config, self._models.longest_prompt
        request, size = await self._read(call, lambda body: self._translate(body, config.max_choices, most))
        request = await self._prepared(call, request)
        # The bytes stay counted, once for each call that carries them.
        call.held.grow_to(size * request.choices)
        call.line.request = request
        builder = self._models.response_builder(request, self._build)
        call.writer.failure = builder.failure
        call.line.results = await self._answer(call, request, builder)

    async def _prepared(self, _call: HttpCall, request: Request) -> Request:
        """The request with what is known of its caller."""
        return request

    async def _answered(self, _call: HttpCall, _request: Request, _builder: Built) -> None:
        """Note a complete answer, before its end is sent."""

    async def _answer(self, call: HttpCall, request: Request, builder: Built) -> list[Result]:
        seconds = self._config.request_seconds
        dispatcher = Dispatcher(self._targets, self._metrics, request, call.caller, seconds, call.arrived)
        write = self._stream if request.stream else self._whole
        try:
            with self._admission.answers(call.holder, request.answers):
                return await write(call, request, builder, dispatcher)
        except (OutriderError, ServiceUnreachable) as error:
            raise refusal(error, request.fields) from error

    async def _stream(self, call: HttpCall, request: Request, builder: Built, dispatcher: Dispatcher) -> list[Result]:
        writer, running, last = call.writer, request.answers, b""
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

            at_once = writer.ready, lambda index, chunk: writer.write_now(builder.chunk(index, chunk))
            results = await dispatcher.write_answers(builder.started, on_chunk, on_result, at_once)
        if request.include_usage:
            last += builder.usage_event(results)
        await self._answered(call, request, builder)
        await writer.end(last + builder.end)
        return results

    async def _whole(self, call: HttpCall, request: Request, builder: Built, dispatcher: Dispatcher) -> list[Result]:
        async with while_connected(call.receive):
            results = await dispatcher.write_answers(builder.started, builder.keep)
        body = builder.whole(results)
        await self._answered(call, request, builder)
        await call.writer.whole(body)
        return results
