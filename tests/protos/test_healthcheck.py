"""The container health check against a real server: serving, not serving, unreachable, with a token, over TLS."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from waits import HUNG_SECONDS

from outrider.healthcheck import check, main
from outrider.serving import Authenticator, GrpcServer, ServingOptions


@asynccontextmanager
async def running(serving: bool = True, **options: Any) -> AsyncIterator[str]:
    server = GrpcServer(ServingOptions(**options), [])
    await server.start()
    server.health.set_serving(serving)
    try:
        yield server.address
    finally:
        await server.stop(0)


@pytest.mark.parametrize(("serving", "status"), [(True, "SERVING"), (False, "NOT_SERVING")])
async def test_status(serving: bool, status: str) -> None:
    async with running(serving) as address:
        assert await asyncio.to_thread(check, address) == status


async def test_a_process_lives_before_it_is_ready() -> None:
    async with running(serving=False) as address:
        said = [await asyncio.to_thread(check, address, name) for name in ("liveness", "readiness", "")]
        assert said == ["SERVING", "NOT_SERVING", "NOT_SERVING"]
        command = (sys.executable, "-m", "outrider.healthcheck", address, "--service", "liveness")
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=HUNG_SECONDS)
    assert (done.returncode, done.stdout) == (0, f"{address}: SERVING\n")


async def test_a_service_that_is_not_there() -> None:
    async with running() as address:
        assert await asyncio.to_thread(check, address, "no.such.Service") == "NOT_FOUND"


async def test_a_token_file_of_the_service_itself(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# who may call\ntenant acme weight=2\nsixteen-characters-or-more acme\n")
    async with running(authenticator=Authenticator.from_file(str(tokens))) as address:
        # Probes have no token, and need none.
        assert await asyncio.to_thread(check, address) == "SERVING"
        assert await asyncio.to_thread(lambda: check(address, tokens=str(tokens))) == "SERVING"


async def test_exit_status_of_the_command(tmp_path: Path) -> None:
    async with running(listen=f"unix:{tmp_path}/health") as address:
        command = (sys.executable, "-m", "outrider.healthcheck", address)
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=HUNG_SECONDS)
    assert (done.returncode, done.stdout) == (0, f"{address}: SERVING\n")


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1", "--timeout", "60"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("127.0.0.1:1: UNAVAILABLE: Connection refused") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "text", "refusal"),
    [
        ("--ca", None, "--ca: "),
        ("--ca", "text", "holds no PEM certificate"),
        ("--tokens", None, "--tokens: "),
        ("--tokens", "# nothing", "--tokens: it holds no token"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, text: str | None, refusal: str
) -> None:
    path = tmp_path / "given"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["127.0.0.1:1", flag, str(path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and refusal in said and said.count("\n") <= 2
