"""A service whose servicer is added later: its calls are refused until then."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import grpc
from google.protobuf import descriptor_pool

from outrider.errors import Loading
from outrider.serving.interceptors import Handler


class PendingService(grpc.GenericRpcHandler):
    """Refuses calls of the service `name` with `Loading`, until its handlers are added. gRPC takes no handlers once a
    server has started, but calls those it has for every request. So this one is registered before; it has a server's
    methods for the generated `add_...Servicer_to_server`, and forwards to what was added."""

    def __init__(self, name: str, loading: str) -> None:
        """`loading` is the message that callers get, and the seconds since now are in its metadata. The generated code
        of `name` must have been imported."""
        service = descriptor_pool.Default().FindServiceByName(name)
        # Only these: metrics have a series for each method that is known, and callers are not authenticated yet.
        self._methods = frozenset(f"/{name}/{method.name}" for method in service.methods)
        self._loading = loading
        self._made_at = time.monotonic()
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Use these handlers from now on. Called by generated code."""
        self._handlers = (*self._handlers, *handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: Mapping[str, Handler]) -> None:
        """Do nothing: generated code registers the same handlers both ways."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler of a call; None for another service or an unknown method."""
        if handler_call_details.method not in self._methods:
            return None
        if not self._handlers:
            # Refused at the headers, so this kind does for methods of all kinds.
            refusal: Handler = grpc.stream_stream_rpc_method_handler(self._refuse)
            return refusal
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)

    async def _refuse(self, _requests: object, _context: object) -> NoReturn:
        raise Loading(self._loading, seconds=round(time.monotonic() - self._made_at))
