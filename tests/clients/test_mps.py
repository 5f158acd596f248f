"""MPS below `outrider up`: there before the services and until after them, or one line that says why not."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from child_processes import living_children
from fake_mps import FAILS, LEAVES, SILENT, STUBBORN, FakeMps, only_on_path
from supervised import SECONDS, Lines, failing, restart_soon, service
from waits import HUNG_SECONDS

from outrider.runtime import run
from outrider_client.local import mps
from outrider_client.local.mps import CONTROL, LOGS, PIPES, SHARE, Mps
from outrider_client.local.supervisor import ServiceCommand, Supervisor

PLACED = "the draft shares the GPU"
CUDA = mps.PROBE
FINE, FAULTY = "", "raise SystemExit('CUDA error 805')"
# A daemon that is asked to end and does not takes four of the last.
TIMES = {"START_SECONDS": HUNG_SECONDS, "PROBE_SECONDS": HUNG_SECONDS, "QUIT_SECONDS": 2.0, "STOP_SECONDS": 0.5}


class Whole:
    """A supervisor of two services and MPS."""

    def __init__(self, folder: Path, target: ServiceCommand | None = None) -> None:
        self.lines = Lines()
        self.mps = Mps(PLACED, lambda line: self.lines.emit("outrider", line))
        self.supervisor = Supervisor(
            target or service("target", folder), service("draft", folder), self.lines.emit, mps=self.mps
        )

    async def started(self) -> asyncio.Task[int]:
        running = asyncio.create_task(self.supervisor.supervise())
        await self.lines.wait("target", "hello")
        await self.lines.wait("draft", "hello")
        return running

    async def stopped(self, running: asyncio.Task[int]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, SECONDS) == 0
        assert not living_children("hello from")

    @property
    def said(self) -> list[str]:
        """What was said of the GPU, before anything else."""
        return [line for name, line in self.lines.heard if name == "outrider" and "stopping" not in line]


def environment(name: str) -> dict[str, str]:
    """Of the service, as far as it concerns CUDA."""
    (child,) = living_children(f"hello from {name}")
    return {variable: value for variable, value in child.environ().items() if variable.startswith("CUDA_")}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    only_on_path(folder, monkeypatch)
    restart_soon(monkeypatch)
    for name, value in {**TIMES, "DEFAULT_PIPES": tmp_path / "default", "PROBE": FINE}.items():
        monkeypatch.setattr(mps, name, value)
    return folder


async def test_both_services_have_a_daemon_of_their_own(tmp_path: Path, programs: Path) -> None:
    fake, whole = FakeMps(programs), Whole(tmp_path)
    running = await whole.started()
    assert whole.said == [f"{PLACED} by MPS"]
    (daemon,) = fake.calls
    assert daemon.flags == ["-f"]
    assert environment("target") == environment("draft") == daemon.environment
    assert daemon.environment.keys() == {PIPES, LOGS}
    (folder,) = {Path(path).parent for path in daemon.environment.values()}
    assert folder.stat().st_mode & 0o077 == 0
    # What its longest socket may take.
    assert len(f"{daemon.environment[PIPES]}/control_privileged") < 108
    (child,) = living_children(CONTROL)
    assert all(child.create_time() <= one.create_time() for one in living_children("hello from"))
    await whole.stopped(running)
    assert fake.asked == ["-f", "quit"] and fake.left == []
    assert fake.calls[1].environment == daemon.environment


async def test_a_draft_that_is_started_again_is_under_it_too(tmp_path: Path, programs: Path) -> None:
    fake, whole = FakeMps(programs), Whole(tmp_path)
    running = await whole.started()
    (child,) = living_children("hello from draft")
    child.kill()
    await whole.lines.wait("draft", "hello", times=2)
    assert environment("draft") == fake.calls[0].environment
    await whole.stopped(running)
    assert fake.asked == ["-f", "quit"]


async def test_a_share_of_the_gpu_is_the_drafts_alone(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, whole = FakeMps(programs), Whole(tmp_path)
    monkeypatch.setenv(SHARE, "30")
    running = await whole.started()
    assert environment("draft")[SHARE] == "30"
    assert SHARE not in environment("target") and SHARE not in fake.calls[0].environment
    await whole.stopped(running)


@pytest.mark.parametrize(("listed", "inherited"), [("1", False), ("GPU-8932f937", True)])
async def test_a_daemon_does_not_number_gpus_anew(
    listed: str, inherited: bool, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    fake, whole = FakeMps(programs), Whole(tmp_path)
    running = await whole.started()
    assert ("CUDA_VISIBLE_DEVICES" in fake.calls[0].environment) == inherited
    assert environment("target")["CUDA_VISIBLE_DEVICES"] == environment("draft")["CUDA_VISIBLE_DEVICES"] == listed
    await whole.stopped(running)


async def test_it_ends_with_the_target(tmp_path: Path, programs: Path) -> None:
    fake, whole = FakeMps(programs), Whole(tmp_path, target=failing("target", 3))
    assert await asyncio.wait_for(whole.supervisor.supervise(), SECONDS) == 3
    assert fake.asked == ["-f", "quit"] and fake.left == []


@pytest.mark.parametrize("how", [STUBBORN, LEAVES])
async def test_nothing_stays_behind_that_does_not_end(how: str, tmp_path: Path, programs: Path) -> None:
    fake, whole = FakeMps(programs, how), Whole(tmp_path)
    running = await whole.started()
    # The daemon, its server, and their directory.
    assert len(fake.left) == 3
    await whole.stopped(running)
    assert fake.asked == ["-f", "quit"] and fake.left == []


async def test_a_daemon_that_dies_is_told_of(tmp_path: Path, programs: Path) -> None:
    fake, whole = FakeMps(programs), Whole(tmp_path)
    running = await whole.started()
    # Its server has its output, and lives.
    (daemon,) = living_children(CONTROL)
    daemon.kill()
    await whole.lines.wait("outrider", "ended with status -9: what starts from now on shares the GPU without MPS")
    await whole.stopped(running)
    assert fake.asked == ["-f"] and fake.left == []


@pytest.mark.parametrize(
    ("how", "probe", "start", "words"),
    [
        (
            None,
            FINE,
            HUNG_SECONDS,
            "is not on PATH. So the two take turns on the GPU, and drafts come late: install it",
        ),
        (FAILS, FINE, HUNG_SECONDS, "ended with status 1: no GPU for me. So the two take turns"),
        (SILENT, FINE, 0.3, "did not listen within 0.3 s. So the two"),
        ("well", FAULTY, HUNG_SECONDS, "a CUDA program cannot run under it (CUDA error 805). So the two"),
        ("well", "import time; time.sleep(99)", HUNG_SECONDS, "under it (it did not end). So the two"),
        ("no program", FINE, HUNG_SECONDS, "cannot be started: Exec format error. So the two"),
    ],
    ids=["absent", "fails", "silent", "faulty", "hanging", "damaged"],
)
async def test_what_cannot_be_had_is_one_line(
    how: str | None,
    probe: str,
    start: float,
    words: str,
    tmp_path: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeMps(programs, how or "")
    if how is None:
        (programs / CONTROL).unlink()
    if how == "no program":
        (programs / CONTROL).write_text("\0")
    seconds = 1.0 if "sleep" in probe else HUNG_SECONDS
    for name, value in {"PROBE": probe, "START_SECONDS": start, "PROBE_SECONDS": seconds}.items():
        monkeypatch.setattr(mps, name, value)
    whole = Whole(tmp_path)
    running = await whole.started()
    first, second = whole.said
    assert first == PLACED and second.startswith("no MPS: ") and words in second and "--no-mps" in second
    assert environment("target") == environment("draft") == {}
    assert fake.left == []
    await whole.stopped(running)


async def test_a_daemon_of_the_users_is_used(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the default place, or in the one that the environment names."""
    fake = FakeMps(programs)
    for folder in (tmp_path / "default", tmp_path / "named"):
        folder.mkdir()
        # This one stays when a daemon ends.
        (folder / "control").touch()
        (folder / f"{CONTROL}.pid").write_text("1")
        if folder.name == "named":
            monkeypatch.setenv(PIPES, str(folder))
            monkeypatch.setenv(SHARE, "50")
        whole = Whole(tmp_path)
        running = await whole.started()
        assert whole.said == [f"{PLACED} by MPS, of the daemon that runs in {folder}"]
        expected = {PIPES: str(folder), SHARE: "50"} if folder.name == "named" else {}
        assert environment("target") == environment("draft") == expected
        await whole.stopped(running)
        assert (folder / "control").exists() and fake.calls == []


