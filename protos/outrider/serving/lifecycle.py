"""A server process from loading to stopped: the port is open throughout, and a signal drains."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

from outrider.errors import EngineDead
from outrider.runtime import signal_handlers, until_first_ends
from outrider.serving.server import LAST_WORDS_SECONDS, GrpcServer

logger = logging.getLogger(__name__)
# Chosen, both.
HEARTBEAT_INTERVAL = 0.25
STOP_GRACE = 2.0


class Worker(Protocol):
    """The work behind a server, as its lifecycle sees it."""

    def alive(self) -> bool:
        """Whether it makes progress. False sets readiness and liveness to NOT_SERVING; it may become true again."""

    def failure(self) -> BaseException | None:
        """Why it has failed for good, if it has: the process then ends with a non-zero status."""

    async def drain(self) -> None:
        """Take no new work, and return when the running work has ended."""


async def load_and_serve(
    server: GrpcServer,
    load: Callable[[], Awaitable[Worker]],
    drain_seconds: float,
    stopping: asyncio.Event | None = None,
) -> int:
    """Open a server's port, `load` what it serves, and serve until SIGTERM, SIGINT or the worker's failure.

    While it loads, the process is live and not ready, and the server refuses all calls but those of health. `load`
    provides the servicers. On a signal (`stopping` stands in for one): cancel the loading, or set NOT_SERVING, drain
    for at most `drain_seconds`, and stop. A second signal skips the wait. SIGHUP reads the tokens again.

    Returns the process's exit status. Raises `SettingsError` when the port cannot be bound, and what `load` raises,
    with the port closed.
    """
    stopping, skip_wait = stopping or asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (skip_wait if stopping.is_set() else stopping).set()

    with signal_handlers({signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: server.reload}):
        await server.start()
        logger.info("loading; health is answered on %s", server.address)
        loading = asyncio.ensure_future(load())
        try:
            await until_first_ends(loading, stopping.wait())
        except BaseException:
            await server.stop(0.0)
            raise
        if loading.cancelled() or loading.exception() is not None:
            await server.stop(0.0)
            logger.info("stopped while loading")
            return 0
        worker = loading.result()
        server.health.set_serving(worker.alive())
        failure = await _watch(server, worker, stopping)
        server.health.close()
        if failure is None:
            logger.info("draining for at most %g s", drain_seconds)
            await until_first_ends(worker.drain(), _failed(worker), skip_wait.wait(), timeout=drain_seconds)
            failure = worker.failure()
        if failure is not None:
            logger.critical("the engine died: %s", type(failure).__name__, exc_info=failure)
            ending = server.stop(0.0, EngineDead("the engine has failed"))
        else:
            ending = server.stop(STOP_GRACE)
        await until_first_ends(ending, skip_wait.wait(), timeout=STOP_GRACE + LAST_WORDS_SECONDS + 1.0)
        logger.info("stopped")
        return 0 if failure is None else 1


async def _watch(server: GrpcServer, worker: Worker, stopping: asyncio.Event) -> BaseException | None:
    """Keep health up to date until the worker fails (returns why) or `stopping` is set (returns None)."""
    while not stopping.is_set():
        failure = worker.failure()
        if failure is not None:
            return failure
        alive = worker.alive()
        if alive != server.health.serving and not server.health.closed:
            logger.log(logging.INFO if alive else logging.ERROR, "health is %sserving", "" if alive else "not ")
        server.health.set_serving(alive)
        server.health.set_live(alive)
        await until_first_ends(stopping.wait(), timeout=HEARTBEAT_INTERVAL)
    return worker.failure()


async def _failed(worker: Worker) -> None:
    while worker.failure() is None:
        await asyncio.sleep(HEARTBEAT_INTERVAL)
