"""Callers who mean harm before they are known, or with too many calls: others are served, and health is heard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waits import HUNG_SECONDS, ever_longer

from outrider.admission.pacing import LARGE_BYTES, RefusalPace
from outrider.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidField,
    NotSupported,
    OutriderError,
    PositionOutOfRange,
    QuotaExceeded,
    Unauthenticated,
)
from outrider.serving import Authenticator, Caller
from outrider.serving.calls import CallLimits, Calls
from outrider.v1 import target_pb2, target_pb2_grpc
from outrider.wire.trees import error_of_rpc

ACME, OTHER = "acme-token-of-length", "other-token-of-length"
LOCKED = {"authenticator": Authenticator({ACME: Caller("acme"), OTHER: Caller("other")})}
FRESH = [("grpc.use_local_subchannel_pool", 1)]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def healthy(address: str, **options: Any) -> bool:
    async with grpc.aio.insecure_channel(address, options=FRESH) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HUNG_SECONDS, **options)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def headers_alone(channel: grpc.aio.Channel, path: str, **options: Any) -> Any:
    """A call whose request never comes."""
    return channel.stream_unary(path)(**options)


async def error_of(call: Any) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of_rpc(caught.value)


async def test_strangers_who_send_headers_alone_are_turned_away_at_once(echo: Any) -> None:
    """Their calls took every place, for as long as they liked."""
    async with echo.serving(echo.Echo(), limits=CallLimits(4), **LOCKED) as server, AsyncExitStack() as stack:
        waiting = []
        for _ in range(8):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
            waiting += [headers_alone(channel, f"/{echo.name}/Unary") for _ in range(4)]
        errors = await asyncio.wait_for(asyncio.gather(*(error_of(call) for call in waiting)), HUNG_SECONDS)
        # A request that was waited for would end as late.
        assert all(isinstance(error, Unauthenticated) for error in errors)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
        assert await echo.call(channel, "Unary", metadata=bearer(ACME), timeout=HUNG_SECONDS) == b"acme"


async def in_time(call: Callable[[], Awaitable[object]]) -> object:
    """What a call answers, made again for as long as what it sends comes too late for the server's short limits."""
    async with asyncio.timeout(HUNG_SECONDS):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                assert isinstance(error_of_rpc(error), DeadlineExceeded)


