"""NVIDIA's Multi-Process Service (MPS) for a GPU that target and draft share: `outrider up` starts its daemon.

Without MPS, two processes share a GPU by time slices: while the kernels of one run, those of the other wait, and drafts
arrive too late for their step. Under MPS, kernels of both run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider_client.local.process import Child

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# Where clients look for a daemon if the environment names no directory.
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
# What happens without MPS to two processes on one GPU.
TAKE_TURNS = "the two take turns on the GPU, and drafts come late"
# Chosen.
_POLL_SECONDS = 0.05
# For a daemon to have its socket, for a first CUDA program, for `quit`, and for the end after it and after each signal.
# Chosen, not measured: without the driver's persistence mode, a first program takes seconds.
START_SECONDS, PROBE_SECONDS, QUIT_SECONDS, STOP_SECONDS = 5.0, 30.0, 5.0, 2.0
# A minimal CUDA program: it fails as the services would where a daemon runs but cannot start its servers.
PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
error = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
error = error or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
error = error or cuda.cuDevicePrimaryCtxRelease_v2(device)
sys.exit(f"CUDA error {error}" if error else 0)
"""


class _Unusable(Exception):
    """MPS cannot be used: the reason, and the remedy."""


@dataclass
class Mps:
    """A daemon for one target and its draft, from `start` to `stop`; or the user's own, or none, with the reason."""

    # The placement's summary: `start` reports it, and how the GPU is shared, or what happens otherwise.
    _placed: str
    _report: Callable[[str], None]
    otherwise: str = TAKE_TURNS
    # The directories of its sockets and logs, by the variables that name them; empty for none of ours.
    _directories: Mapping[str, str] = field(default_factory=dict)
    _child: Child | None = None
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=1))
    _watch: asyncio.Task[None] | None = None

    def environment(self, service: str) -> Mapping[str, str | None]:
        """Variables for the service "target" or "draft"; None for one that it must not inherit."""
        if not self._directories or service not in ("target", "draft"):
            return {}
        # A share of the GPU that the user sets is for the draft alone: every request waits for the target's passes.
        return {**self._directories, **({SHARE: None} if service == "target" else {})}

    async def start(self) -> bool:
        """Start a daemon, unless the user has one, and report which. Returns whether there is one: a failure costs only
        speed, and raises nothing."""
        try:
            running = self._running()
            if running is None:
                await self._start_daemon()
        except _Unusable as error:
            await self.stop()
            reason, remedy = error.args
            self._report(self._placed)
            self._report(f"no MPS: {reason}. So {self.otherwise}: {remedy}")
            return False
        self._report(f"{self._placed} by MPS" + ("" if running is None else f", of the daemon that runs in {running}"))
        return True

    async def stop(self) -> None:
        """End the daemon that `start` started, and its servers. Call it when the services have ended: it kills servers
        that still have clients."""
        if self._watch is not None:
            self._watch.cancel()
        if self._child is not None:
            await self._quit(self._child)
        if self._directories:
            pipes = self._directories[PIPES]
            await self._kill_left(pipes)
            shutil.rmtree(Path(pipes).parent, ignore_errors=True)
        if self._child is not None:
            await _ended(self._child, STOP_SECONDS)
        self._directories, self._child, self._watch = {}, None, None

    def _running(self) -> Path | None:
        """The directory of the user's running daemon, if any. A socket without a pid file is left from an ended one."""
        named = os.environ.get(PIPES, "")
        pipes = Path(named) if named else DEFAULT_PIPES
        if all((pipes / name).exists() for name in ("control", f"{CONTROL}.pid")):
            return pipes
        if named:
            raise _Unusable(
                f"{PIPES} names {pipes}, where no daemon runs", f"start one with `{CONTROL} -d`, or unset the variable"
            )
        return None

    async def _start_daemon(self) -> None:
        program = shutil.which(CONTROL)
        if program is None:
            raise _Unusable(
                f"{CONTROL} is not on PATH", "install it, it is a part of NVIDIA's driver; --no-mps leaves it out"
            )
        remedy = f"`{CONTROL} -f` by hand may say why; --no-mps leaves it out"
        try:
            # The path of a socket has at most 107 bytes; TMPDIR and XDG_RUNTIME_DIR may be long.
            folder = tempfile.mkdtemp(prefix="outrider-mps-", dir="/tmp")
            self._directories = directories = {PIPES: f"{folder}/pipe", LOGS: f"{folder}/log"}
            for path in directories.values():
                os.mkdir(path)
            environment = {**directories, **_withheld()}
            self._child = child = await Child.start(CONTROL, (program, "-f"), self._tail.append, environment)
            await self._wait_listening(child, Path(directories[PIPES]) / "control", remedy)
            # A CUDA program under the daemon, which starts its server for it.
            probe = (sys.executable, "-P", "-c", PROBE)
            status, output = await _outcome(probe, "", directories, PROBE_SECONDS)
        except OSError as error:
            raise _Unusable(f"{CONTROL} cannot be started: {error.strerror or error}", remedy) from error
        if status != 0:
            reason = "it did not end" if status is None else output or f"status {status}"
            raise _Unusable(f"a CUDA program cannot run under it ({reason})", remedy)
        self._watch = asyncio.create_task(self._report_end(child))

    async def _wait_listening(self, child: Child, socket: Path, remedy: str) -> None:
        """Return once the daemon has its socket. Raises `_Unusable` when it ends, or takes too long."""
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while not socket.exists():
            if child.status is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), STOP_SECONDS)
                line = f": {self._tail[-1]}" if self._tail else ""
                raise _Unusable(f"{CONTROL} ended with status {child.status}{line}", remedy)
            if asyncio.get_running_loop().time() > deadline:
                raise _Unusable(f"{CONTROL} did not listen within {START_SECONDS:g} s", remedy)
            await asyncio.sleep(_POLL_SECONDS)

    async def _report_end(self, child: Child) -> None:
        await _ended(child, math.inf, every=1.0)
        self._report(f"{CONTROL} ended with status {child.status}: what starts from now on shares the GPU without MPS")

    async def _quit(self, child: Child) -> None:
        """Send `quit`, as the manual describes, then SIGTERM if the daemon still runs."""
        program = shutil.which(CONTROL)
        if program is not None and child.status is None:
            with contextlib.suppress(OSError):
                await _outcome((program,), "quit\n", self._directories, QUIT_SECONDS)
        if not await _ended(child, STOP_SECONDS):
            child.send_signal(signal.SIGTERM)
            await _ended(child, STOP_SECONDS)

    async def _kill_left(self, pipes: str) -> None:
        """Kill what still runs: the daemon, or servers that it left."""
        deadline = asyncio.get_running_loop().time() + STOP_SECONDS
        while left := _processes_of(pipes):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_POLL_SECONDS)


