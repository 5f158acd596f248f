"""What a service process sets up before gRPC is imported, and how it runs. It imports no gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")

# grpcio 1.80 and later poll through EventEngine, which costs some 90 us per round trip in Python.
# Switching it off takes both.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
# Seconds after which a thread that computes in Python lets another one go on. With CPython's 5 ms a commit waits in the
# draft link for as long as the engine computes, and the draft starts after that.
SWITCH_SECONDS = 0.0002
# Control characters and what some readers take for line breaks, as they are written in Python.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_VISIBLE = {number: repr(chr(number))[1:-1] for number in _CONTROLS if number != ord("\t")}
# How much is made between two rounds of the garbage collector; while a process starts up, what makes the collector look
# ten times at what libraries leave, and not hundreds of times.
_USUAL_ROUNDS = gc.get_threshold()
_SELDOM_ROUNDS = (100_000, 50, 1000)
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def prepare_grpc(environment: MutableMapping[str, str] | None = None) -> None:
    """Choose gRPC's poller. Only works before the first `import grpc`; a value set by the operator wins."""
    (os.environ if environment is None else environment).setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)


def switch_threads_often() -> None:
    """Let a thread that was woken go on soon while others compute. For a process that answers within a step."""
    sys.setswitchinterval(SWITCH_SECONDS)


class OneLineFormatter(logging.Formatter):
    """Writes each message on one line: what a peer said cannot begin another one, nor move a terminal's cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_VISIBLE)


def collect_seldom() -> None:
    """Let the garbage collector look seldom while a process starts up: what libraries make as they are imported lives
    as long as the process, and a fifth of the time to import PyTorch and transformers went into looking for garbage
    among it (1.1 of 5.1 s on a slow core). `settled` ends it."""
    gc.set_threshold(*_SELDOM_ROUNDS)


@contextmanager
def settled() -> Iterator[None]:
    """Spares the garbage collector all objects that there are, while a process serves that has started up: libraries
    and a model leave hundreds of thousands, which live as long as it does, and to look at them all takes more than a
    tenth of a second, in which nothing else happens. What comes from now on is looked at as usual."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL_ROUNDS)
    try:
        yield
    finally:
        gc.unfreeze()


def configure_logging(level: str) -> None:
    """Log to stderr at `level`. Libraries that chat at info level are held at warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(LOG_FORMAT))
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


# What a thread is named that may be in the middle of its work when the process ends; see `leave`.
LEFT_BEHIND = "left behind"


async def in_thread_to_leave(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that nobody waits for once this is cancelled, unlike one of `asyncio.to_thread`: a model
    that is being loaded cannot be stopped. Returns or raises what `work` does; see `leave`."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Result] = loop.create_future()

    def settle(said: Callable[[], None]) -> None:
        # A closed loop means that it has been left.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if ended.done() else said())

    def run_it() -> None:
        try:
            result = work()
        # Raised again where it is awaited.
        except BaseException as error:
            raised = error
            settle(lambda: ended.set_exception(raised))
        else:
            settle(lambda: ended.set_result(result))

    threading.Thread(target=run_it, name=LEFT_BEHIND, daemon=True).start()
    return await ended


async def until_first_ends(*awaitables: Awaitable[object], timeout: float | None = None) -> None:
    """Wait until the first of them ends, or for `timeout` seconds; cancel the others and raise what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def leave(status: int) -> NoReturn:
    """End the process. Where a thread was left behind in the middle of its work, at once: the interpreter's own end
    would pull its objects from under it, and PyTorch's code aborts then."""
    if any(thread.name == LEFT_BEHIND for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that ends with it; returns or raises what it does.

    OpenMP keeps a team of workers for every thread that ever computed. Once the teams together have more workers than
    there are cores, none spins between operations any more, and each operation pays for waking them: on two cores a
    one-row step of SmolLM2-135M takes 50 ms instead of 28. A thread that ends takes its team along, so that the
    engine's stays the only one.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing") as pool:
        return pool.submit(work).result()
