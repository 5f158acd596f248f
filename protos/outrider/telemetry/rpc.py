"""A server interceptor that counts calls by method and status. Outermost, so that it sees the final status."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc

from outrider.serving.interceptors import Context, Continuation, Handler, Proceed, guarded
from outrider.telemetry.registry import MetricSet, Reading
from outrider.telemetry.table import RPC

# A caller's deadline starts before ours, by the request's travel time, so it disconnects while we have a little time
# left. Chosen, not measured: longer than the travel time within a data centre and the delay of a busy loop. A caller
# that cancels this close to its deadline is counted as one whose deadline passed.
DEADLINE_SLACK_S = 0.05


def ended_with(context: Context, error: BaseException | None) -> str:
    """The name of the gRPC status that a call ends with, as seen inside its handler. A call whose caller disconnected
    has no status yet: CANCELLED, or DEADLINE_EXCEEDED once its time is over."""
    if isinstance(error, asyncio.CancelledError):
        remaining = context.time_remaining()
        return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= DEADLINE_SLACK_S else "CANCELLED"
    # None until it is set; the stubs omit that.
    code: grpc.StatusCode | int | None = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return "OK" if error is None else "UNKNOWN"


class RpcMetricsInterceptor(grpc.aio.ServerInterceptor):
    """Counts ended calls and calls in flight. Only existing methods are counted, so that labels stay few."""

    def __init__(self) -> None:
        self.metrics = MetricSet(RPC)
        self._in_flight: dict[str, int] = {}
        self.metrics.gauges(self._read)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method).lstrip("/")

        async def guard(request: Any, context: Context, proceed: Proceed) -> Any:
            self._in_flight[method] = self._in_flight.get(method, 0) + 1
            ended: BaseException | None = None
            try:
                return await proceed(request)
            except BaseException as error:
                ended = error
                raise
            finally:
                self._in_flight[method] -= 1
                self.metrics.counter("outrider_rpc_calls", method, ended_with(context, ended)).add()

        return None if handler is None else guarded(handler, guard)

    def _read(self) -> Iterator[Reading]:
        for method, calls in list(self._in_flight.items()):
            yield "outrider_rpc_in_flight", (method,), calls
