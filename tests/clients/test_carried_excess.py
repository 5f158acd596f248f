"""Callers who take more than their part of a stream of carried calls: it costs their own calls, and no memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from scripted_engine import SERVED, ScriptedEngine
from scripted_service import Target, served_tokenizer, target_over
from waits import HUNG_SECONDS, until

from outrider.admission.pacing import LARGE_BYTES, RefusalPace
from outrider.errors import InvalidField, PositionOutOfRange, QuotaExceeded, Unauthenticated
from outrider.sampling import SamplingParams
from outrider.serving import Authenticator, Caller
from outrider.serving import carried_calls as module
from outrider.serving.calls import MAX_METADATA_BYTES, CallLimits
from outrider.serving.carried_calls import CarriedCalls, CarriedContext
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import error_of_rpc
from outrider_client import carrier as carrier_module
from outrider_client.carrier import CarriedGenerate
from outrider_client.client import Client
from outrider_client.connection import Connection
from outrider_client.results import Result

TEXTUAL = replace(SERVED, tokenizer=served_tokenizer())
KNOWN, OTHER = "a" * 16, "b" * 16
TOKENS = Authenticator({KNOWN: Caller("one"), OTHER: Caller("two")})
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def sampling(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, seed=3)


def begin(numbers: range, **named: Any) -> pb.GenerateManyRequest:
    return pb.GenerateManyRequest(begin=[pb.CarriedCall(call=number, **named) for number in numbers])


def carried(handle: Any, read: Any, write: Any, most: int) -> CarriedCalls:
    """Calls on a stream that reads and writes so."""
    handler: Any = SimpleNamespace(stream_stream=handle, request_deserializer=None, response_serializer=None)
    context: Any = SimpleNamespace(read=read, write=write)
    return CarriedCalls(handler, context, most)


def calls_of(target: Target) -> list[CarriedContext]:
    """Those that run, on all streams."""
    return [call for stream in target.server._carrying.streams for call in stream._running.values()]


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Refusals that are paced wait for this."""
    sent = asyncio.Event()

    async def wait(_pace: RefusalPace, _tenant: str, _size: int = 0) -> None:
        await sent.wait()

    monkeypatch.setattr(RefusalPace, "wait", wait)
    return sent


async def test_calls_past_the_limit_of_a_connection_are_refused_by_themselves() -> None:
    limits, engine = CallLimits(130), ScriptedEngine(max_sequences=128)
    async with (
        target_over(engine, TEXTUAL, limits=limits) as target,
        Client(Connection(target.server.address), carries=True) as client,
    ):
        target.engine.paused.set()
        most = limits.per_connection
        generations = [client.generate(text="a", sampling=sampling(3)) for _ in range(most + 4)]
        reading = [asyncio.create_task(one.result()) for one in generations]
        await until(lambda: target.engine.open_sequences == most and all(one.done() for one in reading[most:]))
        target.engine.go_on()
        results = await asyncio.gather(*reading, return_exceptions=True)
        assert [one.completion_tokens for one in results if isinstance(one, Result)] == [3] * most
        assert all(isinstance(error, QuotaExceeded) for error in results[most:])
        await target.idle()


async def test_one_that_is_cancelled_as_it_begins_leaves_nothing() -> None:
    """Its task never runs, and had kept its place, and the stream, for ever."""
    async with target_over(None, TEXTUAL, limits=CallLimits(4)) as target:
        stream = target.stub.GenerateMany()
        for number in range(1, 9):
            await stream.write(pb.GenerateManyRequest(begin=[pb.CarriedCall(call=number)], cancel=[number]))
        await stream.write(begin(range(9, 10), request=b"\xff"))
        (end,) = (await stream.read()).ends
        assert (end.call, end.code) == (9, grpc.StatusCode.INVALID_ARGUMENT.value[0])
        await stream.done_writing()
        async with asyncio.timeout(HUNG_SECONDS):
            assert await stream.read() is grpc.aio.EOF