async def test_a_directory_without_a_daemon_is_told_of(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, whole = FakeMps(programs), Whole(tmp_path)
    monkeypatch.setenv(PIPES, str(tmp_path))
    (tmp_path / "control").touch()
    running = await whole.started()
    assert whole.said[0] == PLACED and "or unset the variable" in whole.said[1] and len(whole.said) == 2
    await whole.stopped(running)
    assert fake.calls == []
    monkeypatch.delenv(PIPES)
    # In the default place such a socket is nobody's.
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "control").touch()
    whole = Whole(tmp_path)
    running = await whole.started()
    assert whole.said == [f"{PLACED} by MPS"]
    await whole.stopped(running)
    assert fake.asked == ["-f", "quit"]


def test_a_program_may_end_before_it_is_fed() -> None:
    """By the event loop that `outrider up` runs on, which raises where words are for a program that has ended."""

    async def run_often() -> list[tuple[int | None, str]]:
        return [await mps._outcome(("true",), "quit\n", os.environ, SECONDS) for _ in range(20)]

    assert run(run_often()) == [(0, "")] * 20


async def test_a_stop_while_it_starts_starts_no_service(tmp_path: Path, programs: Path) -> None:
    fake, whole = FakeMps(programs, SILENT), Whole(tmp_path)
    running = asyncio.create_task(whole.supervisor.supervise())
    async with asyncio.timeout(SECONDS):
        while not fake.calls:
            await asyncio.sleep(0.02)
    await whole.stopped(running)
    assert {name for name, _ in whole.lines.heard} == {"outrider"} and whole.said == []
    assert fake.left == []


