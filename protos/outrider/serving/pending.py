"""A service whose servicer comes later: its calls are answered from the start, and refused until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc

from outrider.errors import Loading

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class PendingService(grpc.GenericRpcHandler):
    """Refuses calls of the service `name` with `Loading`, until `fill` brings its servicer.

    gRPC takes no handlers once a server has started, but asks those it has at every call. So this one is registered
    before, stands in for a server towards the generated `add_...Servicer_to_server`, and asks what it was given.
    """

    def __init__(self, name: str, loading: str) -> None:
        """`loading` is the message that callers get."""
        self._path = f"/{name}/"
        self._loading = loading
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Have these answer from now on. What a servicer's `add_...` calls."""
        self._handlers = (*self._handlers, *handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: Mapping[str, Handler]) -> None:
        """Nothing: generated code registers the same handlers by either way."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler of a call; None for one of another service, or of a method that is not there."""
        if not str(handler_call_details.method).startswith(self._path):
            return None
        if not self._handlers:
            return self._refusal()
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)

    def _refusal(self) -> Handler:
        async def refuse(_requests: object, _context: object) -> NoReturn:
            raise Loading(self._loading)

        # Answered at the headers, so that one kind does for methods of all kinds.
        made: Handler = grpc.stream_stream_rpc_method_handler(refuse)
        return made
