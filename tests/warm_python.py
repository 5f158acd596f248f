"""A `python` and an `outrider` that start in a moment: each is forked from a process that has imported everything.

What it runs is a process of its own with its own arguments, environment, folder and open files, and may start others
by `sys.executable`, which start in a moment too. Where starting itself is what a test is about, it takes the real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# Of prctl(2): the signal that a process gets when the one that forked it ends.
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# What stands for a Python: it hands on all that it was started with, passes on signals, and ends as the process does.
_FLAGS = "-IS"
_STAND_IN = """#!{python} {flags}
import json, os, signal, socket, struct, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
files = [each for each in files if each != connection.fileno() and os.path.exists(f"/proc/self/fd/{{each}}")]
asked = json.dumps([{first!r} + sys.argv[1:], dict(os.environ), os.getcwd(), files]).encode()
for number in {forwarded!r}:
    signal.signal(number, lambda number, _: connection.send(bytes([number])))
socket.send_fds(connection, [struct.pack("=I", len(asked))], files)
connection.sendall(asked)
for each in files:
    if each != 2:
        os.close(each)
ended = connection.recv(4, socket.MSG_WAITALL)
(status,) = struct.unpack("=i", ended) if ended else (1,)
if status < 0:
    if -status in {forwarded!r}:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


# What a service imports and compiles before it serves.
OF_SERVICES = (
    "draft_service.service",
    "draft_service.drafters.merged",
    "draft_service.eagle.drafter",
    "draft_service.ngram.drafter",
    "target_service.assembly",
    "target_service.lifecycle",
    "target_service.shared_engine",
    "transformers.models.llama.modeling_llama",
    "compiled",
)
# The variable with arguments of pytest, by which the process that workers are forked from imports their tests.
COLLECTED = "OUTRIDER_TESTS_COLLECTED"
# Every process of a run that uses a shared one holds it open.
_LEASE = "lease"
# A file that holds the number of the process that another stands for.
_STANDS_FOR = "behind-{}"
# What services, training and commands import, what kernels in Triton's interpreter do, and what tests do.
_OF_COMMANDS = (*OF_SERVICES, "draft_service.training.run", "target_service.distillation")
_PRELOADED = {
    "services": _OF_COMMANDS,
    "interpreter": (
        "triton.language",
        "triton.runtime.interpreter",
        "engine_harness",
        "target_service.model.preparing",
    ),
    "workers": (*_OF_COMMANDS, "engine_harness", "outrider_gateway.server", "openai"),
}
_ENVIRONMENTS = {
    "services": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    "interpreter": {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    "workers": {"OMP_NUM_THREADS": "1"},
}
# What modules set while they are imported, and would not set once more in a process that has them: these, and what a
# process finds set by its own imports, which may be others where numeric libraries come from elsewhere.
_set_by_imports = {"TRITON_DEFAULT_FP_FUSION", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}


@contextmanager
def warm_executable(programs: Path) -> Iterator[None]:
    """What this process starts as `sys.executable` is `python` of `programs`, for as long as the block is."""
    real, sys.executable = sys.executable, str(programs / "python")
    try:
        yield
    finally:
        sys.executable = real


@functools.cache
def shared_python(kind: str) -> Path:
    """As `warm_python`, for all workers of a run: the first that asks starts the process that others are forked from,
    and it ends with the last that has asked. `kind` is one of `_PRELOADED`."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"outrider-{run}-{kind}"
    # It is a fork itself where there is a process that has imported as much.
    forked = kind == "services" and "PYTEST_XDIST_TESTRUNUID" in os.environ
    python = shared_python("workers") / "python" if forked else Path(sys.executable)
    with _locked():
        if not folder.exists():
            folder.mkdir(mode=0o700)
            os.mkfifo(folder / _LEASE)
            _write_programs(folder)
            environment = {**os.environ, **_ENVIRONMENTS[kind]}
            server = _start(folder, environment, _PRELOADED[kind], python, shared=True)
            assert server.stdout is not None and server.stdout.read(1)
            server.stdout.close()
            # It may outlive this process, and is not waited for.
            server.returncode = 0
        # Held until this process ends. To read as well, so that it waits for nobody.
        os.open(folder / _LEASE, os.O_RDWR)
    return folder / "bin"


class Started(NamedTuple):
    process: psutil.Process
    words: Sequence[str]


def started_by(process: psutil.Process) -> list[Started]:
    """The processes that another has started, and those that they have, with the words of their commands: a forked one
    in place of what stands for it, among whose children it is not."""
    found: list[Started] = []
    for child in behind(process).children():
        found += [Started(behind(child), child.cmdline()), *started_by(child)]
    return found


def behind(process: psutil.Process) -> psutil.Process:
    """What a process stands for, or itself."""
    words = process.cmdline()
    if len(words) < 3 or words[1] != _FLAGS:
        return process
    return psutil.Process(int((Path(words[2]).parents[1] / _STANDS_FOR.format(process.pid)).read_text()))


@contextmanager
def _locked() -> Iterator[None]:
    """While workers look for what they share, and while it ends."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def warm_python(folder: Path, environment: Mapping[str, str], preload: Sequence[str]) -> Iterator[Path]:
    """The folder of `python` and `outrider`, to be first on a PATH, for as long as the block is.

    `environment` is what modules read while they are imported; `preload` names the modules.
    """
    programs = _write_programs(folder)
    server = _start(folder, environment, preload, Path(sys.executable))
    assert server.stdout is not None
    try:
        # It writes once all is imported.
        assert server.stdout.read(1)
        yield programs
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def _write_programs(folder: Path) -> Path:
    programs = folder / "bin"
    programs.mkdir()
    for name, first in (("python", []), ("outrider", ["-m", "outrider_client.cli"])):
        text = _STAND_IN.format(
            python=sys.executable,
            flags=_FLAGS,
            address=str(folder / "python.sock"),
            first=first,
            forwarded=[*map(int, _FORWARDED)],
        )
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return programs


def _start(
    folder: Path, environment: Mapping[str, str], preload: Sequence[str], python: Path, *, shared: bool = False
) -> subprocess.Popen[bytes]:
    """The process that others are forked from."""
    command = [str(python), __file__, str(folder), "shared" if shared else "own", *preload]
    paths = os.pathsep.join(filter(None, sys.path))
    own = {**environment, "PYTHONPATH": paths}
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, start_new_session=shared)


