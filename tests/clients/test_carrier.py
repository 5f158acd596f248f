"""Calls of `generate` that share a stream to their target: the same answers, errors and ends as calls of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from scripted_engine import SERVED, ScriptedEngine
from scripted_service import Target, model_tokenizer, target_over
from waits import HUNG_SECONDS, until

from outrider.errors import DeadlineExceeded, InvalidField, QuotaExceeded, Unauthenticated, UnknownModel
from outrider.sampling import SamplingParams
from outrider.serving import Authenticator, Caller
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc
from outrider.wire.trees import error_of_rpc, sampling_to_pb
from outrider_client import carrier as carrier_module
from outrider_client.carrier import CarriedGenerate
from outrider_client.client import Client
from outrider_client.connection import Connection
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import Chunk, Result
from target_service.api import server as server_module

TEXTUAL = replace(SERVED, tokenizer=model_tokenizer())
TOKENS = Authenticator({"a" * 16: Caller("one"), "b" * 16: Caller("two")})


@asynccontextmanager
async def carrying(target: Target, token: str = "") -> AsyncIterator[Client]:
    async with Client(Connection(target.server.address, token=token), carries=True) as client:
        yield client


def sampling(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, seed=3)


async def read(client: Client, text: str = "a", count: int = 5, **named: Any) -> tuple[list[Chunk], Result]:
    generation = client.generate(text=text, sampling=sampling(count), **named)
    chunks = [chunk async for chunk in generation]
    assert isinstance(generation._call, CarriedGenerate) and generation._call._alone is None
    return chunks, await generation.result()


def untimed(result: Result) -> Result:
    return replace(result, duration=0.0, time_to_first_token=0.0, times=result.times.__class__(0, 0, 0))


async def test_answers_are_those_of_calls_of_their_own() -> None:
    engine = ScriptedEngine()
    engine.draft_refused = "UNKNOWN_CORPUS"
    async with target_over(engine, TEXTUAL) as target, carrying(target) as client:
        carried = await asyncio.gather(*(read(client, text) for text in "abc"))
        async with Client.connect(target.server.address) as alone:
            for text, (chunks, result) in zip("abc", carried, strict=True):
                assert "".join(chunk.text for chunk in chunks) == result.text
                other = await alone.generate(text=text, sampling=sampling(5)).result()
                assert untimed(result) == untimed(other) and result.draft_refused == "UNKNOWN_CORPUS"


async def test_each_call_has_its_own_caller_and_error() -> None:
    async with target_over(None, TEXTUAL, authenticator=TOKENS) as target, carrying(target, "a" * 16) as client:
        chunks, _ = await read(client)
        assert chunks
        await read(client.acting_for(token="b" * 16))
        assert [request.tenant for request in target.engine.requests] == ["one", "two"]
        with pytest.raises(Unauthenticated):
            await read(client.acting_for(token="c" * 16))
        with pytest.raises(UnknownModel) as refused:
            await read(client, model="another")
        assert refused.value.metadata == {"served": "counter"}


async def test_leaving_one_frees_it_and_no_other() -> None:
    async with target_over(None, TEXTUAL) as target, carrying(target) as client:
        target.engine.paused.set()
        left, stays = (client.generate(text="a", sampling=sampling(200)) for _ in range(2))
        first = [asyncio.create_task(anext(aiter(one))) for one in (left, stays)]
        await until(lambda: target.engine.open_sequences == 2)
        target.engine.pause_after(1)
        await asyncio.gather(*first)
        left.cancel()
        await until(lambda: target.engine.open_sequences == 1)
        target.engine.go_on()
        assert (await stays.result()).completion_tokens == 200
        await target.idle()


async def test_a_deadline_ends_one_at_both_ends() -> None:
    async with target_over(None, TEXTUAL) as target, carrying(target) as client:
        target.engine.paused.set()
        with pytest.raises(DeadlineExceeded):
            await client.generate(text="a", sampling=sampling(5), timeout=0.05).result()
        await target.idle()


async def test_a_slow_reader_is_waited_for_at_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the same number of steps as for a call of its own, while others go on."""
    monkeypatch.setattr(carrier_module, "_MOST_UNREAD", 2)
    monkeypatch.setattr(server_module, "UNREAD_STEPS", 64)
    async with target_over(None, TEXTUAL) as target, carrying(target) as client:
        slow = client.generate(text="a", sampling=sampling(230))
        async for _ in slow:
            break
        assert (await read(client, count=60))[1].completion_tokens == 60
        assert isinstance(slow._call, CarriedGenerate)
        await until(lambda: target.engine.open_sequences == 0)
        assert len(slow._call._events) < 60
        with pytest.raises(QuotaExceeded, match="reads too slowly"):
            await slow.result()


