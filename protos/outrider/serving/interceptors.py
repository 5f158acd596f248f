"""Server interceptors: errors become statuses with details, and nobody unknown, or one too many, gets in."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from outrider.errors import (
    DeadlineExceeded,
    InvalidField,
    OutriderError,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)
from outrider.serving import health
from outrider.serving.calls import Calls
from outrider.serving.pacing import RefusalPace, is_large
from outrider.serving.refusals import RefusalLog
from outrider.serving.tenancy import Authenticator, set_current_caller
from outrider.wire.trees import status_of

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Guard = Callable[[Context], AbstractAsyncContextManager[None]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


# Whose calls those are that show no token, to whoever counts them. No tenant is called so.
_NOBODY_KNOWN = ""

# By (request_streaming, response_streaming): where a handler keeps its behaviour, and what makes one.
_KINDS: Mapping[tuple[bool, bool], tuple[str, Any]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def guarded(handler: Handler, guard: Guard) -> Handler:
    """`handler` with every call run inside `guard(context)`, all that it writes included: one that is a generator
    becomes one that calls `context.write`, since gRPC writes for a generator, and leaves it to the garbage collector
    when the call is cancelled meanwhile."""
    kind, make = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour = getattr(handler, kind)
    wrap = _guarded_generator if inspect.isasyncgenfunction(behaviour) else _guarded_coroutine
    wrapped: Handler = make(wrap(behaviour, guard), handler.request_deserializer, handler.response_serializer)
    return wrapped


def _guarded_coroutine(behaviour: Any, guard: Guard) -> Any:
    async def handle(request: Any, context: Context) -> Any:
        async with guard(context):
            return await behaviour(request, context)

    return handle


def _guarded_generator(behaviour: Any, guard: Guard) -> Any:
    async def handle(request: Any, context: Context) -> None:
        # Closed here, so that a cancelled call frees what it holds at once.
        async with guard(context), aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return handle


# Of the message that the call being handled has read last.
_request_bytes: ContextVar[int] = ContextVar("outrider_request_bytes", default=0)
# What a call ends with that its caller has no part in, and is to hear of at once: it asks elsewhere.
_NOT_THE_CALLERS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)

# The deadline of the streaming call being handled, until its first message has come.
_first_message: ContextVar[asyncio.Timeout] = ContextVar("outrider_first_message")


def _reading(behaviour: Any, entered: Callable[[Any, Context], AbstractAsyncContextManager[Any]]) -> Any:
    """`behaviour` run inside `entered(requests, context)`, on what that gives for the call's requests."""

    async def answer(requests: Any, context: Context) -> Any:
        async with entered(requests, context) as given:
            return await behaviour(given, context)

    async def answers(requests: Any, context: Context) -> AsyncIterator[Any]:
        async with entered(requests, context) as given, aclosing(behaviour(given, context)) as responses:
            async for response in responses:
                yield response

    return answers if inspect.isasyncgenfunction(behaviour) else answer


def _begun_inside(handler: Handler, seconds: float) -> Handler:
    """`handler` of a stream of requests, ended with `DeadlineExceeded` when no message comes within `seconds`.

    Messages are parsed by whoever reads them, which is the handler or a task of its own: either knows the call's
    deadline, and ends it with the first message.
    """
    kind, make = _KINDS[True, bool(handler.response_streaming)]
    parse, inner = _checked(handler.request_deserializer), getattr(handler, kind)

    def noted(payload: bytes) -> Any:
        deadline = _first_message.get()
        # One that is past ends the call, whatever comes now.
        if deadline.when() is not None and not deadline.expired():
            deadline.reschedule(None)
        return parse(payload)

    @asynccontextmanager
    async def begun(requests: Any, _context: Context) -> AsyncIterator[Any]:
        deadline = asyncio.timeout(seconds)
        _first_message.set(deadline)
        try:
            async with deadline:
                yield requests
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"no message has come on the stream in {seconds:g} s") from None

    made: Handler = make(_reading(inner, begun), noted, handler.response_serializer)
    return made


