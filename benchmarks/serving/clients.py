"""Load on a target service from several client processes, each with many streams."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks.serving.figures import Share, TimedAnswer
from benchmarks.shared.workload import Prompt

_JOIN_SECONDS = 10.0


class ServiceLost(RuntimeError):
    """A request failed; the message has its status."""


class ServingRequest(NamedTuple):
    """One request. `speculate` is None, or overrides the target's choice to use drafts; `verification` is empty, or the
    value of a `VerificationMode`."""

    prompt: Prompt
    tokens: int
    tenant: str
    temperature: float = 0.0
    seed: int = 0
    speculate: bool | None = None
    verification: str = ""


class Reply(NamedTuple):
    """An answer, the slot of its request, the verified steps that the target counted for it, and how many of its tokens
    were drafts that the model would not have drawn there."""

    answer: TimedAnswer
    slot: int
    steps: int
    lossy_tokens: int = 0


class _Queue(NamedTuple):
    """Requests in order, and the slots that take them, each with one in flight."""

    requests: list[ServingRequest]
    slots: range


class _Order(NamedTuple):
    """The load of one process: no request begins after `until` (monotonic), or takes more than `request_seconds`."""

    queues: list[_Queue]
    until: float
    request_seconds: float | None


class Clients:
    """Sends requests, and records replies with their times. Leaving the block ends the processes."""

    def __init__(self, address: str, processes: int, request_seconds: float | None = None) -> None:
        """A request that takes longer than `request_seconds`, if given, has failed."""
        self._address = address
        self._count = processes
        self._request_seconds = request_seconds
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Clients:
        # A forked process would inherit the threads' locks of gRPC and torch, without the threads.
        context = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            near, far = context.Pipe()
            worker = context.Process(target=_run_worker, args=(self._address, far), daemon=True)
            worker.start()
            far.close()
            self._workers.append((worker, near))
        for _, pipe in self._workers:
            pipe.recv()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            worker.join(_JOIN_SECONDS)
            if worker.is_alive():
                worker.kill()

    def wave(
        self, prompts: Sequence[Prompt], max_tokens: int, *, speculate: bool, tenant: str
    ) -> tuple[float, list[TimedAnswer]]:
        """Send all at once. Returns seconds until the last answer has ended, and the answers. Raises `ServiceLost`."""
        begin = time.perf_counter()
        shares = self.closed([(ids, max_tokens) for ids in prompts], len(prompts), speculate=speculate, tenant=tenant)
        return time.perf_counter() - begin, [answer for share in shares for answer in share.answers]

    def closed(
        self, requests: Sequence[tuple[Prompt, int]], concurrency: int, *, speculate: bool, tenant: str
    ) -> list[Share]:
        """Keep `concurrency` requests in flight: when an answer ends, the same process begins its next request.

        Raises `ServiceLost` when one fails.
        """
        sent = [ServingRequest(prompt, tokens, tenant, speculate=speculate) for prompt, tokens in requests]
        used = min(len(self._workers), concurrency)
        queues = [_Queue(sent[number::used], range(number, concurrency, used)) for number in range(used)]
        replies = self._exchange([[queue] for queue in queues])
        return [
            Share(len(queue.slots), [reply.answer for reply in own]) for queue, own in zip(queues, replies, strict=True)
        ]

    def streams(
        self, requests: Sequence[ServingRequest], concurrency: int, seconds: float | None = None
    ) -> list[Reply]:
        """Keep `concurrency` requests in flight: slot i % concurrency sends request i after its previous ones.

        No request begins after `seconds`, if given. Raises `ServiceLost` when one fails.
        """
        until = time.monotonic() + seconds if seconds is not None else float("inf")
        used = min(len(self._workers), concurrency)
        queues = [_Queue(list(requests[slot::concurrency]), range(slot, slot + 1)) for slot in range(concurrency)]
        replies = self._exchange([queues[number::used] for number in range(used)], until)
        return [reply for own in replies for reply in own]

    def _exchange(self, queues: Sequence[list[_Queue]], until: float = float("inf")) -> list[list[Reply]]:
        """The replies to each process's queues."""
        used = self._workers[: len(queues)]
        for (_, pipe), own in zip(used, queues, strict=True):
            pipe.send(_Order(own, until, self._request_seconds))
        try:
            received = [pipe.recv() for _, pipe in used]
        except EOFError:
            raise ServiceLost("a client process has ended") from None
        failures = [one for one in received if isinstance(one, str)]
        if failures:
            raise ServiceLost(failures[0])
        return received


def _run_worker(address: str, pipe: Connection) -> None:
    from outrider.runtime import prepare_grpc

    prepare_grpc()
    asyncio.run(_run_orders(address, pipe))


async def _run_orders(address: str, pipe: Connection) -> None:
    import grpc

    from outrider.v1 import target_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        pipe.send("ready")
        while True:
            try:
                order: _Order | None = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            if order is None:
                return
            replies: list[Reply] = []
            queues = [(_before(queue.requests, order.until), queue.slots) for queue in order.queues]
            slots = (_run_slot(stub, slot, requests, order, replies) for requests, own in queues for slot in own)
            try:
                await asyncio.gather(*slots)
            except grpc.RpcError as error:
                pipe.send(f"{error.code().name}: {error.details()}")
                return
            pipe.send(replies)


def _before(requests: Sequence[ServingRequest], until: float) -> Iterator[ServingRequest]:
    for request in requests:
        if time.monotonic() >= until:
            return
        yield request


async def _run_slot(
    stub: Any, slot: int, requests: Iterator[ServingRequest], order: _Order, replies: list[Reply]
) -> None:
    """Send the queue's next request whenever the one before has ended. Slots share the iterator."""
    for request in requests:
        replies.append(await _reply(stub, slot, request, order.request_seconds))


async def _reply(stub: Any, slot: int, request: ServingRequest, seconds: float | None) -> Reply:
    from outrider.v1 import target_pb2, tree_pb2

    sampling = tree_pb2.SamplingParameters(max_tokens=request.tokens, ignore_eos=True)
    if request.temperature:
        sampling.temperature = request.temperature
        sampling.seed = request.seed
    message = target_pb2.GenerateRequest(tokens=target_pb2.TokenInput(token_ids=request.prompt), sampling=sampling)
    if request.speculate is not None:
        message.speculation.enabled = request.speculate
    if request.verification:
        mode = f"VERIFICATION_MODE_{request.verification.upper()}"
        message.speculation.mode = tree_pb2.VerificationMode.Value(mode)
    answer, steps, lossy_tokens = TimedAnswer(time.monotonic(), [], []), 0, 0
    metadata = (("outrider-tenant", request.tenant),)
    async for response in stub.Generate(message, metadata=metadata, timeout=seconds):
        if response.chunk.token_ids:
            answer.times.append(time.monotonic())
            answer.counts.append(len(response.chunk.token_ids))
        if response.HasField("finished"):
            steps = response.finished.speculation.steps
            lossy_tokens = response.finished.usage.lossy_tokens
    return Reply(answer, slot, steps, lossy_tokens)
