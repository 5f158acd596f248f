"""Load from several processes, each with many streams of one target service."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from serving_figures import Answer, Share
from workload import Prompt


class _Order(NamedTuple):
    """Requests for one process: (prompt, tokens) each, so many in flight; drafts wanted or not, and the tenant."""

    requests: list[tuple[Prompt, int]]
    slots: int
    speculate: bool
    tenant: str


class Clients:
    """Sends requests and notes what comes back, and when."""

    def __init__(self, address: str, processes: int) -> None:
        self._address = address
        self._count = processes
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Clients:
        for _ in range(self._count):
            own, its = multiprocessing.Pipe()
            worker = multiprocessing.Process(target=_serve, args=(self._address, its), daemon=True)
            worker.start()
            self._workers.append((worker, own))
        for _, pipe in self._workers:
            pipe.recv()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker, pipe in self._workers:
            pipe.send(None)
            worker.join(10)

    def wave(
        self, prompts: Sequence[Prompt], max_tokens: int, *, speculate: bool, tenant: str
    ) -> tuple[float, list[Answer]]:
        """All at once. Seconds until the last answer has ended, and the answers."""
        begin = time.perf_counter()
        shares = self._run([(ids, max_tokens) for ids in prompts], len(prompts), speculate, tenant)
        return time.perf_counter() - begin, [answer for share in shares for answer in share.answers]

    def closed(
        self, requests: Sequence[tuple[Prompt, int]], concurrency: int, *, speculate: bool, tenant: str
    ) -> list[Share]:
        """`concurrency` in flight: where an answer ends, the same process begins its next request."""
        return self._run(requests, concurrency, speculate, tenant)

    def _run(self, requests: Sequence[tuple[Prompt, int]], slots: int, speculate: bool, tenant: str) -> list[Share]:
        used = min(len(self._workers), slots)
        orders = [
            _Order(list(requests[index::used]), slots // used + (index < slots % used), speculate, tenant)
            for index in range(used)
        ]
        for (_, pipe), order in zip(self._workers, orders, strict=False):
            pipe.send(order)
        return [Share(order.slots, pipe.recv()) for (_, pipe), order in zip(self._workers, orders, strict=False)]


def _serve(address: str, pipe: Connection) -> None:
    from outrider.runtime import prepare_grpc

    prepare_grpc()
    asyncio.run(_answer_orders(address, pipe))


async def _answer_orders(address: str, pipe: Connection) -> None:
    import grpc

    from outrider.v1 import target_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        pipe.send("ready")
        while True:
            order: _Order | None = await asyncio.to_thread(pipe.recv)
            if order is None:
                return
            waiting, answers = iter(order.requests), list[Answer]()
            slots = (_slot(stub, waiting, order, answers) for _ in range(order.slots))
            await asyncio.gather(*slots)
            pipe.send(answers)


async def _slot(stub: Any, waiting: Any, order: _Order, answers: list[Answer]) -> None:
    """One request after the other, of those that wait."""
    for ids, max_tokens in waiting:
        answers.append(await _ask(stub, ids, max_tokens, order))


async def _ask(stub: Any, ids: Prompt, max_tokens: int, order: _Order) -> Answer:
    from outrider.v1 import target_pb2, tree_pb2

    request = target_pb2.GenerateRequest(
        tokens=target_pb2.TokenInput(token_ids=ids),
        sampling=tree_pb2.SamplingParameters(max_tokens=max_tokens, ignore_eos=True),
        speculation=target_pb2.SpeculationOptions(enabled=order.speculate),
    )
    answer = Answer(time.monotonic(), [], [])
    async for response in stub.Generate(request, metadata=(("outrider-tenant", order.tenant),)):
        if response.chunk.token_ids:
            answer.times.append(time.monotonic())
            answer.counts.append(len(response.chunk.token_ids))
    return answer
