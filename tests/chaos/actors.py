"""Callers in processes of their own: one whose requests are timed, and those who mean harm.

`python -m chaos.actors ROLE TARGET DRAFT METRICS` reads "go" and "rest" from standard input. While it may go, it calls;
told to rest, it drops all it has and writes one line of JSON. The one that is timed waits for the answer it is owed:
without it the longest of all times would be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, tree_pb2

# Tokens of the tenants: whom the attack is on, who attacks, and the target at its draft.
TOKENS = {"good": "good-token-of-length", "evil": "evil-token-of-length", "target": "target-token-of-length"}
PROMPT, TOKENS_ASKED = [10, 20, 30], 16
_GENERATE = "/outrider.v1.TargetService/Generate"


@dataclass(frozen=True)
class Addresses:
    target: str
    draft: str
    metrics: str


def bearer(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[tenant]}"),)


def _channel(address: str) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    return grpc.aio.insecure_channel(address, options=options)


async def victim(at: Addresses, resting: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
    """One short request after the other until it is `resting`; how long each took, and what each said."""
    request = target_pb2.GenerateRequest(
        tokens=target_pb2.TokenInput(token_ids=PROMPT),
        sampling=tree_pb2.SamplingParameters(max_tokens=TOKENS_ASKED, ignore_eos=True),
    )
    async with _channel(at.target) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        while not resting.is_set():
            begun, said = time.perf_counter(), []
            try:
                async for response in stub.Generate(request, metadata=bearer("good"), timeout=60):
                    said += response.chunk.token_ids
                error = ""
            except grpc.aio.AioRpcError as refused:
                error = f"{refused.code().name}: {refused.details()}"
            yield {"seconds": time.perf_counter() - begun, "said": said, "error": error}


async def _many(count: int, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """So many beside each other, each again and again, whatever becomes of it."""

    async def again() -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError, OSError):
                await make()
            await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(again())


async def headers_alone(at: Addresses) -> None:
    """Strangers on many connections who send headers and never a message."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(at.target)) for _ in range(8)]

        async def one() -> None:
            channel = channels[int(time.monotonic_ns()) % len(channels)]
            await channel.stream_unary(_GENERATE)()

        await _many(128, one)


async def known_headers_alone(at: Addresses) -> None:
    """The same with a valid token: each call may wait for its request."""
    async with _channel(at.target) as channel:
        await _many(400, lambda: _awaited(channel.stream_unary(_GENERATE)(metadata=bearer("evil"))))


async def _awaited(call: Any) -> None:
    await call


async def impossible_opens(at: Addresses) -> None:
    """Sequences of a vocabulary that no array takes, at the draft."""
    open_frame = draft_pb2.ProposeRequest(
        open=draft_pb2.OpenSequence(
            sequence_id=1, vocabulary_size=2**32 - 1, token_ids=[2**32 - 2], prompt_length=1, tenant="evil"
        )
    )
    async with _channel(at.draft) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)

        async def one() -> None:
            call = stub.Propose(metadata=bearer("evil"))
            for _ in range(64):
                await call.write(open_frame)
                await call.read()
            call.cancel()

        await _many(4, one)


async def idle_sequences(at: Addresses) -> None:
    """As many sequences to verify as a tenant gets, each with pages and no tree."""
    open_frame = target_pb2.VerifyRequest(
        open=target_pb2.OpenVerification(
            token_ids=list(range(3, 35)), sampling=tree_pb2.SamplingParameters(max_tokens=64, ignore_eos=True)
        )
    )
    async with _channel(at.target) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        for _ in range(4):
            call = stub.Verify(metadata=bearer("evil"))
            for _ in range(256):
                await call.write(open_frame)
        await asyncio.sleep(3600)


async def long_requests(at: Addresses, count: int = 330) -> None:
    """Requests for all the tokens there are."""
    request = target_pb2.GenerateRequest(
        tokens=target_pb2.TokenInput(token_ids=list(range(3, 60))),
        sampling=tree_pb2.SamplingParameters(max_tokens=400, ignore_eos=True),
    )
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(at.target)) for _ in range(4)]

        async def one() -> None:
            stub: Any = target_pb2_grpc.TargetServiceStub(channels[int(time.monotonic_ns()) % 4])
            async for _ in stub.Generate(request, metadata=bearer("evil")):
                pass

        await _many(count, one)


async def health_watches(at: Addresses) -> None:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(at.target)) for _ in range(8)]

        async def one() -> None:
            stub = health_pb2_grpc.HealthStub(channels[int(time.monotonic_ns()) % 8])
            async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                pass

        await _many(704, one)


