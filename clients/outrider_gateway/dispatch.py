"""Getting a request's answers from targets: all at once, each from another target where one fails before it began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from opentelemetry.context import attach, detach

from outrider.errors import DeadlineExceeded
from outrider.runtime import end_tasks
from outrider_client.failures import AWAY
from outrider_client.generation import Generation
from outrider_client.results import Chunk, Result, Started
from outrider_gateway.caller import HttpCaller
from outrider_gateway.generation_request import GenerationRequest
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.targets import Target, Targets

# What is done with a chunk of the answer of an index. Reading goes on when it returns, so a slow reader is waited for.
OnChunk = Callable[[int, Chunk], Awaitable[None]]
# Whether a chunk may be taken outside of a task, and what takes the chunk of an index so.
AtOnce = tuple[Callable[[], bool], Callable[[int, Chunk], None]]
OnResult = Callable[[int, Result], Awaitable[None]]
# Receives what a target accepted, before anything of the answer of an index.
OnStarted = Callable[[int, Started], None]


@dataclass(slots=True)
class Dispatcher:
    """The answers to one request. `on_chunk` and `on_result` are awaited as they come, in order for each index.
    `arrived` is when the request came, on `perf_counter`; `request_seconds` are those from then on that it may take,
    however many targets are tried, and 0 for any."""

    _targets: Targets
    _metrics: GatewayMetrics
    request: GenerationRequest
    _caller: HttpCaller
    _request_seconds: float
    _arrived: float
    _first_token_seen: bool = False
    _at_once: AtOnce | None = None

    async def write_answers(
        self,
        on_started: OnStarted,
        on_chunk: OnChunk,
        on_result: OnResult | None = None,
        at_once: AtOnce | None = None,
    ) -> list[Result]:
        """Write all answers. What `at_once` takes, `on_chunk` does not get. The first failure ends them all, as does
        cancelling; raises what calls raise."""
        self._at_once = at_once
        if self.request.answers == 1:
            return [await self._answer(0, on_started, on_chunk, on_result)]
        answers = (self._answer(index, on_started, on_chunk, on_result) for index in range(self.request.answers))
        tasks = list(map(asyncio.create_task, answers))
        try:
            return await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)

    async def _answer(self, index: int, on_started: OnStarted, on_chunk: OnChunk, on_result: OnResult | None) -> Result:
        tried, key = list[Target](), self._caller.key(self.request.conversation(index))
        while True:
            target = self._targets.pick(key, self.request.model, tried)
            begun = False
            with target.counting():
                generation = self._begin(target, index)
                try:
                    async for chunk in generation:
                        if not begun and generation.started is not None:
                            on_started(index, generation.started)
                            if self._at_once is not None:
                                ready, take = self._at_once
                                generation.hand_over(ready, partial(take, index))
                        begun = True
                        if not self._first_token_seen:
                            self._first_token_seen = True
                            self._metrics.first_token.observe(perf_counter() - self._arrived)
                        await on_chunk(index, chunk)
                    result = await generation.result()
                    self._metrics.tokens.add(result.completion_tokens)
                    if on_result is not None:
                        await on_result(index, result)
                    return result
                except AWAY as error:
                    target.leave_out(error)
                    tried.append(target)
                    if begun or len(tried) >= len(self._targets.all):
                        raise
                finally:
                    generation.cancel()
            self._metrics.retries.add()

    def _begin(self, target: Target, index: int) -> Generation:
        """The call, in the caller's name and in its trace."""
        request, prompt = self.request, self.request.prompt(index)
        client = target.client.acting_for(token=self._caller.token, tenant=self._caller.tenant)
        previous = attach(self._caller.context)
        try:
            return client.generate(
                messages=prompt.messages,
                text=prompt.text,
                token_ids=prompt.token_ids,
                sampling=request.seeded(index),
                speculation=request.speculation,
                prediction=request.prediction,
                chat_options=request.chat_options,
                show_special_tokens=request.show_special_tokens,
                special_tokens=request.special_tokens,
                answer_parts=request.chat,
                model=request.model,
                timeout=seconds_left(self._arrived, self._request_seconds),
            )
        finally:
            detach(previous)


def seconds_left(arrived: float, request_seconds: float) -> float | None:
    """What is left of the seconds that a request may take since it has `arrived`; None where it may take any, which is
    0. Raises `DeadlineExceeded` where nothing is left."""
    if not request_seconds:
        return None
    left = arrived + request_seconds - perf_counter()
    if left <= 0:
        raise DeadlineExceeded(f"the request took longer than {request_seconds:g} s")
    return left