_LIBRARY = r"""
#include <stdlib.h>
int cuInit(unsigned flags) { return getenv("CUDA_MPS_PIPE_DIRECTORY") ? 0 : 1; }
int cuDeviceGet(int *device, int number) { *device = 7; return number; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return device == 7 ? RETAINED : 2; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device == 7 ? 0 : 3; }
"""


@pytest.mark.parametrize(("error", "words"), [(0, ""), (805, "(CUDA error 805)")])
async def test_a_cuda_program_tries_the_daemon(
    error: int, words: str, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = [
        compiler,
        "-shared",
        "-fPIC",
        f"-DRETAINED={error}",
        "-x",
        "c",
        "-",
        "-o",
        str(tmp_path / "libcuda.so.1"),
    ]
    subprocess.run(library, input=_LIBRARY, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    FakeMps(programs)
    monkeypatch.setattr(mps, "PROBE", CUDA)
    said: list[str] = []
    ours = Mps(PLACED, said.append)
    await ours.start()
    assert (words in said[-1]) if error else said == [f"{PLACED} by MPS"]
    assert bool(ours.environment("draft")) == (not error) and ours.environment("gateway") == {}
    await ours.stop()


# `outrider up` on a machine with so many GPUs, and services that are none.
_UP = """
import sys
from supervised import SERVICE
from outrider_client.cli import main, services
from outrider_client.local import mps
gpus, sys.argv = int(sys.argv[1]), ["outrider", *sys.argv[2:]]
mps.PROBE = ""
mps.DEFAULT_PIPES = mps.Path("/nowhere")
services.visible_gpus = lambda: gpus
services.module_command = lambda name, *flags: (
    sys.executable, "-c", SERVICE, flags[1], " ".join(("hello from", name, *flags))
)
sys.exit(main())
"""


async def up(python: str, gpus: int, words: tuple[str, ...], port: int, *, draft: bool = False) -> str:
    """What `outrider up` says until it is ready, and its draft service too if there is to be one, and stopped."""
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", _UP, str(gpus), "up", "--port", str(port), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    said = ""
    async with asyncio.timeout(SECONDS):
        # The target may be ready before its draft has said a word.
        while "| ready on" not in said or (draft and "hello from draft_service" not in said):
            line = await process.stdout.readline()
            assert line, said
            said += line.decode()
        process.send_signal(signal.SIGTERM)
        said += (await process.stdout.read()).decode()
    assert await process.wait() == 0
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("gpus", "words", "started"),
    [
        (1, ("--drafter", "model"), True),
        (1, ("--drafter", "trie"), False),
        (1, ("--drafter", "none"), False),
        (1, ("--drafter", "merged", "--draft-flags", "--device cuda:0"), False),
        (2, ("--drafter", "model"), False),
        (0, ("--drafter", "merged"), False),
    ],
    ids=["one", "trie", "none", "user-placed", "two", "cpu"],
)
async def test_up_starts_it_for_a_gpu_that_is_shared(
    gpus: int, words: tuple[str, ...], started: bool, programs: Path, python: str, unused_tcp_port: int
) -> None:
    fake = FakeMps(programs)
    said = await up(python, gpus, words, unused_tcp_port, draft="none" not in words)
    assert fake.asked == (["-f", "quit"] if started else []) and fake.left == []
    assert ("which it shares with the target by MPS\n" in said) == started
    assert said.count("MPS") == started
    assert ("hello from draft_service" in said) == ("none" not in words)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("flags", [("--no-mps",), ()], ids=["not-wanted", "not-there"])
async def test_without_it_a_draft_on_the_targets_gpu_runs_in_its_process(
    flags: tuple[str, ...], tmp_path: Path, python: str, unused_tcp_port: int
) -> None:
    """With the flags and the file that a service would have had."""
    file = tmp_path / "outrider.toml"
    file.write_text('[draft]\ndrafter = "model"\n')
    words = ("--config", str(file), "--draft-flags", "--topk 4 --head 'my head'", *flags)
    said = await up(python, 1, words, unused_tcp_port)
    assert "hello from draft_service" not in said and "with the draft in its process" in said
    assert "--draft inprocess:model --device cuda:0 --cuda-graphs --topk 4 --head 'my head' --config" in said
    assert ("So the draft runs in the target's process: install it" in said) == (not flags)
    assert ("which it shares with the target, in its process\n" in said) == bool(flags)


@pytest.mark.parametrize("gpus", [1, 2])
async def test_a_head_in_the_targets_passes_needs_no_daemon(
    gpus: int, programs: Path, python: str, unused_tcp_port: int
) -> None:
    fake = FakeMps(programs)
    said = await up(python, gpus, ("--drafter", "merged", "--draft-flags", "--head 'my head'"), unused_tcp_port)
    assert "hello from draft_service" not in said and "MPS" not in said and fake.asked == []
    assert "--draft inpass:merged --device cuda:0 --cuda-graphs --head 'my head'" in said
    assert "the head drafts in its passes\n" in said


@pytest.mark.usefixtures("programs")
async def test_a_draft_with_an_address_stays_a_service(tmp_path: Path, python: str, unused_tcp_port: int) -> None:
    words = ("--drafter", "merged", "--no-mps", "--draft-listen", f"unix:{tmp_path / 'draft.sock'}")
    said = await up(python, 1, words, unused_tcp_port, draft=True)
    assert "hello from draft_service" in said and "inprocess" not in said
    assert "which it shares with the target\n" in said
