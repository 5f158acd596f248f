"""Starts Python processes, waits for services, and measures processor time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_START_SECONDS = 400.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.05


@contextmanager
def process(
    *arguments: str, environment: Mapping[str, str] | None = None, python: str = sys.executable
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process with more variables in its environment, terminated at the end of the block."""
    running = subprocess.Popen([python, *arguments], env={**os.environ, **(environment or {})})
    try:
        yield running
    finally:
        running.terminate()
        running.wait(_STOP_SECONDS)


def wait_for(address: str, running: subprocess.Popen[bytes]) -> None:
    """Wait until the service at `address` takes calls.

    Raises:
        RuntimeError: its process ended before, or it took too long.
    """
    # Imports gRPC, which reads its environment then: a script may have to prepare that first.
    from outrider.healthcheck import check

    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if running.poll() is not None:
            raise RuntimeError(f"the service at {address} exited with status {running.returncode}")
        if check(address, timeout=1.0) == "SERVING":
            return
        time.sleep(0.2)
    raise RuntimeError(f"the service at {address} did not start in time")


def processor_seconds(pid: int) -> float:
    """Time that all threads of a process have been running, by the kernel's scheduler.

    Waiting for a core is not in it, nor are threads that have ended.
    """
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds * 1e-9


def await_turn(turn: str) -> None:
    """Say by a file TURN.ready that all is loaded, and wait until there is TURN.go; at once without a name. So engines
    start beside each other, and are measured one after the other."""
    if not turn:
        return
    Path(f"{turn}.ready").touch()
    while not Path(f"{turn}.go").exists():
        time.sleep(_POLL_SECONDS)
