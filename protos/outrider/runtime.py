"""Process-wide set-up of a service before gRPC is imported, and how it runs. Imports no gRPC."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from outrider.log_limit import LogLimit
from outrider.visible import one_line

Result = TypeVar("Result")
# grpcio 1.80 and later poll through EventEngine, which costs some 90 us per round trip. Only both switch it off.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
# Python's thread switch interval. With CPython's 5 ms a commit waits in the draft link while the engine computes.
SWITCH_SECONDS = 0.0002
# Iterations for which a thread of libgomp spins for the others before it sleeps: some 10 us, instead of milliseconds.
# Processes that compute on the same cores otherwise make each other's steps tens of times as long, since threads spin
# while the one that they wait for has no core. Alone, a step takes as long as before
# (`benchmarks/results/2026-11-25-cpu-openmp-spinning.md`).
GOMP_SPINCOUNT = "10000"
# Compiled products that oneDNN keeps, and that PyTorch keeps of its: one for each number of rows and each matrix, of
# some 0.4 MB. With 1,024 each, the default, a process of bf16 grew by 0.8 GB while requests of new lengths came; fewer
# are as fast (`benchmarks/results/2026-11-27-cpu-onednn-cache.md`).
ONEDNN_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
# Thresholds of the garbage collector, but while a process starts.
_USUAL_THRESHOLDS = gc.get_threshold()
# How many parts of this process serve; see `settled`.
_settled = 0
# Characters of a log line. Chosen: several times the longest of ours.
MOST_LINE = 2000
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def prepare_grpc() -> None:
    """Choose gRPC's poller, and leave out its fork handlers. Must run before the first `import grpc`; values set by the
    operator win."""
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    # Nothing here forks without a program to run. Beside threads in calls, 58 of 1,500 children crashed in the handlers
    # before they came to theirs, and none without (two CPU cores, grpcio 1.85).
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def prepare_openmp() -> None:
    """Bound the spinning of OpenMP's threads. Must run before the first `import torch`; the operator's settings win."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", GOMP_SPINCOUNT)


def prepare_onednn() -> None:
    """Bound what is kept for products of each size. Must run before the first `import torch`; the operator's settings
    win."""
    for name, capacity in ONEDNN_CACHES.items():
        os.environ.setdefault(name, capacity)


def prepare_triton() -> None:
    """Keep compiled kernels beside models and other compiled code, so that one folder is to be kept between starts of a
    container. Must run before the first `import triton`; the operator's setting wins."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TRITON_CACHE_DIR", str(base / "outrider" / "triton"))


def switch_threads_often() -> None:
    """Let a woken thread run soon while others compute. For a process that answers within a step."""
    sys.setswitchinterval(SWITCH_SECONDS)


def prepare_service() -> None:
    """Prepare a process that serves. Must run before it imports gRPC or PyTorch."""
    prepare_grpc()
    prepare_openmp()
    prepare_onednn()
    prepare_triton()
    switch_threads_often()
    collect_seldom()


class OneLineFormatter(logging.Formatter):
    """Writes each message on one line of bounded length: text from a peer cannot start a new line, move a terminal's
    cursor, or fill a disk."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return one_line(line if len(line) <= MOST_LINE else f"{line[:MOST_LINE]}... ({len(line)} characters)")


class OthersSeldom(logging.Filter):
    """Lets a line of each place in other libraries through in ten seconds, with a count of the others. A caller of a
    service can make them write one for each request."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LogLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        # What the names of our packages begin with.
        if record.name.startswith(("outrider", "target_service", "draft_service", "tree_", "__main__")):
            return True
        others = self._limit.due(f"{record.name}:{record.lineno}")
        if others:
            record.msg, record.args = f"{record.getMessage()} (and {others} like it)", ()
        return others is not None


def collect_seldom() -> None:
    """Run the garbage collector rarely until `settled`, while a process starts up. A fifth of the import time of
    PyTorch and transformers was spent collecting what lives as long as the process (1.1 of 5.1 s)."""
    # For some ten collections, not hundreds.
    gc.set_threshold(100_000, 50, 1000)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Exclude all existing objects from garbage collection while a started process serves. Libraries and a model leave
    hundreds of thousands that live as long as the process: a full collection would stop it for over 0.1 s. Where
    several parts of a process serve, until the last has ended."""
    global _settled
    _settled += 1
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL_THRESHOLDS)
    try:
        yield
    finally:
        _settled -= 1
        if not _settled:
            gc.unfreeze()


def configure_logging(level: str) -> None:
    """Log to stderr at `level`; libraries that log much at info level only from warning on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(LOG_FORMAT))
    handler.addFilter(OthersSeldom())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in ("httpx", "filelock", "urllib3", "numba"):
        logging.getLogger(name).setLevel(logging.WARNING)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop where that exists, which is a tenth faster per round trip."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: Result = uvloop.run(main)
    return result


# Name of threads that may still be working when the process ends; see `leave`.
LEFT_BEHIND = "left behind"


async def in_thread_to_leave(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that is abandoned when this is cancelled, unlike that of `asyncio.to_thread`: the loading
    of a model cannot be stopped. Returns or raises what `work` does; see `leave`."""
    return await asyncio.wrap_future(in_daemon_thread(work, LEFT_BEHIND))


def in_daemon_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a thread of this name that does not keep the process alive. The result cannot be cancelled."""
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()

    def run_it() -> None:
        try:
            result = work()
        # Raised again by whoever waits for the outcome.
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run_it, name=name, daemon=True).start()
    return outcome


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Have the running event loop call these on their signals while the block runs."""
    loop, added = asyncio.get_running_loop(), list[signal.Signals]()
    # Only the main thread can handle signals, and on Windows no event loop.
    if threading.current_thread() is threading.main_thread():
        with contextlib.suppress(NotImplementedError):
            for number, handle in handlers.items():
                loop.add_signal_handler(number, handle)
                added.append(number)
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)


async def until_first_ends(*awaitables: Awaitable[object], timeout: float | None = None) -> None:
    """Wait until the first of them ends, or for `timeout` seconds; cancel the others and raise what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*tasks)
    for task in done:
        task.result()


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def leave(status: int) -> NoReturn:
    """End the process without having the interpreter free each object: of a target these take it a second. Threads end
    and exit handlers run first, but for a thread that was abandoned while working: PyTorch aborts when that thread's
    objects are freed, and it may never end."""
    if all(thread.name != LEFT_BEHIND for thread in threading.enumerate()):
        # As `multiprocessing` ends its children.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may have gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that ends with it; returns or raises what it does. OpenMP keeps a team of workers for
    every thread that ever computed. Once the teams together have more workers than cores, they no longer spin between
    operations, and each operation pays for waking them: on two cores a one-row step of SmolLM2-135M takes 50 ms instead
    of 28. A team ends with its thread, so the engine's team stays the only one."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing") as pool:
        return pool.submit(work).result()