def _read_inside(handler: Handler, seconds: float) -> Handler:
    """`handler` of a lone request as one that begins at the headers and reads its request itself.

    gRPC reads a lone request before any handler runs: a caller that sends headers alone would take a place before it
    is asked who it is, for as long as it likes, and bytes that are no message would be a bug in gRPC's eyes. Raises
    `DeadlineExceeded` when the request takes longer than `seconds`, `InvalidField` for malformed bytes.
    """
    kind, _ = _KINDS[False, bool(handler.response_streaming)]
    _, make = _KINDS[True, bool(handler.response_streaming)]
    parse, inner = _checked(handler.request_deserializer), getattr(handler, kind)

    @asynccontextmanager
    async def read(_requests: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(seconds):
                request = await context.read()
        except TimeoutError:
            raise DeadlineExceeded("no request has come") from None
        if request is grpc.aio.EOF:
            raise InvalidField("request", "is missing")
        yield request

    made: Handler = make(_reading(inner, read), parse, handler.response_serializer)
    return made


def _checked(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """`parse`, None for bytes as they are, that raises `InvalidField` for malformed bytes, where the handler reads, and
    notes how many there are."""

    def checked(payload: bytes) -> Any:
        _request_bytes.set(len(payload))
        try:
            return payload if parse is None else parse(payload)
        except DecodeError:
            raise InvalidField("request", "is not a valid message") from None

    return checked


async def _abort(context: Context, error: OutriderError) -> None:
    """End the call with the error's status. What its handler set to be sent with the end stays, as gRPC's
    `abort_with_status` would not have it."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, (*status.trailing_metadata, *(context.trailing_metadata() or ())))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns `OutriderError` into its status with `google.rpc` details, and any bug into a bare INTERNAL."""

    def __init__(self) -> None:
        self._refusals = RefusalLog()
        self._running: set[asyncio.Task[Any]] = set()
        self._ending: OutriderError | None = None

    def end_calls(self, reason: OutriderError) -> None:
        """Cancel the handlers of all calls; their callers get `reason`. When gRPC itself cancels what is left of a
        server that stops, they get CANCELLED, as if they had wished it, and do not try again."""
        self._ending = reason
        for task in self._running:
            task.cancel()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            try:
                yield
            except asyncio.CancelledError:
                if self._ending is None or context.done():
                    raise
                await _abort(context, self._ending)
            except OutriderError as error:
                if isinstance(error, Unauthenticated | PermissionDenied) or _is_malformed(error):
                    self._refusals.add(method, context.peer(), error)
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
    """Finds the tenant of every call by its headers: strangers are turned away before a message of theirs is read, and
    callers of too many calls too. Health is for everybody: probes have no token, and it says nothing but whether the
    service serves.

    Must stand last in the list, after `ErrorInterceptor`, which makes a status of what this one raises.
    """

    def __init__(
        self, authenticator: Authenticator, calls: Calls, request_seconds: float, first_message_seconds: float
    ) -> None:
        """`request_seconds`: what a lone request may take to come; `first_message_seconds`: the first of a stream."""
        # May be exchanged for another while calls come.
        self.authenticator = authenticator
        self._calls = calls
        self._pace = RefusalPace(calls.limits.refused)
        self._request_seconds = request_seconds
        self._first_message_seconds = first_message_seconds

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        for_health = str(handler_call_details.method).startswith(f"/{health.SERVICE_NAME}/")

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            whose = _NOBODY_KNOWN
            try:
                if for_health:
                    with self._calls.health():
                        yield
                    return
                caller = self.authenticator.caller(context.invocation_metadata() or ())
                set_current_caller(caller)
                whose = caller.tenant
                with self._calls.of(caller.tenant):
                    yield
            except OutriderError as error:
                size = _request_bytes.get()
                refused_large = is_large(size) and error.code not in _NOT_THE_CALLERS
                if isinstance(error, QuotaExceeded | Unauthenticated) or refused_large:
                    await self._pace.wait(whose, size)
                raise

        if handler is None:
            return None
        if handler.request_streaming:
            return guarded(_begun_inside(handler, self._first_message_seconds), guard)
        return guarded(_read_inside(handler, self._request_seconds), guard)


def _is_malformed(error: OutriderError) -> bool:
    """Whether a call's bytes were no message, which no client of ours sends."""
    return isinstance(error, InvalidField) and error.field == "request"
