"""Busy polling: an event loop that polls for a while after each frame instead of sleeping until the next.

A core that has slept takes tens of microseconds to wake up, its thread as long again to be scheduled, and both then run
at half speed for a while: a draft that works between two passes pays all of that with each commit
(`benchmarks/results/2026-11-25-cpu-link-hops.md`). Polling keeps a core busy while requests run, and ends with them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

# Longer than from one commit to the next: 6 to 7 ms at 8B size with up to 8 requests, where growth comes in between
# (two H100, `benchmarks/results/2026-11-25-h100-widened-eleventh.md`).
BUSY_POLL_SECONDS = 0.01
MOST_BUSY_POLL_SECONDS = 0.1
# With fewer cores no loop polls. One each for engine, front, two polling loops, gRPC's threads behind them; two spare.
LEAST_CORES = 8


class BusyPolling:
    """Keeps the running event loop polling for some seconds after each `start`. Each poll releases the interpreter. For
    a process whose other threads compute little: they must acquire the interpreter again after each poll."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """With 0 seconds the loop never polls. `clock` is in seconds."""
        self.seconds = seconds
        self._clock = clock
        self._until = 0.0
        self._polling = False

    def start(self) -> None:
        """Poll until `seconds` from now, also where the loop polls already. On the loop's thread."""
        if not self.seconds:
            return
        self._until = self._clock() + self.seconds
        if not self._polling:
            self._poll(asyncio.get_running_loop())

    def stop(self) -> None:
        """Let the loop sleep until the next `start`."""
        self._until = 0.0

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self._polling = self._clock() < self._until
        if self._polling:
            loop.call_soon(self._poll, loop)


def allowed_seconds(wanted: float) -> float:
    """Seconds that a loop of this process may poll after a frame: 0 with few cores."""
    return wanted if usable_cores() >= LEAST_CORES else 0.0


def usable_cores(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that this process may keep busy: those it may run on, or its container's share if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), _share(groups))


def _share(groups: Path) -> float:
    """A container's share of the machine's time, in cores; infinite if none is set."""
    try:
        # Microseconds of work per period, from control groups of version 2 or 1.
        if (groups / "cpu.max").exists():
            work, period = (groups / "cpu.max").read_text().split()
        else:
            work, period = ((groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(work) / int(period) if work != "max" and int(work) > 0 else float("inf")
    except (OSError, ValueError):
        return float("inf")
