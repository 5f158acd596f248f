"""Calls are counted by what the caller sees, whatever way they end. A real server, with its other interceptors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from waits import HUNG_SECONDS, ever_longer, until

from outrider.errors import QuotaExceeded
from outrider.serving import GrpcServer, Service, ServingOptions
from outrider.telemetry.rpc import DEADLINE_SLACK_S, RpcMetricsInterceptor, ended_with
from outrider.v1 import target_pb2

Behaviour = Callable[[bytes, Any], Awaitable[bytes]]


@asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[tuple[RpcMetricsInterceptor, Any]]:
    """A server with one method, and a way to call it."""
    calls = RpcMetricsInterceptor()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(behaviour)}  # type: ignore[arg-type]
    generic = grpc.method_handlers_generic_handler("test.Service", handlers)
    service = Service("test.Service", lambda server: server.add_generic_rpc_handlers((generic,)))
    server = GrpcServer(ServingOptions(), [service], [calls])
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield calls, channel.unary_unary("/test.Service/Call")
    await server.stop(0)


def counted(calls: RpcMetricsInterceptor) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for family in calls.metrics.collect()
        for sample in family.samples
        if sample.name == "outrider_rpc_calls_total"
    }


async def eventually(calls: RpcMetricsInterceptor, code: str) -> None:
    """Wait until exactly one call is counted, with `code`: the server notices after the caller does."""
    async with asyncio.timeout(HUNG_SECONDS):
        while not counted(calls):
            await asyncio.sleep(0.01)
    assert counted(calls) == {("test.Service/Call", code): 1}


async def answers(_request: bytes, _context: Any) -> bytes:
    return b"fine"


async def refuses(_request: bytes, _context: Any) -> bytes:
    raise QuotaExceeded("full")


async def breaks(_request: bytes, _context: Any) -> bytes:
    raise ZeroDivisionError


async def hangs(_request: bytes, _context: Any) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.mark.parametrize(
    ("behaviour", "code"), [(answers, "OK"), (refuses, "RESOURCE_EXHAUSTED"), (breaks, "INTERNAL")]
)
async def test_calls_that_end(behaviour: Behaviour, code: str) -> None:
    async with serving(behaviour) as (calls, call):
        try:
            await call(b"")
        except grpc.aio.AioRpcError as error:
            assert error.code().name == code
        await eventually(calls, code)


async def test_a_call_that_is_cancelled() -> None:
    async with serving(hangs) as (calls, call):
        running = call(b"")
        async with asyncio.timeout(HUNG_SECONDS):
            while not list(calls._read()):
                await asyncio.sleep(0.01)
        assert list(calls._read()) == [("outrider_rpc_in_flight", ("test.Service/Call",), 1)]
        running.cancel()
        await eventually(calls, "CANCELLED")
        assert list(calls._read()) == [("outrider_rpc_in_flight", ("test.Service/Call",), 0)]


async def test_a_call_whose_deadline_passes() -> None:
    for seconds in ever_longer():
        arrived = asyncio.Event()

        async def arrives(request: bytes, context: Any, arrived: asyncio.Event = arrived) -> bytes:
            arrived.set()
            return await hangs(request, context)

        async with serving(arrives) as (calls, call):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=seconds)
            if arrived.is_set():
                await eventually(calls, "DEADLINE_EXCEEDED")
                return
    raise AssertionError("no deadline was long enough for a call to arrive")


@pytest.mark.parametrize(
    ("remaining", "code"),
    [
        (None, "CANCELLED"),
        (60.0, "CANCELLED"),
        (2 * DEADLINE_SLACK_S, "CANCELLED"),
        (DEADLINE_SLACK_S / 2, "DEADLINE_EXCEEDED"),
        (0.0, "DEADLINE_EXCEEDED"),
    ],
)
def test_a_caller_that_hangs_up_at_its_deadline_ran_out_of_time(remaining: float | None, code: str) -> None:
    context: Any = SimpleNamespace(time_remaining=lambda: remaining)
    assert ended_with(context, asyncio.CancelledError()) == code


async def test_methods_that_do_not_exist_make_no_series() -> None:
    async with serving(answers) as (calls, _), grpc.aio.insecure_channel("127.0.0.1:1"):
        assert counted(calls) == {}


async def test_a_service_that_loads_knows_no_other_methods_either() -> None:
    """Whoever reaches the port could make a series for every name."""
    name, calls = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name, RpcMetricsInterceptor()
    server = GrpcServer(ServingOptions(), [Service(name)], [calls])
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method, code in (
            ("Invented", "UNIMPLEMENTED"),
            ("Generate/a", "UNIMPLEMENTED"),
            ("Generate", "UNAVAILABLE"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{name}/{method}")(b"")
            assert caught.value.code().name == code
        # The server counts it after the caller has its answer.
        await until(lambda: counted(calls))
    await server.stop(0)
    assert counted(calls) == {(f"{name}/Generate", "UNAVAILABLE"): 1}
