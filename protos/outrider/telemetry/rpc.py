"""A server interceptor that counts calls by method and status. Outermost, so that it sees what the caller sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc

from outrider.serving.interceptors import Context, Continuation, Handler, guarded
from outrider.telemetry.registry import MetricSet, Reading
from outrider.telemetry.table import RPC

# A caller's clock starts before ours, by the way of its request, so at its deadline it hangs up while we have a little
# left. Chosen, not measured: longer than a request is under way between hosts of one place, and than a busy loop holds
# up the header; a caller that gives up of itself this close to its deadline is counted as one that ran out of time.
DEADLINE_SLACK_S = 0.05


def ended_with(context: Context, error: BaseException | None) -> str:
    """The gRPC status by name that a call ends with, found out inside its handler.

    A call whose caller went away has no status of its own: it is CANCELLED, or DEADLINE_EXCEEDED once its time is up.
    """
    if isinstance(error, asyncio.CancelledError):
        remaining = context.time_remaining()
        return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= DEADLINE_SLACK_S else "CANCELLED"
    # None until something sets it, whatever the stubs say.
    code: grpc.StatusCode | int | None = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return "OK" if error is None else "UNKNOWN"


class RpcMetricsInterceptor(grpc.aio.ServerInterceptor):
    """Counts ended calls, and those under way. Only methods that exist are counted, so that labels stay few."""

    def __init__(self) -> None:
        self.metrics = MetricSet(RPC)
        self._in_flight: dict[str, int] = {}
        self.metrics.gauges(self._read)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method).lstrip("/")

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            self._in_flight[method] = self._in_flight.get(method, 0) + 1
            ended: BaseException | None = None
            try:
                yield
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
