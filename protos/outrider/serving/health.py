"""grpc.health.v1 with readiness and liveness, which are two services of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.healthcheck import LIVENESS, READINESS

_Status = health_pb2.HealthCheckResponse
SERVICE_NAME = "grpc.health.v1.Health"


class _Flag:
    """A status, and an event for its next change."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.changed = asyncio.Event()

    def turn(self, on: bool) -> None:
        if on != self.on:
            self.on = on
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

    def response(self) -> Any:
        return _Status(status=_Status.SERVING if self.on else _Status.NOT_SERVING)


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of the services of one process, which live and die together.

    Readiness, whether calls are taken, under the services' names, "readiness" and "": NOT_SERVING until it is set, and
    again while the process drains. Liveness, whether the process should be kept, under "liveness": SERVING from start
    to end, unless its work makes no progress.

    The stock servicer writes to watchers while it holds the lock that a change of status needs: one watcher that does
    not read would keep a failure from all others. This one has no lock.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._live, self._ready = _Flag(True), _Flag(False)
        self._flags = dict.fromkeys((*services, READINESS, ""), self._ready) | {LIVENESS: self._live}
        self._closed = False

    @property
    def serving(self) -> bool:
        return self._ready.on

    @property
    def closed(self) -> bool:
        """Whether the process drains."""
        return self._closed

    def set_serving(self, serving: bool) -> None:
        """Change the readiness of all services, and wake watchers. Ignored after `close`."""
        if not self._closed:
            self._ready.turn(serving)

    def set_live(self, live: bool) -> None:
        self._live.turn(live)

    def close(self) -> None:
        """Not ready from now on, whatever is set later. Liveness does not change."""
        self.set_serving(False)
        self._closed = True

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._flags:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._flags[request.service].response()

    async def Watch(self, request: Any, context: Any) -> None:
        if request.service not in self._flags:
            # The protocol requires a status here, not an error, and a stream that stays open.
            await context.write(_Status(status=_Status.SERVICE_UNKNOWN))
            await asyncio.Event().wait()
        flag = self._flags[request.service]
        while True:
            changed = flag.changed
            await context.write(flag.response())
            await changed.wait()
