"""`outrider up`'s supervision with real processes: the restart of a draft, the end of a target, signals."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from child_processes import living_children
from supervised import SECONDS, Lines, failing, restart_soon, service
from waits import until

from outrider_client.connection import Tls
from outrider_client.local import process
from outrider_client.local.process import Child, ServiceDied, ServiceSlow, wait_serving
from outrider_client.local.supervisor import ServiceCommand, Supervisor

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    restart_soon(monkeypatch)


async def test_ready_then_sigterm(tmp_path: Path) -> None:
    lines, ready = Lines(), asyncio.Event()
    supervisor = Supervisor(service("target", tmp_path), service("draft", tmp_path), lines.emit)
    running = asyncio.create_task(supervisor.supervise(ready.set))
    async with asyncio.timeout(SECONDS):
        await ready.wait()
    await lines.wait("draft", "hello")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, SECONDS) == 0
    assert lines.count("target", "hello") == lines.count("draft", "hello") == 1
    assert not living_children("hello from")


@pytest.mark.parametrize("at_terminal", [False, True])
async def test_hangup_reloads_tokens_or_is_a_terminals_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_terminal: bool
) -> None:
    lines, reloaded, send_signal = Lines(), list[str](), Child.send_signal

    def noted(child: Child, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            reloaded.append(child.name)
        else:
            send_signal(child, number)

    monkeypatch.setattr(Child, "send_signal", noted)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: at_terminal))
    names = ("target", "draft", "gateway")
    target, draft, gateway = (service(name, tmp_path) for name in names)
    # Tests may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        running = asyncio.create_task(Supervisor(target, draft, lines.emit, gateway).supervise())
        for name in names:
            await lines.wait(name, "hello")
        os.kill(os.getpid(), signal.SIGHUP)
        if not at_terminal:
            await until(lambda: len(reloaded) == 2)
            assert sorted(reloaded) == ["draft", "target"] and not running.done()
            os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, SECONDS) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_dead_draft_is_started_again(tmp_path: Path) -> None:
    lines = Lines()
    supervisor = Supervisor(service("target", tmp_path), service("draft", tmp_path), lines.emit)
    running = asyncio.create_task(supervisor.supervise())
    for life in (1, 2, 3):
        await lines.wait("draft", "hello", times=life)
        if life < 3:
            _kill("hello from draft")
    assert lines.count("outrider", "the draft service was killed by SIGKILL") == 2
    assert lines.count("outrider", "in 0.1 s") == 1
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, SECONDS) == 0


async def test_draft_that_cannot_be_started_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like one that ends: another try after the back-off, and all is stopped at the end."""
    lines, start, failures = Lines(), Child.start, 0

    async def failing_start(name: str, *more: Any) -> Child:
        nonlocal failures
        if name == "draft" and lines.count("draft", "hello") and failures < most:
            failures += 1
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(name, *more)

    monkeypatch.setattr(Child, "start", failing_start)
    most = 2
    gateway, draft = service("gateway", tmp_path), service("draft", tmp_path)
    running = asyncio.create_task(Supervisor(service("target", tmp_path), draft, lines.emit, gateway).supervise())
    for name in ("target", "gateway", "draft"):
        await lines.wait(name, "hello")
    _kill("hello from draft")
    await lines.wait("draft", "hello", times=2)
    refusal = "the draft service cannot be started: Resource temporarily unavailable; starting it again in"
    assert lines.count("outrider", refusal) == most
    # Never again, up to the end.
    most = 1000
    _kill("hello from draft")
    await lines.wait("outrider", refusal, times=3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, SECONDS) == 0
    assert not living_children("hello from")


async def test_a_first_start_that_fails_ends_the_whole(tmp_path: Path) -> None:
    lines = Lines()
    absent = ServiceCommand("draft", (str(tmp_path / "absent"),), "unix:/nowhere")
    supervisor = Supervisor(service("target", tmp_path), absent, lines.emit, service("gateway", tmp_path))
    with pytest.raises(FileNotFoundError):
        await asyncio.wait_for(supervisor.supervise(), SECONDS)
    assert not living_children("hello from")
    # Its handlers are gone.
    assert not asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def test_gateway_is_started_again_and_stops_first(tmp_path: Path) -> None:
    lines = Lines()
    gateway, draft = service("gateway", tmp_path), service("draft", tmp_path)
    supervisor = Supervisor(service("target", tmp_path), draft, lines.emit, gateway)
    running = asyncio.create_task(supervisor.supervise())
    await lines.wait("gateway", "hello")
    _kill("hello from gateway")
    await lines.wait("gateway", "hello", times=2)
    await lines.wait("target", "hello")
    await lines.wait("draft", "hello")
    assert lines.count("outrider", "the gateway service was killed by SIGKILL") == 1
    os.kill(os.getpid(), signal.SIGTERM)
    await lines.wait("gateway", "goodbye")
    assert await asyncio.wait_for(running, SECONDS) == 0
    goodbyes = [name for name, line in lines.heard if line == "goodbye"]
    assert goodbyes[-3:] == ["gateway", "target", "draft"]
    assert not living_children("hello from")