@pytest.mark.parametrize("method", ["Unary", "Generate"])
async def test_a_request_has_its_time_to_come(echo: Any, method: str) -> None:
    async with (
        echo.serving(echo.Echo(), limits=CallLimits(2, request_seconds=1.0)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        calls = [headers_alone(channel, f"/{echo.name}/{method}") for _ in range(2)]
        for call in calls:
            assert isinstance(await error_of(call), DeadlineExceeded)
        assert await in_time(lambda: echo.call(channel, method)) == b"default"


@pytest.mark.parametrize("method", ["Collect", "Converse"])
async def test_the_first_message_of_a_stream_has_its_time_to_come(echo: Any, method: str) -> None:
    async with (
        echo.serving(echo.Echo(), limits=CallLimits(2, first_message_seconds=1.0)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        silent = [channel.stream_stream(f"/{echo.name}/{method}")() for _ in range(2)]
        for call in silent:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            error = error_of_rpc(caught.value)
            assert isinstance(error, DeadlineExceeded) and error.message == "no message has come on the stream in 1 s"

        async def call_it() -> object:
            begun = channel.stream_stream(f"/{echo.name}/{method}")()
            await begun.write(b"")
            await begun.done_writing()
            return await begun.read()

        # The places of the others are free.
        assert await in_time(call_it) == b"default"


@pytest.mark.parametrize("method", ["Collect", "Converse"])
async def test_a_stream_that_has_begun_may_be_silent(echo: Any, method: str) -> None:
    for seconds in ever_longer():
        async with (
            echo.serving(echo.Echo(), limits=CallLimits(first_message_seconds=seconds)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            begun = channel.stream_stream(f"/{echo.name}/{method}")()
            try:
                await begun.write(b"")
                await asyncio.sleep(1.5 * seconds)
                await begun.write(b"")
                await begun.done_writing()
                assert await begun.read() == b"default"
                return
            except grpc.aio.AioRpcError:
                # Its first message may have come too late.
                continue
    pytest.fail("no limit was long enough")


async def test_a_silent_verify_stream_is_ended(targets: Any) -> None:
    async with targets(limits=CallLimits(first_message_seconds=0.3)) as target:
        call = target.stub.Verify()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), HUNG_SECONDS)
        assert isinstance(error_of_rpc(caught.value), DeadlineExceeded)


async def test_health_is_heard_while_every_place_is_taken(echo: Any) -> None:
    async with echo.serving(echo.Echo(), limits=CallLimits(4)) as server, AsyncExitStack() as stack:
        for _ in range(4):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
            stream = channel.unary_stream(f"/{echo.name}/Generate")(b"forever")
            await stream.read()
        error = await error_of(channel.unary_unary(f"/{echo.name}/Unary")(b""))
        assert isinstance(error, QuotaExceeded)
        assert await healthy(server.address)


async def test_probes_without_a_request_keep_no_probe_out(echo: Any) -> None:
    """They held the places of health calls until their requests were due."""
    limit = CallLimits().health
    async with echo.serving(echo.Echo()) as server, AsyncExitStack() as stack:
        waiting = []
        for _ in range(3):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
            waiting += [headers_alone(channel, "/grpc.health.v1.Health/Check") for _ in range(limit)]
        # The first to come, on whichever connection, are ended for the others, long before their requests are due.
        ends = [asyncio.ensure_future(error_of(call)) for call in waiting]
        async with asyncio.timeout(HUNG_SECONDS):
            while sum(end.done() for end in ends) < 2 * limit:
                await asyncio.sleep(0.01)
        assert {type(end.result()) for end in ends if end.done()} == {DeadlineExceeded}
        for _ in range(3):
            assert await healthy(server.address)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_those_who_watch_health_take_nobodys_place(echo: Any) -> None:
    limit = CallLimits().health
    async with echo.serving(echo.Echo(), limits=CallLimits(4)) as server, AsyncExitStack() as stack:
        refused = 0
        for _ in range(2 + limit // 8):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
            stub = health_pb2_grpc.HealthStub(channel)
            for watch in [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(4)]:
                try:
                    await watch.read()
                except grpc.aio.AioRpcError as error:
                    refused += isinstance(error_of_rpc(error), QuotaExceeded)
        assert refused == 0
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
        assert await echo.call(channel, "Unary", timeout=HUNG_SECONDS) == b"default"


async def test_those_who_watch_health_keep_no_probe_out(echo: Any) -> None:
    limit = CallLimits().health
    async with echo.serving(echo.Echo(), **LOCKED) as server, AsyncExitStack() as stack:
        watches = []
        for _ in range(2):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
            stub = health_pb2_grpc.HealthStub(channel)
            watches += [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(limit // 2)]
        for watch in watches:
            await watch.read()
        error = await error_of(stub.Watch(health_pb2.HealthCheckRequest()).read())
        assert isinstance(error, QuotaExceeded)
        assert await healthy(server.address)


async def test_one_tenant_leaves_places_to_others(echo: Any) -> None:
    async with echo.serving(echo.Echo(), limits=CallLimits(8), **LOCKED) as server, AsyncExitStack() as stack:
        streams = []
        for _ in range(6):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
            streams.append(channel.unary_stream(f"/{echo.name}/Generate")(b"forever", metadata=bearer(ACME)))
            await streams[-1].read()
        error = await error_of(channel.unary_unary(f"/{echo.name}/Unary")(b"", metadata=bearer(ACME)))
        assert isinstance(error, QuotaExceeded) and "tenant" in error.message
        assert await echo.call(channel, "Unary", metadata=bearer(OTHER)) == b"other"
        streams[0].cancel()
        async with asyncio.timeout(HUNG_SECONDS):
            while True:
                try:
                    assert await echo.call(channel, "Unary", metadata=bearer(ACME)) == b"acme"
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how much each refusal that is paced is held back, where no time passes between calls; none is."""
    found: list[float] = []

    async def wait(pace: RefusalPace, tenant: str, size: int = 0) -> None:
        found.append(pace._delay(tenant, max(1.0, size / LARGE_BYTES), 100.0))

    monkeypatch.setattr(RefusalPace, "wait", wait)
    return found


async def test_who_comes_back_at_once_is_told_later(echo: Any, delays: list[float]) -> None:
    """Refusing one tenant without pause took the time of the others' steps."""
    async with echo.serving(echo.Echo(), limits=CallLimits(8), **LOCKED) as server, AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=FRESH))
        for _ in range(6):
            stream = channel.unary_stream(f"/{echo.name}/Generate")(b"forever", metadata=bearer(ACME))
            await stream.read()
        for _ in range(70):
            refused = channel.unary_unary(f"/{echo.name}/Unary")(b"", metadata=bearer(ACME))
            assert isinstance(await error_of(refused), QuotaExceeded)
        # 64 at once and 20 a second.
        assert max(delays[:64]) <= 0
        assert delays[64:] == pytest.approx([0.05 * place for place in range(1, 7)])
        # Others are told at once that they are refused, and are served.
        assert await echo.call(channel, "Unary", metadata=bearer(OTHER), timeout=HUNG_SECONDS) == b"other"
        wrong = channel.unary_unary(f"/{echo.name}/Unary")(b"", metadata=bearer("wrong" * 5))
        assert isinstance(await error_of(wrong), Unauthenticated)
        assert delays[70] <= 0


def test_the_pace_of_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("outrider.admission.pacing.time.monotonic", lambda: now)
    monkeypatch.setattr("outrider.admission.pacing.asyncio.sleep", sleep)
    pace = RefusalPace(room=1000)

    def refuse(whose: str, times: int) -> list[float]:
        slept.clear()
        for _ in range(times):
            asyncio.run(pace.wait(whose))
        return list(slept)

    assert refuse("a", 64) == []
    assert refuse("a", 3) == pytest.approx([0.05, 0.10, 0.15])
    assert refuse("b", 1) == []
    # Nobody waits longer than ten seconds, however many there are.
    assert max(refuse("a", 400)) == pytest.approx(10.0)
    now += 20.0
    assert refuse("a", 64) == []


async def test_large_requests_that_are_refused_are_told_later_too(target: Any, delays: list[float]) -> None:
    """Texts of megabytes, refused for their length without a pause, kept the event loop from others."""
    large, small = (target_pb2.GenerateRequest(text="a b " * count) for count in (250_000, 1_000))

    async def refuse(request: target_pb2.GenerateRequest) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await target.stub.Generate(request, timeout=HUNG_SECONDS).read()
        assert isinstance(error_of_rpc(caught.value), PositionOutOfRange | NotSupported)

    for _ in range(2):
        await refuse(large)
    assert delays[0] <= 0 and delays[1] > 2.0
    # What costs no more than a refusal is told at once, however often.
    for _ in range(100):
        await refuse(small)
    assert len(delays) == 2


@pytest.mark.parametrize(("raised", "waits"), [(EngineDead("gone"), False), (PositionOutOfRange("long"), True)])
async def test_a_large_request_hears_at_once_of_what_is_not_its_fault(
    echo: Any, raised: OutriderError, waits: bool, delays: list[float]
) -> None:
    echoing = echo.Echo()
    echoing.raises = raised
    async with echo.serving(echoing) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/{echo.name}/Unary")
        for _ in range(2):
            assert isinstance(await error_of(call(b"a" * 1_000_000)), type(raised))
        assert [delay > 2.0 for delay in delays] == ([False, True] if waits else [])


async def test_only_so_many_wait_to_be_told() -> None:
    pace = RefusalPace(room=2)
    waiting = [asyncio.create_task(pace.wait("a")) for _ in range(64 + 40)]
    # Each comes as far as it may in a turn of the loop, and those that wait would for a second at the least.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    pending = [each for each in waiting if not each.done()]
    assert len(pending) == 2
    for each in pending:
        each.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    # Who has gone leaves his place.
    again = asyncio.create_task(pace.wait("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


def test_what_was_taken_is_given_back() -> None:
    calls = Calls(CallLimits(total=4, health=1), by_tenant=True)
    for _ in range(3):
        with pytest.raises(KeyError), calls.of("a"), calls.of("a"), calls.of("a"):
            with pytest.raises(QuotaExceeded, match="this tenant"), calls.of("a"):
                pass
            with calls.of("b"), pytest.raises(QuotaExceeded, match="too many calls at once"), calls.of("c"):
                pass
            for watches in (False, True):
                with calls.health(watches=watches):
                    with pytest.raises(QuotaExceeded, match="health"), calls.health(watches=watches):
                        pass
                    with calls.health(watches=not watches):
                        pass
            raise KeyError
    assert calls._shares.taken == calls._shares.held("tenant", "a") == 0


@pytest.mark.parametrize("method", ["GetTargetInfo", "Generate", "Verify"])
async def test_bytes_that_are_no_message_are_a_field_of_the_caller(
    target: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Unary calls were answered UNKNOWN with the name of a class, and each left a traceback in the log."""
    path = f"/{target_pb2.DESCRIPTOR.services_by_name['TargetService'].full_name}/{method}"
    assert hasattr(target_pb2_grpc.TargetServiceServicer, method)
    for _ in range(5):
        error = await error_of(target.channel.stream_unary(path)(iter([b"\xff\xff\xff"]), timeout=HUNG_SECONDS))
        assert isinstance(error, InvalidField) and error.field == "request"
    lines = [record for record in caplog.records if record.name.startswith("outrider.serving")]
    assert len(lines) == 1 and "Traceback" not in caplog.text and method in lines[0].getMessage()


async def test_refused_callers_are_a_line_in_the_log(echo: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with echo.serving(echo.Echo(), **LOCKED) as server, grpc.aio.insecure_channel(server.address) as channel:
        for _ in range(20):
            await error_of(channel.unary_unary(f"/{echo.name}/Unary")(b"", metadata=bearer("wrong" * 5)))
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 1 and "127.0.0.1" in lines[0] and "wrong" not in lines[0]
