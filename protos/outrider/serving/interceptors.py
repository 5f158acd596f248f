"""Server interceptors: errors become statuses with details, and nobody unknown gets in."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from outrider.errors import InvalidField, OutriderError
from outrider.serving import health
from outrider.serving.tenancy import Authenticator, set_current_tenant
from outrider.wire.trees import status_of

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Guard = Callable[[Context], AbstractAsyncContextManager[None]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


# By (request_streaming, response_streaming): where a handler keeps its behaviour, and what makes one.
_KINDS: Mapping[tuple[bool, bool], tuple[str, Any]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def guarded(handler: Handler, guard: Guard) -> Handler:
    """`handler` with every call run inside `guard(context)`. Takes generator and `context.write` handlers."""
    kind, make = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour = getattr(handler, kind)
    wrap = _guarded_generator if inspect.isasyncgenfunction(behaviour) else _guarded_coroutine
    wrapped: Handler = make(wrap(behaviour, guard), handler.request_deserializer, handler.response_serializer)
    return wrapped


def _guarded_coroutine(behaviour: Any, guard: Guard) -> Any:
    async def handle(request: Any, context: Context) -> Any:
        async with guard(context):
            return await behaviour(_parsed(request), context)

    return handle


def _guarded_generator(behaviour: Any, guard: Guard) -> Any:
    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        # Closed here and not by the garbage collector, so that a cancelled call frees what it holds at once.
        async with guard(context), aclosing(behaviour(_parsed(request), context)) as responses:
            async for response in responses:
                yield response

    return handle


def _parsed(request: Any) -> Any:
    """The request, or the error that parsing it left in its place."""
    if isinstance(request, InvalidField):
        raise request
    return request


def _parsing(handler: Handler) -> Handler:
    """`handler` with malformed bytes turned into `InvalidField`, where gRPC would answer UNKNOWN and log a bug.

    gRPC parses a lone request before any handler runs, so its error travels as a value; a stream's is raised where
    the handler reads.
    """
    parse = handler.request_deserializer
    if parse is None:
        return handler
    streaming = handler.request_streaming

    def tolerant(payload: bytes) -> Any:
        try:
            return parse(payload)
        except DecodeError:
            error = InvalidField("request", "is not a valid message")
        if streaming:
            raise error
        return error

    kind, make = _KINDS[bool(streaming), bool(handler.response_streaming)]
    made: Handler = make(getattr(handler, kind), tolerant, handler.response_serializer)
    return made


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns `OutriderError` into its status with `google.rpc` details, and any bug into a bare INTERNAL."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            try:
                yield
            except OutriderError as error:
                await context.abort_with_status(rpc_status.to_status(status_of(error)))
            except grpc.aio.AbortError:
                raise
            # The one broad catch, at the outermost boundary: gRPC would send the text of a bug to the caller,
            # and that text may hold another tenant's prompt.
            except Exception:
                logger.exception("bug while handling %s", method)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error")

        return None if handler is None else guarded(_parsing(handler), guard)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Finds the tenant of every call, and turns strangers away before the handler runs. Health is for everybody: probes
    have no token, and it says nothing but whether the service serves.

    Must stand after `ErrorInterceptor` in the list, which makes a status of what this one raises.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if str(handler_call_details.method).startswith(f"/{health.SERVICE_NAME}/"):
            return handler

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            set_current_tenant(self._authenticator.tenant(context.invocation_metadata() or ()))
            yield

        return None if handler is None else guarded(handler, guard)
