"""grpc.health.v1, tied to whether the work behind the socket goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse

SERVICE_NAME = "grpc.health.v1.Health"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of the services of one process, which live and die together, under their names and under "".

    The stock servicer writes to watchers while it holds the lock that a change of status needs: one watcher
    that does not read would keep all others from hearing of a death. This one has no lock.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset(services) | {""}
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Change the status of all services, and wake watchers. Ignored after `close`."""
        if serving == self._serving or self._closed:
            return
        self._serving = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """NOT_SERVING from now on, whatever is set later."""
        self.set_serving(False)
        self._closed = True

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._response()

    async def Watch(self, request: Any, context: Any) -> None:
        if request.service not in self._names:
            # The protocol wants an answer here, not an error, and a stream that stays open.
            await context.write(_Status(status=_Status.SERVICE_UNKNOWN))
            await asyncio.Event().wait()
        while True:
            changed = self._changed
            await context.write(self._response())
            await changed.wait()

    def _response(self) -> Any:
        return _Status(status=_Status.SERVING if self._serving else _Status.NOT_SERVING)