async def test_requests_of_unknown_callers_are_not_kept(held_back: asyncio.Event) -> None:
    """Not even while their refusals wait: a stream of a known caller had held 2 GB of them."""
    async with target_over(None, TEXTUAL, limits=CallLimits(8), authenticator=TOKENS) as target:
        stream = target.stub.GenerateMany(metadata=(("authorization", f"Bearer {KNOWN}"),))
        wrong = [pb.CallMetadata(key="authorization", value=b"Bearer wrong-token-of-length")]
        await stream.write(begin(range(1, 9), request=bytes(100_000), metadata=wrong))
        await until(lambda: len(calls_of(target)) == 8)
        await until(lambda: all(call._request is None for call in calls_of(target)))
        held_back.set()
        ends = list[pb.CarriedEnd]()
        while len(ends) < 8:
            ends += (await stream.read()).ends
        assert {end.code for end in ends} == {grpc.StatusCode.UNAUTHENTICATED.value[0]}


async def test_parsed_requests_are_not_kept_while_refusals_wait(held_back: asyncio.Event) -> None:
    """Of a call of its own too. Small entries take a hundred times their bytes once they are parsed."""
    async with target_over(None, TEXTUAL) as target:
        request = pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage()] * (LARGE_BYTES + 1)))
        call = target.stub.Generate(request)
        reading = asyncio.create_task(call.read())
        errors = list[BaseException]()

        def waiting() -> bool:
            errors[:] = [one for one in gc.get_objects() if type(one) is InvalidField and "4096" in str(one)]
            return bool(errors)

        await until(waiting)
        assert not list(_messages_in(errors.pop()))
        held_back.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await reading


def _messages_in(error: BaseException) -> Any:
    """The requests that the frames of an error's traceback hold."""
    trace = error.__traceback__
    while trace is not None:
        yield from (one for one in trace.tb_frame.f_locals.values() if isinstance(one, pb.GenerateRequest))
        trace = trace.tb_next


@pytest.mark.parametrize(
    ("orders", "field"),
    [
        (begin(range(1, 6)), "begin"),
        (pb.GenerateManyRequest(cancel=[1] * 5), "cancel"),
        (pb.GenerateManyRequest(pause=[1] * 5), "pause"),
        (pb.GenerateManyRequest(resume=[1] * 5), "resume"),
    ],
    ids=["begin", "cancel", "pause", "resume"],
)
async def test_a_message_of_too_many_entries_ends_its_own_stream(
    monkeypatch: pytest.MonkeyPatch, orders: pb.GenerateManyRequest, field: str
) -> None:
    monkeypatch.setattr(module, "_MOST_ORDERS", 4)
    async with (
        target_over(None, TEXTUAL) as target,
        Client(Connection(target.server.address), carries=True) as client,
    ):
        target.engine.paused.set()
        reading = asyncio.create_task(client.generate(text="a", sampling=sampling(3)).result())
        await until(lambda: target.engine.open_sequences == 1)
        stream = target.stub.GenerateMany()
        await stream.write(orders)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        error = error_of_rpc(refused.value)
        assert isinstance(error, InvalidField) and error.field == field
        target.engine.go_on()
        assert (await reading).completion_tokens == 3


async def test_what_is_wrong_ends_the_stream_behind_the_message_on_its_way() -> None:
    """That was given up, and gRPC sends no status behind one: the caller waited for ever."""
    sending, may_end, given_up = asyncio.Event(), asyncio.Event(), list[object]()
    orders = [begin(range(1, 2))]

    async def read() -> pb.GenerateManyRequest:
        if orders:
            return orders.pop()
        await sending.wait()
        raise InvalidField("request", "is not a valid message")

    async def write(message: object) -> None:
        sending.set()
        try:
            await may_end.wait()
        except asyncio.CancelledError:
            given_up.append(message)
            raise

    async def handle(_requests: object, context: CarriedContext) -> None:
        await context.write(b"said")
        await asyncio.get_running_loop().create_future()

    serving = asyncio.create_task(carried(handle, read, write, 4).serve())
    await sending.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not serving.done() and not given_up
    may_end.set()
    with pytest.raises(InvalidField):
        await serving
    assert not given_up