def _withheld() -> dict[str, None]:
    """Variables that a daemon must not inherit. A share of the GPU would apply to all of its clients. Under a list of
    GPU numbers a daemon renumbers them, and its clients would use others; UUIDs do not change."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    by_number = any(name.strip().isdecimal() for name in listed)
    return dict.fromkeys((SHARE, "CUDA_VISIBLE_DEVICES") if by_number else (SHARE,))


async def _ended(child: Child, seconds: float, every: float = _POLL_SECONDS) -> bool:
    """Whether the process ends in time. `Child.wait` would also wait for servers that hold its output open."""
    deadline = asyncio.get_running_loop().time() + seconds
    while child.status is None and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(every)
    return child.status is not None


async def _outcome(
    argv: Sequence[str], text: str, environment: Mapping[str, str], seconds: float
) -> tuple[int | None, str]:
    """The exit status and last line of a program with `text` as its input; None for one that was killed."""
    last = deque[str](maxlen=1)
    # From a file, since uvloop raises if a program ends before its input is written.
    with tempfile.TemporaryFile("w+") as file:
        file.write(text)
        file.seek(0)
        child = await Child.start(argv[0], argv, last.append, environment, file)
    try:
        return await asyncio.wait_for(child.wait(), seconds), "".join(last)
    except TimeoutError:
        return None, ""
    finally:
        # It timed out, or this task was cancelled.
        child.send_signal(signal.SIGKILL)
        # With a limit: a process that waits in the driver may outlive SIGKILL.
        await _ended(child, 2.0)


def _processes_of(pipes: str) -> list[int]:
    """Ids of MPS daemons and servers that were started for this directory of pipes."""
    # Imported here: not a part of every client's installation, but of the services' that share a GPU.
    import psutil

    # Of processes of other users there is None; those that end meanwhile are left out.
    found = psutil.process_iter(("cmdline", "environ"))
    ours = (one for one in found if (one.info["environ"] or {}).get(PIPES) == pipes)
    return [one.pid for one in ours if "nvidia-cuda-mps" in " ".join(one.info["cmdline"] or ())]
