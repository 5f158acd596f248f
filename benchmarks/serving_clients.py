"""Load from several processes, each with many streams of one target service."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

# Prompts of one wave and their number of tokens, whether drafts are wanted, and the tenant.
_Order = tuple[list[tuple[int, ...]], int, bool, str]


class Clients:
    """Sends waves of requests and counts what comes back."""

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
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, *, speculate: bool, tenant: str
    ) -> tuple[float, int]:
        """Seconds until the last answer has ended, and tokens said."""
        count = len(self._workers)
        shares = [list(prompts[index::count]) for index in range(count)]
        begin = time.perf_counter()
        for (_, pipe), share in zip(self._workers, shares, strict=True):
            if share:
                pipe.send((share, max_tokens, speculate, tenant))
        answers = [pipe.recv() for (_, pipe), share in zip(self._workers, shares, strict=True) if share]
        return time.perf_counter() - begin, sum(answers)


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
            prompts, *how = order
            pipe.send(sum(await asyncio.gather(*(_ask(stub, ids, *how) for ids in prompts))))


async def _ask(stub: Any, ids: tuple[int, ...], max_tokens: int, speculate: bool, tenant: str) -> int:
    """One request; the tokens of its answer."""
    from outrider.v1 import target_pb2, tree_pb2

    request = target_pb2.GenerateRequest(
        tokens=target_pb2.TokenInput(token_ids=ids),
        sampling=tree_pb2.SamplingParameters(max_tokens=max_tokens, ignore_eos=True),
        speculation=target_pb2.SpeculationOptions(enabled=speculate),
    )
    tokens = 0
    async for response in stub.Generate(request, metadata=(("outrider-tenant", tenant),)):
        tokens += len(response.chunk.token_ids)
    return tokens
