"""Server interceptors: errors become statuses with details, unknown callers and calls over the limits are refused."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from outrider.admission.newest_waits import NewestWaits
from outrider.admission.pacing import LARGE_BYTES, RefusalPace
from outrider.errors import (
    DeadlineExceeded,
    InvalidField,
    OutriderError,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)
from outrider.log_limit import LogLimit
from outrider.serving import health
from outrider.serving.calls import CallLimits, Calls
from outrider.serving.tenancy import Authenticator, current_caller
from outrider.wire.trees import status_of

logger = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
Parser = Callable[[bytes], Any]
# Runs the rest of a call, given the request that its handler gets.
Proceed = Callable[[Any], Awaitable[Any]]
# Given a call's request, or requests, and its context; runs the rest once, or raises. No context manager: that of a
# generator takes ten times as long as a call, and each call passes four guards.
Guard = Callable[[Any, Context, Proceed], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


@runtime_checkable
class HoldsRequest(Protocol):
    """A context that has its call's request before anybody reads it."""

    def drop_request(self) -> None:
        """Free it: nobody will read it."""


# By (request_streaming, response_streaming): a handler's attribute with its behaviour, and its constructor.
_KINDS: Mapping[tuple[bool, bool], tuple[str, Any]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def guarded(handler: Handler, guard: Guard, parse: Parser | None = None, *, reads: bool = False) -> Handler:
    """`handler` with every call run inside `guard`, its writes included. `parse` takes the place of its own parser;
    with `reads` gRPC leaves a single request to be read by the guard. The handler may give responses as their bytes."""
    kind, _ = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    _, make = _KINDS[reads or bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour = getattr(handler, kind)

    async def call(request: Any, context: Context) -> Any:
        return await guard(request, context, lambda given: behaviour(given, context))

    # A coroutine for a generator: gRPC would leave that of a cancelled call to the garbage collector.
    async def iterate(request: Any, context: Context) -> None:
        async def write_all(given: Any) -> None:
            # `aclosing` frees what a cancelled call holds at once.
            async with aclosing(behaviour(given, context)) as responses:
                async for response in responses:
                    await context.write(response)

        await guard(request, context, write_all)

    handle: Any = iterate if inspect.isasyncgenfunction(behaviour) else call
    serialise = handler.response_serializer
    if serialise is not None and not isinstance(serialise, _Serialiser):
        serialise = _Serialiser(serialise)
    wrapped: Handler = make(handle, parse or handler.request_deserializer, serialise)
    return wrapped


@dataclass(frozen=True, slots=True)
class _Serialiser:
    """A serialiser that leaves alone what is serialised already."""

    serialise: Callable[[Any], bytes]

    def __call__(self, response: Any) -> bytes:
        return response if type(response) is bytes else self.serialise(response)


# Bytes of the last message that the current call has read.
_request_bytes: ContextVar[int] = ContextVar("outrider_request_bytes", default=0)
# Statuses that are not the caller's fault: refusals with them are not delayed, so that it can call elsewhere.
_NOT_THE_CALLERS_FAULT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)

# The deadline of the current streaming call for its first message.
_first_message: ContextVar[asyncio.Timeout] = ContextVar("outrider_first_message")


def _first_message_within(handler: Handler, seconds: float) -> Handler:
    """`handler` of a stream of requests, ended with `DeadlineExceeded` when no message arrives within `seconds`.
    Messages are parsed where they are read, in the handler's task or one that it started. Both inherit the call's
    context variables, and so its deadline, which the first message removes."""
    parse = _checked(handler.request_deserializer)

    def parse_in_time(payload: bytes) -> Any:
        deadline = _first_message.get()
        # A deadline that has passed ends the call, whatever arrives now.
        if deadline.when() is not None and not deadline.expired():
            deadline.reschedule(None)
        return parse(payload)

    async def begun(requests: Any, _context: Context, proceed: Proceed) -> Any:
        deadline = asyncio.timeout(seconds)
        _first_message.set(deadline)
        try:
            async with deadline:
                return await proceed(requests)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"no message has come on the stream in {seconds:g} s") from None

    return guarded(handler, begun, parse_in_time)


def _request_within(handler: Handler, limits: CallLimits, unread: NewestWaits | None = None) -> Handler:
    """`handler` of a single request as one that starts at the headers and reads the request itself.

    gRPC reads a single request before any handler runs: a caller that sends only headers would hold a place without
    authentication for as long as it likes, and gRPC would treat malformed bytes as a bug. Raises `DeadlineExceeded`
    when the request takes longer than `limits` allow, or too many are `unread`; `InvalidField` for malformed bytes and
    where nothing can be read: of a request larger than gRPC takes a handler sees only that none comes, while its caller
    gets gRPC's own status.
    """
    within = asyncio.timeout if unread is None else unread.within

    async def read(_requests: Any, context: Context, proceed: Proceed) -> Any:
        try:
            async with within(limits.request_seconds):
                request = await context.read()
        except TimeoutError:
            raise DeadlineExceeded("no request has come") from None
        if request is grpc.aio.EOF:
            most = limits.message_bytes
            raise InvalidField("request", f"is missing, or larger than the {most} bytes of --max-message-bytes")
        return await proceed(request)

    return guarded(handler, read, _checked(handler.request_deserializer), reads=True)


