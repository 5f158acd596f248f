"""Computing in a thread that ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from waits import HUNG_SECONDS

from outrider.runtime import in_passing_thread


def test_the_thread_has_ended_when_the_result_is_there() -> None:
    thread = in_passing_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_an_error_comes_through() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        in_passing_thread(fail)


def left(program: str) -> tuple[int, str, str]:
    """How a process ends that runs this program, and what it writes to its two streams."""
    imports = "import asyncio, atexit, sys, threading, time\nfrom outrider.runtime import in_thread_to_leave, leave\n"
    done = subprocess.run(
        [sys.executable, "-c", imports + program], capture_output=True, text=True, timeout=HUNG_SECONDS, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_leaving_waits_for_threads_and_runs_exit_handlers() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.2), sys.stdout.write("pool ")))
threading.Thread(target=lambda: (time.sleep(0.5), sys.stdout.write("thread "))).start()
atexit.register(lambda: sys.stdout.write("handler"))
sys.stderr.write("no line end")
leave(3)
"""
    assert left(program) == (3, "pool thread handler", "no line end")


def test_leaving_frees_nothing() -> None:
    """That takes a second with PyTorch."""
    program = """
class Kept:
    def __del__(self):
        sys.stdout.write("freed")
kept = Kept()
leave(0)
"""
    assert left(program) == (0, "", "")


def test_leaving_does_not_wait_for_an_abandoned_thread() -> None:
    program = """
async def main():
    try:
        async with asyncio.timeout(0.1):
            await in_thread_to_leave(lambda: time.sleep(3600))
    except TimeoutError:
        sys.stdout.write("gave up")
asyncio.run(main())
leave(4)
"""
    assert left(program) == (4, "gave up", "")


def test_leaving_whose_reader_has_gone() -> None:
    """As in `outrider target | head -1`."""
    program = """
import os
sys.stdout = os.fdopen(os.dup(1), "w")
sys.stdout.write("unread")
os.close(sys.stdout.fileno())
leave(0)
"""
    assert left(program) == (0, "", "")
