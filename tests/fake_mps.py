"""An `nvidia-cuda-mps-control` without a GPU, which behaves as NVIDIA's does and notes what is asked of it.

`-f` runs the daemon in the foreground: it listens on the socket `control` of its directory of pipes, writes a file with
its process id beside it, and has one server, in a session of its own. Without a flag it reads commands and sends them
to the daemon.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from outrider_client.local.mps import CONTROL, LOGS, PIPES, SHARE

# What can be told to a fake, beside "well".
FAILS, SILENT, STUBBORN, LEAVES = "fails", "silent", "stubborn", "leaves"
_PROGRAM = """#!{python} -ISE
import json, os, signal, socket, subprocess, sys
pipes, how, beside = os.environ["CUDA_MPS_PIPE_DIRECTORY"], {how!r}, {beside!r}

def note(said):
    here = {{name: value for name, value in os.environ.items() if name.startswith("CUDA_")}}
    with open(os.path.join(beside, "calls"), "a") as file:
        file.write(json.dumps([os.getpid(), sys.argv[1:], said, here]) + chr(10))

if sys.argv[1:] != ["-f"]:
    said = sys.stdin.read()
    note(said)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.path.join(pipes, "control"))
        client.sendall(said.encode())
        client.shutdown(socket.SHUT_WR)
        client.recv(1)
    sys.exit(0)
note("")
# A test that fails may leave it behind.
signal.alarm(300)
if how == "fails":
    sys.exit("no GPU for me")
if how in ("silent", "stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "silent":
    signal.pause()
server = subprocess.Popen([os.path.join(beside, "nvidia-cuda-mps-server")], start_new_session=True)
with open(os.path.join(beside, "server"), "w") as file:
    file.write(str(server.pid))
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.path.join(pipes, "control"))
listener.listen()
open(os.path.join(pipes, "nvidia-cuda-mps-control.pid"), "w").write(str(os.getpid()))
while True:
    client, _ = listener.accept()
    said = client.recv(100)
    if how == "stubborn":
        signal.pause()
    if said == b"quit" + bytes([10]):
        break
    client.close()
if how != "leaves":
    server.terminate()
    server.wait()
os.remove(os.path.join(pipes, "nvidia-cuda-mps-control.pid"))
"""
_SERVER = "#!{python} -ISE\nimport signal\nsignal.alarm(300)\nsignal.pause()\n"


class Call(NamedTuple):
    """Of the program: its process, its flags, what it read, and its environment as far as it concerns CUDA."""

    pid: int
    flags: list[str]
    said: str
    environment: dict[str, str]


class FakeMps:
    """The program, first on PATH."""

    def __init__(self, folder: Path, how: str = "well") -> None:
        """`folder` takes it, its server, and what it notes."""
        self._folder = folder
        _write(folder / CONTROL, _PROGRAM.format(python=sys.executable, how=how, beside=str(folder)))
        _write(folder / "nvidia-cuda-mps-server", _SERVER.format(python=sys.executable))

    @property
    def calls(self) -> list[Call]:
        path = self._folder / "calls"
        return [Call(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def asked(self) -> list[str]:
        """What was asked of it, in this order: "-f", and what it was to do."""
        return [" ".join(call.flags) or call.said.strip() for call in self.calls]

    @property
    def left(self) -> list[Any]:
        """Its processes and directories that are still there."""
        server = self._folder / "server"
        pids = {call.pid for call in self.calls} | ({int(server.read_text())} if server.exists() else set())
        folders = {Path(call.environment[PIPES]).parent for call in self.calls}
        return [*filter(_lives, pids), *(folder for folder in folders if folder.exists())]


def only_on_path(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Find programs in `folder` before all others, and no MPS of this machine's."""
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in (PIPES, LOGS, SHARE, "CUDA_VISIBLE_DEVICES"):
        patch.delenv(name, raising=False)


def _write(path: Path, program: str) -> None:
    path.write_text(program)
    path.chmod(0o755)


def _lives(pid: int) -> bool:
    try:
        # One that nobody reaps has ended too.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
