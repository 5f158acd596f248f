"""A GPU that target and draft share by NVIDIA's Multi-Process Service (MPS), of which `outrider up` starts a daemon.

Without it two processes take turns on a GPU: while one has its slice of time, the other's kernels wait, and a draft
answers after the pass that wanted its tree. Under MPS kernels of both run at once.
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
from dataclasses import dataclass
from pathlib import Path

from outrider_client.local.process import Child

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# Where clients look for a daemon if the environment names no directory.
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
# The path of a socket has at most 107 bytes; TMPDIR and XDG_RUNTIME_DIR may be long.
_SHORT = Path("/tmp")
_POLL_SECONDS = 0.05
_WATCH_SECONDS = 1.0
_KILL_SECONDS = 2.0
# A CUDA program of the least: it fails as the services would, where a daemon runs and its servers cannot.
_PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
error = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
error = error or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
error = error or cuda.cuDevicePrimaryCtxRelease_v2(device)
sys.exit(f"CUDA error {error}" if error else 0)
"""


@dataclass(frozen=True)
class MpsTimes:
    """Seconds at most: until a daemon has its socket, of a first CUDA program, of `quit`, and of the daemon's end after
    it, after SIGTERM and after SIGKILL. Chosen, not measured: where the driver lets GPUs sleep, a first program takes
    seconds."""

    start: float = 5.0
    probe: float = 30.0
    quit: float = 5.0
    stop: float = 2.0


class _Unusable(Exception):
    """Why there is no MPS, and what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"no MPS: {reason}. The two take turns on the GPU, and drafts come late: {remedy}")


class Mps:
    """A daemon for one target and its draft, from `start` to `stop`, or the user's own, or none and a line of why."""

    def __init__(
        self,
        placed: str,
        say: Callable[[str], None],
        times: MpsTimes | None = None,
        default_pipes: Path | None = None,
        probe: Sequence[str] | None = None,
    ) -> None:
        """`placed` is what the placement says; `say` gets it from `start`, with how the GPU is shared. `probe` is a
        program that fails where CUDA does; one that opens the first GPU by default."""
        self._placed = placed
        self._say = say
        self._times = times or MpsTimes()
        self._default_pipes = default_pipes or DEFAULT_PIPES
        self._probe = tuple(probe or (sys.executable, "-c", _PROBE))
        self._folder: Path | None = None
        self._child: Child | None = None
        self._tail: deque[str] = deque(maxlen=1)
        self._watch: asyncio.Task[None] | None = None

    def environment(self, service: str) -> Mapping[str, str | None]:
        """What the service "target" or "draft" is to be started with; None for a variable that it must not inherit."""
        if self._folder is None or service not in ("target", "draft"):
            return {}
        # A share of the GPU that the user sets is the draft's: the target's passes are what everybody waits for.
        return self._directories(self._folder) | ({SHARE: None} if service == "target" else {})

    async def start(self) -> None:
        """Start a daemon, unless the user has one, and say which. What fails costs speed alone, and raises nothing."""
        try:
            theirs = self._running()
            if theirs is None:
                await self._start_daemon()
        except _Unusable as error:
            await self.stop()
            self._say(self._placed)
            self._say(str(error))
            return
        self._say(f"{self._placed} by MPS" + ("" if theirs is None else f", of the daemon that runs in {theirs}"))

    async def stop(self) -> None:
        """End the daemon that `start` started, and its servers: nothing stays behind. To be called when the services
        have ended, since it waits for no client for long."""
        if self._watch is not None:
            self._watch.cancel()
        if self._child is not None and self._folder is not None:
            await self._quit(self._child, self._folder)
        if self._folder is not None:
            await self._kill_left(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._child is not None:
            await _ended(self._child, self._times.stop)
        self._folder = self._child = self._watch = None

    def _running(self) -> Path | None:
        """Where a daemon of the user's runs, if one does. A socket alone is of one that has ended."""
        named = os.environ.get(PIPES, "")
        pipes = Path(named) if named else self._default_pipes
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
            self._folder = Path(tempfile.mkdtemp(prefix="outrider-mps-", dir=_SHORT))
            directories = self._directories(self._folder)
            for path in directories.values():
                Path(path).mkdir()
            child = Child(CONTROL, (program, "-f"), self._tail.append, {**directories, **_withheld()})
            await child.start()
            self._child = child
            await self._answering(child, Path(directories[PIPES]) / "control", remedy)
            await self._try_it(directories, remedy)
        except OSError as error:
            raise _Unusable(f"{CONTROL} cannot be started: {error.strerror or error}", remedy) from error
        self._watch = asyncio.create_task(self._when_it_ends(child))

    async def _answering(self, child: Child, socket: Path, remedy: str) -> None:
        """Return once the daemon has its socket. Raises `_Unusable` when it ends, or takes too long."""
        deadline = asyncio.get_running_loop().time() + self._times.start
        while not socket.exists():
            if child.status is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), self._times.stop)
                words = f": {self._tail[-1]}" if self._tail else ""
                raise _Unusable(f"{CONTROL} ended with status {child.status}{words}", remedy)
            if asyncio.get_running_loop().time() > deadline:
                raise _Unusable(f"{CONTROL} did not listen within {self._times.start:g} s", remedy)
            await asyncio.sleep(_POLL_SECONDS)

    async def _try_it(self, directories: Mapping[str, str], remedy: str) -> None:
        """Run a CUDA program under the daemon, which starts its server for it. Raises `_Unusable` when it fails."""
        status, output = await _outcome(self._probe, "", os.environ | directories, self._times.probe)
        if status != 0:
            words = "it did not end" if status is None else output.strip().rpartition("\n")[2] or f"status {status}"
            raise _Unusable(f"a CUDA program cannot run under it ({words})", remedy)

    async def _when_it_ends(self, child: Child) -> None:
        await _ended(child, math.inf, every=_WATCH_SECONDS)
        self._say(f"{CONTROL} ended with status {child.status}: what starts from now on shares the GPU without MPS")

    async def _quit(self, child: Child, folder: Path) -> None:
        """As its manual says, and by SIGTERM where that does not help."""
        program = shutil.which(CONTROL)
        if program is not None and child.status is None:
            with contextlib.suppress(OSError):
                await _outcome((program,), "quit\n", os.environ | self._directories(folder), self._times.quit)
        if not await _ended(child, self._times.stop):
            child.terminate()
            await _ended(child, self._times.stop)

    async def _kill_left(self, folder: Path) -> None:
        """What did not end by itself: the daemon, or servers that it has left."""
        deadline = asyncio.get_running_loop().time() + self._times.stop
        while left := _processes_of(self._directories(folder)[PIPES]):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_POLL_SECONDS)

    @staticmethod
    def _directories(folder: Path) -> dict[str, str]:
        return {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}