async def unknown_ids(at: Addresses) -> None:
    """Frames of 600,000 sequences that are not open, at the draft."""
    advances = draft_pb2.AdvanceSequences(
        sequences=[draft_pb2.SequenceAdvance(sequence_id=number, step=1, token_ids=[1]) for number in range(600_000)]
    )
    frame = draft_pb2.ProposeRequest(advance=advances).SerializeToString()
    async with _channel(at.draft) as channel:

        async def one() -> None:
            call = channel.stream_stream("/outrider.v1.DraftService/Propose")(metadata=bearer("evil"))
            await call.write(frame)
            await call.read()

        await _many(2, one)


async def long_texts(at: Addresses) -> None:
    """Texts of 4 MB, fourteen at once."""
    payload = target_pb2.GenerateRequest(text="a b " * 1_000_000).SerializeToString()
    await _payloads(at, payload, 14)


async def texts_that_fit(at: Addresses) -> None:
    """Texts just short enough to be tokenised before they are refused: 32 bytes for each token of the context."""
    payload = target_pb2.GenerateRequest(text="ab " * 5400).SerializeToString()
    await _payloads(at, payload, 32)


async def empty_messages(at: Addresses) -> None:
    """Conversations of 400,000 empty messages."""
    chat = target_pb2.ChatInput(messages=[target_pb2.ChatMessage(role="user") for _ in range(400_000)])
    await _payloads(at, target_pb2.GenerateRequest(chat=chat).SerializeToString(), 4)


async def _payloads(at: Addresses, payload: bytes, count: int) -> None:
    async with _channel(at.target) as channel:

        async def one() -> None:
            async for _ in channel.unary_stream(_GENERATE)(payload, metadata=bearer("evil")):
                pass

        await _many(count, one)


async def corpora(at: Addresses) -> None:
    """Corpora of ever new names, as large as a message may be."""
    async with _channel(at.draft) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        numbers = iter(range(10**9))

        async def one() -> None:
            number = next(numbers)
            tokens = [(number * 7919 + 31 * i * i) % 200 + 3 for i in range(65_536)]
            request = draft_pb2.AddCorpusRequest(tenant="evil", corpus=f"corpus-{number}", token_ids=tokens)
            await stub.AddCorpus(iter([request]), metadata=bearer("evil"))
            await stub.DeleteCorpus(
                draft_pb2.DeleteCorpusRequest(tenant="evil", corpus=f"corpus-{number}"), metadata=bearer("evil")
            )

        await _many(2, one)


async def half_requests(at: Addresses) -> None:
    """Requests of the metrics port whose end never comes."""
    host, _, port = at.metrics.rpartition(":")

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
            await reader.read()
        finally:
            writer.close()

    await _many(200, one)


ATTACKS: dict[str, Callable[[Addresses], Coroutine[Any, Any, None]]] = {
    "1 headers alone, of strangers": headers_alone,
    "1 headers alone, with a token": known_headers_alone,
    "2 impossible sequences at the draft": impossible_opens,
    "4 idle sequences that hold pages": idle_sequences,
    "5 long requests, 330 at once": long_requests,
    "5 health watches, 704 at once": health_watches,
    "6 600,000 unknown ids in a frame": unknown_ids,
    "7 texts of 4 MB": long_texts,
    "7 texts that are tokenised": texts_that_fit,
    "7 400,000 empty messages": empty_messages,
    "11 corpora without end": corpora,
    "12 half-sent requests for metrics": half_requests,
}


async def _serve(role: str, at: Addresses) -> None:
    """Follow the commands of standard input."""
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    found: list[Any] = []
    resting = asyncio.Event()

    async def doing() -> None:
        if role != "victim":
            await ATTACKS[role](at)
            raise RuntimeError("the attack is over")
        async for each in victim(at, resting):
            found.append(each)

    task: asyncio.Task[None] | None = None
    while command := (await commands.readline()).decode().strip():
        if command == "go":
            resting.clear()
            task = asyncio.create_task(doing())
        elif task is not None:
            resting.set()
            if role != "victim":
                task.cancel()
            (failure,) = await asyncio.gather(task, return_exceptions=True)
            failed = "" if failure is None or isinstance(failure, asyncio.CancelledError) else repr(failure)
            sys.stdout.write(json.dumps({"found": found, "failed": failed}) + "\n")
            sys.stdout.flush()
            found, task = [], None


def main(words: Sequence[str]) -> int:
    role, *addresses = words
    if role != "victim":
        # It would be on another machine; here it is not to take the processor from those it is about.
        os.nice(10)
    asyncio.run(_serve(role, Addresses(*addresses)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
