"""An event loop that stays awake for a while after something came, so that what comes next need not wake it.

A core that has slept takes tens of microseconds to go on, a thread on it as long again to be scheduled, and what either
does then takes twice as long as on a core that never slept, which is how a commit meets a draft between two passes
(`benchmarks/results/2026-11-25-cpu-link-hops.md`). It costs a core while requests run, and nothing once they end.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

# A busy target sends once in a pass of 3 to 15 ms, and is answered some milliseconds after that.
AWAKE_SECONDS = 0.01
MOST_AWAKE_SECONDS = 0.1
# On fewer nothing stays awake. They are needed for work: of an engine, the front of its service, two loops that are
# awake, gRPC's thread behind each, and two that are spare.
LEAST_CORES = 8


class Wakefulness:
    """Keeps the running event loop from sleeping, for some seconds after each `stir`.

    The loop looks for what came again and again, which lets go of the interpreter each time. For a process whose other
    threads compute little: they would have to ask for the interpreter back each time.
    """

    def __init__(self, seconds: float) -> None:
        """0 lets the loop sleep."""
        self.seconds = seconds
        self._until = 0.0
        self._turning = False

    def stir(self) -> None:
        """Something came. On the loop's thread."""
        if not self.seconds:
            return
        self._until = time.monotonic() + self.seconds
        if not self._turning:
            self._turn(asyncio.get_running_loop())

    def rest(self) -> None:
        """Let the loop sleep until the next `stir`."""
        self._until = 0.0

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turning = time.monotonic() < self._until
        if self._turning:
            loop.call_soon(self._turn, loop)


def awake_seconds(wanted: float) -> float:
    """For how long a loop of this process may stay awake: not at all where cores are few."""
    return wanted if usable_cores() >= LEAST_CORES else 0.0


def usable_cores(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that this process may keep busy: those it may run on, or a container's share where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), _share(groups))


def _share(groups: Path) -> float:
    """A container's share of the machine's time, in cores; without end where none is set."""
    try:
        # Microseconds of work, and in how many they may be had: of control groups of version 2, or of version 1.
        if (groups / "cpu.max").exists():
            work, period = (groups / "cpu.max").read_text().split()
        else:
            work, period = ((groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(work) / int(period) if work != "max" and int(work) > 0 else float("inf")
    except (OSError, ValueError):
        return float("inf")
