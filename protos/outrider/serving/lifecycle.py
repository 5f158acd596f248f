"""From loading to stopped: the port is open all the while, a signal drains, a death does not wait."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from outrider.errors import EngineDead
from outrider.serving.server import LAST_WORDS_SECONDS, GrpcServer

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 0.25
STOP_GRACE = 2.0


class Worker(Protocol):
    """The work behind a server, as far as its lifecycle goes."""

    def alive(self) -> bool:
        """Whether it makes progress. False makes health NOT_SERVING, liveness too; it may become true again."""

    def failure(self) -> BaseException | None:
        """Why it will never go on, if so: the process then ends with a non-zero status."""

    async def drain(self) -> None:
        """Take nothing new, and return when what runs has ended."""


async def serve_until_stopped(
    server: GrpcServer, worker: Worker, drain_seconds: float, stopping: asyncio.Event | None = None
) -> int:
    """Run a started server until SIGTERM, SIGINT or the worker's death; returns the process's exit status.

    On a signal (`stopping` stands in for one): NOT_SERVING, drain for at most `drain_seconds`, stop. A second
    signal skips the wait. SIGHUP has the tokens read anew.
    """
    stopping = stopping or asyncio.Event()
    impatient = asyncio.Event()
    with _signals(lambda: impatient.set() if stopping.is_set() else stopping.set(), server.reload):
        return await _run(server, worker, drain_seconds, stopping, impatient)


async def load_and_serve(
    server: GrpcServer,
    load: Callable[[], Awaitable[Worker]],
    drain_seconds: float,
    stopping: asyncio.Event | None = None,
) -> int:
    """Open a server's port, `load` what it serves, and go on as `serve_until_stopped`.

    While it loads, health says that the process lives and is not ready, and all else is refused by the server. `load`
    provides the servicers. A signal while it loads cancels it, and stops at once with status 0; what it raises is
    raised, with the port closed. Raises `SettingsError` when the port cannot be had.
    """
    stopping = stopping or asyncio.Event()
    impatient = asyncio.Event()
    with _signals(lambda: impatient.set() if stopping.is_set() else stopping.set(), server.reload):
        await server.start()
        logger.info("loading; health is answered on %s", server.address)
        try:
            worker = await _unless(load(), stopping)
        except BaseException:
            await server.stop(0.0)
            raise
        if worker is None:
            await server.stop(0.0)
            logger.info("stopped while loading")
            return 0
        return await _run(server, worker, drain_seconds, stopping, impatient)


async def _unless(work: Awaitable[Worker], stopping: asyncio.Event) -> Worker | None:
    """What `work` returns or raises; None, having cancelled it, when a signal to stop came before."""
    loading, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        return loading.result() if loading.done() else None
    finally:
        for task in (loading, stopped):
            task.cancel()
        await asyncio.gather(loading, stopped, return_exceptions=True)


async def _run(
    server: GrpcServer, worker: Worker, drain_seconds: float, stopping: asyncio.Event, impatient: asyncio.Event
) -> int:
    server.health.set_serving(worker.alive())
    failure = await _watch(server, worker, stopping)
    server.health.close()
    if failure is None:
        logger.info("draining for at most %g s", drain_seconds)
        await _first(worker.drain(), _died(worker), impatient.wait(), timeout=drain_seconds)
        failure = worker.failure()
    if failure is not None:
        logger.critical("the engine died: %s", type(failure).__name__, exc_info=failure)
        ending = server.stop(0.0, EngineDead("the engine has failed"))
    else:
        ending = server.stop(STOP_GRACE)
    await _first(ending, impatient.wait(), timeout=STOP_GRACE + LAST_WORDS_SECONDS + 1.0)
    logger.info("stopped")
    return 0 if failure is None else 1


@contextmanager
def _signals(stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT, `reload` on SIGHUP; only the main thread can have signals."""
    loop = asyncio.get_running_loop()
    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    for name, handle in handlers.items():
        loop.add_signal_handler(name, handle)
    try:
        yield
    finally:
        for name in handlers:
            loop.remove_signal_handler(name)


async def _watch(server: GrpcServer, worker: Worker, stopping: asyncio.Event) -> BaseException | None:
    """Keep health true to the worker until a signal to stop (None) or until it died (why)."""
    while not stopping.is_set():
        failure = worker.failure()
        if failure is not None:
            return failure
        alive = worker.alive()
        if alive != server.health.serving:
            logger.log(logging.INFO if alive else logging.ERROR, "health is %sserving", "" if alive else "not ")
        server.health.set_serving(alive)
        server.health.set_live(alive)
        await _first(stopping.wait(), timeout=HEARTBEAT_INTERVAL)
    return worker.failure()


async def _died(worker: Worker) -> None:
    while worker.failure() is None:
        await asyncio.sleep(HEARTBEAT_INTERVAL)


async def _first(*awaitables: Awaitable[object], timeout: float) -> None:
    """Wait for the first to end, or for `timeout` seconds; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
