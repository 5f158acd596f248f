"""A service whose servicer is added later: its calls are refused until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc

from outrider.errors import Loading

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class PendingService(grpc.GenericRpcHandler):
    """Refuses calls of the service `name` with `Loading`, until its handlers are added.

    gRPC takes no handlers once a server has started, but calls those it has for every request. So this one is
    registered before; it has a server's methods for the generated `add_...Servicer_to_server`, and forwards to what was
    added.
    """

    def __init__(self, name: str, loading: str) -> None:
        """`loading` is the message that callers get."""
        self._path = f"/{name}/"
        self._loading = loading
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Use these handlers from now on. Called by generated code."""
        self._handlers = (*self._handlers, *handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: Mapping[str, Handler]) -> None:
        """Do nothing: generated code registers the same handlers both ways."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler of a call; None for another service or an unknown method."""
        if not str(handler_call_details.method).startswith(self._path):
            return None
        if not self._handlers:
            return self._refusal()
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)

    def _refusal(self) -> Handler:
        async def refuse(_requests: object, _context: object) -> NoReturn:
            raise Loading(self._loading)

        # Refused at the headers, so this kind does for methods of all kinds.
        handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
        return handler