def _withheld() -> dict[str, None]:
    """What a daemon must not inherit. A share of the GPU would hold for all of its clients. Where it has a list of GPUs
    it numbers them anew, and the same numbers would mean others to its clients; names of GPUs stay what they are."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    by_number = any(name.strip().isdecimal() for name in listed)
    return dict.fromkeys((SHARE, "CUDA_VISIBLE_DEVICES") if by_number else (SHARE,))


async def _ended(child: Child, seconds: float, every: float = _POLL_SECONDS) -> bool:
    """Whether its own process ends in time. A server may hold its output open, and `Child.wait` would wait for that."""
    deadline = asyncio.get_running_loop().time() + seconds
    while child.status is None and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(every)
    return child.status is not None


async def _outcome(
    argv: Sequence[str], words: str, environment: Mapping[str, str], seconds: float
) -> tuple[int | None, str]:
    """The exit status and output of a program that reads `words`; no status where it had to be killed."""
    # Written before it starts, for uvloop raises where a program ends before it is fed. A pipe holds some words.
    read_end, write_end = os.pipe()
    try:
        with open(write_end, "w") as fed:
            fed.write(words)
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=read_end,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    finally:
        os.close(read_end)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        return None, ""
    finally:
        # It was late, or nobody waits for it any more.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Not for ever: one that waits in the driver may outlast its kill.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_SECONDS)
    return process.returncode, output.decode(errors="replace")


def _processes_of(pipes: str) -> list[int]:
    """Daemons and servers of MPS that were started for this directory of pipes."""
    mark, found = f"{PIPES}={pipes}".encode(), []
    for entry in Path("/proc").iterdir():
        # Other users' cannot be read, and some end meanwhile.
        with contextlib.suppress(OSError):
            if (
                entry.name.isdecimal()
                and b"nvidia-cuda-mps" in (entry / "cmdline").read_bytes()
                and mark in (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found