class _Server:
    """Forks a process for each connection, and ends with whoever started it, or with the last who holds its lease."""

    def __init__(self, folder: Path, shared: bool) -> None:
        self._folder = folder
        self._lease = os.open(folder / _LEASE, os.O_RDONLY | os.O_NONBLOCK) if shared else None
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "python.sock"))
        self._listening.listen(64)
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, socket.socket] = {}
        # An end of a child interrupts the wait.
        self._woken, wakes = socket.socketpair()
        self._wakes = wakes
        for each in (self._woken, wakes):
            each.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self._listening, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        if self._lease is not None:
            self._selector.register(self._lease, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._start(self._listening.accept()[0])
                elif key.fileobj == self._lease:
                    if self._is_left():
                        return
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._reap()
                else:
                    self._pass_on(key.fileobj, key.data)

    def _is_left(self) -> bool:
        """Whether nobody holds the lease any more; then its folder is gone for who comes later."""
        assert self._lease is not None
        with _locked(), selectors.DefaultSelector() as again:
            again.register(self._lease, selectors.EVENT_READ)
            if left := bool(again.select(0)):
                shutil.rmtree(self._folder)
            return left

    def _start(self, connection: socket.socket) -> None:
        header, files, _, _ = socket.recv_fds(connection, 4, 64)
        asked = json.loads(connection.recv(int.from_bytes(header, sys.byteorder), socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            self._become(asked, files)
        for each in files:
            os.close(each)
        (self._folder / _STANDS_FOR.format(_peer(connection))).write_text(str(pid))
        self._processes[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def _pass_on(self, connection: Any, pid: int) -> None:
        """Signals; and where the stand-in is gone, so goes the process."""
        numbers = b""
        with contextlib.suppress(ConnectionError):
            numbers = connection.recv(64)
        if pid not in self._processes:
            return
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            self._selector.unregister(connection)

    def _reap(self) -> None:
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._processes.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            (self._folder / _STANDS_FOR.format(_peer(connection))).unlink()
            with contextlib.suppress(ConnectionError):
                connection.send(os.waitstatus_to_exitcode(status).to_bytes(4, sys.byteorder, signed=True))
            connection.close()

    def _become(self, asked: Sequence[Any], files: Sequence[int]) -> None:
        """In the child: what was asked for, and nothing of this process but what it has imported."""
        words, environment, folder, numbers = asked
        status = 1
        try:
            _end_with_parent()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            # Ours could have the number of one that is wanted.
            held = [os.dup2(each, 1000 + place, inheritable=False) for place, each in enumerate(files)]
            os.closerange(3, 1000)
            for number, each in zip(numbers, held, strict=True):
                os.dup2(each, number)
                os.close(each)
            os.chdir(folder)
            set_before = {name: os.environ[name] for name in _set_by_imports if name in os.environ}
            os.environ.clear()
            os.environ.update(set_before | environment)
            sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            for path in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
                if path not in sys.path:
                    sys.path.insert(0, path)
            _run(words)
            status = 0
        except SystemExit as end:
            status = _status_of(end)
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)


def _peer(connection: socket.socket) -> int:
    """The process at the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def _end_with_parent(number: int = signal.SIGKILL) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _run(words: list[str]) -> None:
    """As `python WORDS` does: `-m MODULE`, `-c PROGRAM` or a file, and before it -P, or flags that are passed over."""
    flags = itertools.takewhile(lambda word: word[0] == "-" and word not in ("-m", "-c"), words)
    safe_path = "-P" in (passed := list(flags))
    first, *rest = words[len(passed) :]
    if first == "-m":
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        if not safe_path:
            sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = words
        runpy.run_path(first, run_name="__main__")


def _status_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


if __name__ == "__main__":
    import gc
    import importlib

    _folder, _shared = Path(sys.argv[1]), sys.argv[2] == "shared"
    # The tests' process; and what is forked here ends with this one.
    _end_with_parent(0 if _shared else signal.SIGKILL)
    sys.path.pop(0)
    from outrider.runtime import prepare_grpc

    prepare_grpc()
    # Modules make commands of it while they are imported.
    sys.executable = str(_folder / "bin" / "python")
    _before = set(os.environ)
    for _module in sys.argv[3:]:
        importlib.import_module(_module)
    _set_by_imports.update(os.environ.keys() - _before)
    if "huggingface_hub.constants" in sys.modules:
        # As at its import, which may have been before this process was forked.
        sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    if _arguments := os.environ.pop(COLLECTED, ""):
        import pytest

        with Path(os.devnull).open("w") as _nowhere, contextlib.redirect_stdout(_nowhere):
            pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *json.loads(_arguments)])
    # What is never looked at stays in memory that all share.
    gc.collect()
    gc.freeze()
    _server = _Server(_folder, _shared)
    os.write(1, b".")
    _server.run()
    # Libraries need not be taken down.
    os._exit(0)