def _kill(words: str) -> None:
    (child,) = living_children(words)
    child.kill()


@pytest.mark.parametrize(("status", "expected"), [(3, 3), (0, 1)], ids=["failure", "clean-exit"])
async def test_dead_target_ends_the_whole(tmp_path: Path, status: int, expected: int) -> None:
    lines = Lines()
    supervisor = Supervisor(failing("target", status), service("draft", tmp_path), lines.emit)
    assert await asyncio.wait_for(supervisor.supervise(), SECONDS) == expected
    assert lines.count("outrider", f"the target service exited with status {status}") == 1
    assert not living_children("hello from")


async def test_a_draft_that_refuses_its_settings_ends_the_whole(tmp_path: Path) -> None:
    """It would refuse them again."""
    lines = Lines()
    supervisor = Supervisor(service("target", tmp_path), failing("draft", 2), lines.emit)
    assert await asyncio.wait_for(supervisor.supervise(), SECONDS) == 2
    assert lines.count("outrider", "the draft service refuses its settings") == 1
    assert not living_children("hello from")


async def test_a_target_that_tls_keeps_from_its_probe_is_told_of_once(tmp_path: Path) -> None:
    lines, ready = Lines(), asyncio.Event()
    target = replace(service("target", tmp_path), tls=Tls())
    running = asyncio.create_task(Supervisor(target, None, lines.emit).supervise(ready.set))
    await lines.wait(
        "outrider", f"waiting for the target on {target.address}, asked with the TLS settings of [client]:"
    )
    assert lines.count("outrider", "the server does not speak TLS") == 1 and not ready.is_set()
    # Time for more probes, which have nothing new to say.
    await asyncio.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, SECONDS) == 0
    assert lines.count("outrider", "waiting for the target") == 1


async def test_killed_target_is_a_failure(tmp_path: Path) -> None:
    lines = Lines()
    running = asyncio.create_task(Supervisor(service("target", tmp_path), None, lines.emit).supervise())
    await lines.wait("target", "hello")
    _kill("hello from target")
    assert await asyncio.wait_for(running, SECONDS) == 1


async def test_stubborn_child_is_killed() -> None:
    lines: list[str] = []
    ignoring = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    child = await Child.start("stubborn", (sys.executable, "-c", ignoring), lines.append)
    async with asyncio.timeout(SECONDS):
        while not lines:
            await asyncio.sleep(0.02)
    assert await child.stop(0.2) == -signal.SIGKILL


async def test_lines_of_any_length_and_kind() -> None:
    lines: list[str] = []
    program = r"import sys; sys.stdout.buffer.write(b'a' * 60000 + b'\r50%\r100%\nb\xff\n\nend')"
    child = await Child.start("writer", (sys.executable, "-c", program), lines.append)
    assert await child.wait() == 0
    assert lines == ["a" * 60_000, "50%", "100%", "b\ufffd", "end"]


async def test_a_line_without_end_comes_in_parts() -> None:
    """It is neither kept whole nor searched again with every piece."""
    lines: list[str] = []
    child = await Child.start(
        "writer", (sys.executable, "-c", "import sys; sys.stdout.write('aé漢' * 100_000)"), lines.append
    )
    assert await child.wait() == 0
    assert "".join(lines) == "aé漢" * 100_000
    assert max(map(len, lines)) < 80_000


@pytest.mark.parametrize(
    ("program", "error"), [("raise SystemExit(4)", ServiceDied), ("import time; time.sleep(99)", ServiceSlow)]
)
async def test_waiting_for_what_never_serves(program: str, error: type[Exception], tmp_path: Path) -> None:
    child = await Child.start("mute", (sys.executable, "-c", program), lambda _: None)
    with pytest.raises(error, match="mute"):
        await wait_serving(child, f"unix:{tmp_path}/absent.sock", 1.0 if error is ServiceSlow else SECONDS)
    child.send_signal(signal.SIGKILL)
    await child.wait()


async def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import asyncio, sys
from outrider_client.local.process import Child

async def main():
    child = await Child.start("sleeper", (sys.executable, "-c", "import time; time.sleep(99)"), print)
    open({str(pid_file)!r}, "w").write(str(child._process.pid))
    await asyncio.sleep(99)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    child: Any = None
    async with asyncio.timeout(SECONDS):
        while not pid_file.exists() or not pid_file.read_text():
            await asyncio.sleep(0.05)
        child = psutil.Process(int(pid_file.read_text()))
        parent.kill()
        await parent.wait()
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("enabled", [True, False])
async def test_nothing_is_collected_between_a_fork_and_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    """What is collected there may wait for threads that the child does not have."""
    seen = tmp_path / "seen"
    monkeypatch.setattr(process, "_end_with_parent", lambda: seen.write_text(str(gc.isenabled())))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        child = await process.Child.start("child", ["true"], lambda _line: None)
        assert await child.wait() == 0
        assert seen.read_text() == "False" and gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