def _checked(parse: Parser | None) -> Parser:
    """A parser that records the message's size and raises `InvalidField` for malformed bytes; None keeps the bytes."""

    def checked(payload: bytes) -> Any:
        _request_bytes.set(len(payload))
        try:
            return payload if parse is None else parse(payload)
        except DecodeError:
            raise InvalidField("request", "is not a valid message") from None

    return checked


async def _abort(context: Context, error: OutriderError) -> None:
    """End the call with the error's status and the trailing metadata that its handler set, which gRPC's
    `abort_with_status` would drop."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, (*status.trailing_metadata, *(context.trailing_metadata() or ())))


def _drop_request(error: OutriderError, context: Context) -> None:
    """Free what was read of a call that `error` refuses, while its refusal waits: the error's traceback has the frames
    of handlers, and these the message. 20 messages of 3 MB with 1.5 million turns each held 3.3 GB together."""
    traceback.clear_frames(error.__traceback__)
    if isinstance(context, HoldsRequest):
        context.drop_request()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns `OutriderError` into its status with `google.rpc` details, and any bug into a bare INTERNAL."""

    def __init__(self) -> None:
        # Of refused callers, by reason.
        self._refusal_lines = LogLimit()
        self._running: set[asyncio.Task[Any]] = set()
        self._ending: OutriderError | None = None

    def end_calls(self, reason: OutriderError) -> None:
        """Cancel the handlers of all calls; their callers get `reason`. If gRPC cancelled them when the server stops,
        they would get CANCELLED, which clients do not retry."""
        self._ending = reason
        for task in self._running:
            task.cancel()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)

        async def guard(request: Any, context: Context, proceed: Proceed) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            # Asked for now: a call that gRPC has ended has none.
            peer = context.peer()
            try:
                return await proceed(request)
            except asyncio.CancelledError:
                if self._ending is None or context.done():
                    raise
                await _abort(context, self._ending)
            except OutriderError as error:
                # Bytes that are no message come from none of our clients.
                malformed = isinstance(error, InvalidField) and error.field == "request"
                if malformed or isinstance(error, Unauthenticated | PermissionDenied):
                    # Messages of errors hold nothing that callers wrote.
                    others = self._refusal_lines.due(error.reason)
                    if others is not None:
                        logger.warning("refused %s from %s: %s (and %d like it)", method, peer, error.message, others)
                await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            # The one broad catch, at the outermost boundary: gRPC would send the text of a bug to the caller,
            # and that text may hold another tenant's prompt.
            except Exception:
                logger.exception("bug while handling %s", method)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error")
            finally:
                self._running.discard(task)

        return None if handler is None else guarded(handler, guard)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Finds the tenant of every call by its headers: unknown callers and calls over the limits are refused before a
    message is read. Health needs no token: probes have none, and it reveals only whether the service serves. Must be
    last in the list, after `ErrorInterceptor`, which turns what this one raises into a status."""

    def __init__(self, authenticator: Authenticator, calls: Calls) -> None:
        # May be replaced while the server runs.
        self.authenticator = authenticator
        self._calls = calls
        self._pace = RefusalPace(calls.limits.refused)
        self._unread_health = NewestWaits(calls.limits.health)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        for_health = method.startswith(f"/{health.SERVICE_NAME}/")
        watches = method == f"/{health.SERVICE_NAME}/Watch"

        async def guard(request: Any, context: Context, proceed: Proceed) -> Any:
            # Stands for the tenant of callers without a valid token, where their refusals are paced. No tenant has this
            # name.
            tenant = ""
            try:
                if for_health:
                    with self._calls.health(watches=watches):
                        return await proceed(request)
                caller = self.authenticator.caller(context.invocation_metadata() or ())
                current_caller.set(caller)
                tenant = caller.tenant
                with self._calls.of(tenant):
                    return await proceed(request)
            except OutriderError as error:
                size = _request_bytes.get()
                refused_large = size > LARGE_BYTES and error.code not in _NOT_THE_CALLERS_FAULT
                if isinstance(error, QuotaExceeded | Unauthenticated) or refused_large:
                    _drop_request(error, context)
                    await self._pace.wait(tenant, size)
                raise

        if handler is None:
            return None
        limits = self._calls.limits
        if for_health and not handler.request_streaming:
            # It takes its place when its request is there: others could take all places with headers alone.
            return _request_within(guarded(handler, guard), limits, self._unread_health)
        if handler.request_streaming:
            return guarded(_first_message_within(handler, limits.first_message_seconds), guard)
        return guarded(_request_within(handler, limits), guard)
