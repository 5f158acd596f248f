"""Services as real processes that start in a second: each is forked from one that has imported everything.

They are killed, frozen, given a full disk and wrong clocks like any others, and share with nobody but their code.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
from waits import HUNG_SECONDS
from warm_python import shared_python

from outrider.runtime import prepare_grpc, prepare_onednn

_CONTEXT = multiprocessing.get_context("forkserver")
# Of prctl(2): the signal that a process gets when the one that forked it ends.
_PR_SET_PDEATHSIG = 1
# Children are started from threads too, and two that change PYTHONPATH at once would leave it changed.
_STARTING = threading.Lock()


class Clocks:
    """How far a process's clocks are from the machine's, in seconds; set from outside while it runs.

    They are what our code reads, and all other Python code but gRPC's: that hands its deadlines to C code, which reads
    the machine's own clock, as the waits of the operating system do.
    """

    def __init__(self) -> None:
        self._wall: Any = _CONTEXT.Value(ctypes.c_double, 0.0, lock=False)
        self._monotonic: Any = _CONTEXT.Value(ctypes.c_double, 0.0, lock=False)

    def jump(self, seconds: float) -> None:
        """Of the wall clock, either way."""
        self._wall.value += seconds

    def leap(self, seconds: float) -> None:
        """Of the monotonic clock, as after a machine was suspended: forward."""
        assert seconds >= 0
        self._monotonic.value += seconds

    def install(self) -> None:
        """Have this process read these clocks from now on."""
        import grpc.aio  # noqa: F401

        right = types.ModuleType("time")
        vars(right).update(vars(time))
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "grpc"]:
            if getattr(module, "time", None) is time:
                module.time = right  # type: ignore[attr-defined]
        for name, offset in (("time", self._wall), ("monotonic", self._monotonic)):
            seconds, nanoseconds = getattr(time, name), getattr(time, f"{name}_ns")
            setattr(time, name, lambda real=seconds, by=offset: real() + by.value)
            setattr(time, f"{name}_ns", lambda real=nanoseconds, by=offset: real() + int(by.value * 1e9))


def _serve(module: str, arguments: Sequence[str], clocks: Clocks, log: Path, environment: Mapping[str, str]) -> None:
    # Of its own, so that nothing that is meant for the tests' process reaches it; and it ends when that one does.
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(environment)
    clocks.install()
    sys.argv = [module, *arguments]
    from outrider.runtime import leave

    if module == "draft_service":
        from draft_service.__main__ import main as main_of_draft

        leave(main_of_draft())
    from target_service.__main__ import main as main_of_target

    leave(main_of_target(list(arguments)))


def _start_fork_server() -> None:
    """Once in a process: a fork itself, of the process of all workers that has imported what services import."""
    prepare_grpc()
    prepare_onednn()
    with _STARTING:
        own, executable = os.environ.get("PYTHONPATH"), spawn.get_executable()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # Which needs nothing.
        resource_tracker.ensure_running()
        spawn.set_executable(str(shared_python("services") / "python"))
        try:
            forkserver.ensure_running()
        finally:
            spawn.set_executable(executable)
            if own is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = own


@dataclass
class Child:
    """`python -m MODULE ARGUMENTS`, to be started, killed, and started again."""

    module: str
    arguments: Sequence[str]
    log: Path
    clocks: Clocks = field(default_factory=Clocks)
    # Beside that of the process that services are forked from.
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: int = 0
    _process: ForkServerProcess | None = None

    def start(self) -> None:
        _start_fork_server()
        arguments = (self.module, self.arguments, self.clocks, self.log, self.environment)
        self._process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self.starts += 1

    @property
    def pid(self) -> int:
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def status(self) -> int | None:
        return None if self._process is None else self._process.exitcode

    def children(self) -> list[psutil.Process]:
        """Processes that it started, an engine's."""
        try:
            return [each for each in psutil.Process(self.pid).children() if each.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []

    def send(self, number: signal.Signals) -> None:
        """A signal; none to a process that has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def fill_disk(self, full: bool) -> None:
        """Let every write to a file fail, or succeed again."""
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))

    def wait(self, seconds: float) -> int:
        """Its exit status, once it has ended by itself. Raises `TimeoutError`."""
        assert self._process is not None
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            raise TimeoutError(f"{self.module} has not ended within {seconds:g} s")
        return status

    def end(self, number: signal.Signals = signal.SIGKILL, seconds: float = HUNG_SECONDS) -> int | None:
        """Signal it and wait; its exit status, None where it had to be killed for it."""
        self.send(number)
        self.send(signal.SIGCONT)
        if self._process is None:
            return None
        self._process.join(seconds)
        if not self.alive:
            return self._process.exitcode
        self._process.kill()
        self._process.join()
        return None