async def test_one_that_catches_up_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier_module, "_MOST_UNREAD", 2)
    async with target_over(None, TEXTUAL) as target, carrying(target) as client:
        slow = client.generate(text="a", sampling=sampling(100))
        async for _ in slow:
            break
        call = slow._call
        assert isinstance(call, CarriedGenerate)
        await until(lambda: call._paused)
        await until(lambda: target.engine.open_sequences == 0)
        assert (await slow.result()).completion_tokens == 100


async def test_calls_under_way_end_with_their_stream() -> None:
    async with target_over(None, TEXTUAL) as target:
        async with Client(Connection(target.server.address), carries=True) as client:
            target.engine.pause_after(1)
            generation = client.generate(text="a", sampling=sampling(50))
            async for _ in generation:
                break
            reading = asyncio.create_task(generation.result())
            assert client._carrier is not None and client._carrier._stream is not None
            client._carrier._stream.cancel()
            with pytest.raises(ServiceUnreachable):
                await reading
        target.engine.go_on()
        await target.idle()


async def test_a_target_without_such_streams_gets_calls_of_their_own() -> None:
    class Older(target_pb2_grpc.TargetServiceServicer):
        async def Generate(self, _request: Any, context: Any) -> None:  # type: ignore[override]
            await context.write(pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[7])))
            await context.write(pb.GenerateResponse(finished=pb.GenerateFinished()))

    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(Older(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Client(Connection(f"127.0.0.1:{port}"), carries=True) as client:
            for _ in range(2):
                assert (await client.generate(text="a").result()).token_ids == (7,)
    finally:
        await server.stop(0)


async def test_a_server_that_stops_does_not_wait_for_an_idle_stream() -> None:
    async with target_over(None, TEXTUAL) as target, carrying(target) as client:
        await read(client)
        async with asyncio.timeout(HUNG_SECONDS):
            # Of which it waits none.
            await target.server.stop(2 * HUNG_SECONDS)


async def test_an_end_comes_with_what_was_said_last() -> None:
    """Else its reader would wake twice."""
    async with target_over(None, TEXTUAL) as target:
        stream = target.stub.GenerateMany()
        asked = pb.GenerateRequest(text="a", sampling=sampling_to_pb(sampling(3)))
        begun = [pb.CarriedCall(call=number, request=asked.SerializeToString()) for number in (1, 2)]
        await stream.write(pb.GenerateManyRequest(begin=begun))
        ended = set[int]()
        while len(ended) < len(begun):
            message = await stream.read()
            events = [pb.GenerateResponse.FromString(response) for response in message.responses]
            finished = {call for call, event in zip(message.calls, events, strict=True) if event.HasField("finished")}
            assert finished == {end.call for end in message.ends}
            ended |= finished
        stream.cancel()


async def test_numbers_must_grow_and_requests_must_be_messages() -> None:
    async with target_over(None, TEXTUAL) as target:
        stream = target.stub.GenerateMany()
        malformed = pb.CarriedCall(call=4, request=b"\xff")
        await stream.write(pb.GenerateManyRequest(begin=[malformed], cancel=[9], pause=[9], resume=[9]))
        (end,) = (await stream.read()).ends
        assert (end.call, end.code) == (4, grpc.StatusCode.INVALID_ARGUMENT.value[0])
        await stream.write(pb.GenerateManyRequest(begin=[malformed]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert isinstance(error_of_rpc(refused.value), InvalidField)


async def test_chunks_are_handed_over_in_order() -> None:
    """Those that nobody can take are left to the reader, each once."""
    async with target_over(None, TEXTUAL) as target, carrying(target) as client:
        generation, seen, by = client.generate(text="a", sampling=sampling(100)), list[Chunk](), list[str]()

        def take(chunk: Chunk) -> None:
            seen.append(chunk)
            by.append("taker")

        generation.hand_over(lambda: len(seen) % 5 != 0, take)
        async for chunk in generation:
            seen.append(chunk)
            by.append("reader")
        assert [token for chunk in seen for token in chunk.token_ids] == list((await generation.result()).token_ids)
        assert "".join(chunk.text for chunk in seen) == (await generation.result()).text
        assert set(by) == {"taker", "reader"}


async def test_what_a_taker_raises_ends_its_own_call() -> None:
    async with target_over(None, TEXTUAL) as target, carrying(target) as client:
        target.engine.paused.set()

        def take(_chunk: Chunk) -> None:
            raise RuntimeError("a bug")

        broken, sound = (client.generate(text="a", sampling=sampling(200)) for _ in range(2))
        broken.hand_over(lambda: True, take)
        reading = [asyncio.create_task(one.result()) for one in (broken, sound)]
        await until(lambda: target.engine.open_sequences == 2)
        target.engine.go_on()
        with pytest.raises(RuntimeError, match="a bug"):
            await reading[0]
        assert (await reading[1]).completion_tokens == 200
        await target.idle()