async def test_metadata_are_as_few_as_those_of_a_call_of_its_own() -> None:
    many = [pb.CallMetadata(key="x")] * (MAX_METADATA_BYTES // 32)
    long = [pb.CallMetadata(key="x", value=bytes(MAX_METADATA_BYTES))]
    async with target_over(None, TEXTUAL) as target:
        stream = target.stub.GenerateMany()
        for number, metadata in enumerate((many, long), 1):
            await stream.write(begin(range(number, number + 1), metadata=metadata))
            (end,) = (await stream.read()).ends
            assert end.call == number and f"more than {MAX_METADATA_BYTES} bytes" in end.message


async def test_a_caller_that_reads_nothing_is_not_read_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends that nobody takes would pile up."""
    monkeypatch.setattr(module, "_MOST_UNSENT", 10)
    read, most = list[int](), 4

    async def next_orders() -> pb.GenerateManyRequest:
        # Those before have ended by then.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        read.append(len(read) + 1)
        return begin(range(read[-1], read[-1] + 1))

    async def never(_message: object) -> None:
        await asyncio.get_running_loop().create_future()

    async def handle(_requests: object, context: CarriedContext) -> None:
        await context.read()

    stream = carried(handle, next_orders, never, most)
    serving = asyncio.create_task(stream.serve())
    settled = [-1]

    def at_rest() -> bool:
        before, settled[0] = settled[0], len(read)
        return before == settled[0] > most

    await until(at_rest)
    assert len(stream._ready) == most + 10 and not stream._running
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_long_requests_of_others_do_not_end_a_stream(held_back: asyncio.Event) -> None:
    """Two that come at once were put into one message, which was longer than the target takes."""
    held_back.set()
    async with (
        target_over(None, TEXTUAL, limits=CallLimits(message_bytes=1024 * 1024)) as target,
        Client(Connection(target.server.address), carries=True) as client,
    ):
        target.engine.pause_after(1)
        generation = client.generate(text="a", sampling=sampling(20))
        async for _ in generation:
            break
        long = [client.generate(text="b" * size).result() for size in (700_000, 700_000, *[120_000] * 10)]
        refused = await asyncio.gather(*long, return_exceptions=True)
        assert {type(error) for error in refused} == {PositionOutOfRange}
        target.engine.go_on()
        assert (await generation.result()).completion_tokens == 20


async def test_nobody_waits_for_the_refusal_of_who_opens_the_stream(held_back: asyncio.Event) -> None:
    async with (
        target_over(None, TEXTUAL, authenticator=TOKENS) as target,
        Client(Connection(target.server.address), carries=True) as client,
    ):
        refused = client.acting_for(token="wrong-token-of-length").generate(text="a")
        reading = asyncio.create_task(refused.result())
        await until(lambda: refused._call is not None)
        known = client.acting_for(token=KNOWN)
        assert (await known.generate(text="a", sampling=sampling(3)).result()).completion_tokens == 3
        assert not reading.done()
        held_back.set()
        with pytest.raises(Unauthenticated):
            await reading
        # Then the stream is opened by whom the target knows, and carries others' calls once it has answered.
        first, then = known.generate(text="a", sampling=sampling(3)), client.acting_for(token=OTHER).generate(text="a")
        for one in (first, then):
            await one.result()
            assert isinstance(one._call, CarriedGenerate) and one._call._alone is None


def test_orders_are_short_messages_and_say_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier_module, "_MOST_ORDERS", 2)
    orders = carrier_module._Orders()
    for number in (1, 2, 3):
        orders.add_call(pb.CarriedCall(call=number))
    orders.cancel(1)
    orders.pause(2, True)
    orders.pause(2, False)
    orders.pause(3, False)
    orders.pause(3, True)
    first, second = orders.next_message(), orders.next_message()
    assert first == begin(range(1, 3))
    assert second == pb.GenerateManyRequest(begin=[pb.CarriedCall(call=3)], cancel=[1], pause=[3], resume=[2])
    assert orders.next_message() is None


def test_orders_are_cut_by_bytes() -> None:
    orders, sizes = carrier_module._Orders(), list[int]()
    for number in range(1, 12):
        orders.add_call(pb.CarriedCall(call=number, request=bytes(100_000)))
    take: Callable[[], pb.GenerateManyRequest | None] = orders.next_message
    while (message := take()) is not None:
        sizes.append(len(message.begin))
    assert sizes == [2, 2, 2, 2, 2, 1]
