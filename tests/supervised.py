"""Services for tests of `outrider up`'s supervision: processes with health, an end on SIGTERM, and their lines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from waits import HUNG_SECONDS
from warm_python import shared_python

from outrider_client.local import supervisor
from outrider_client.local.supervisor import ServiceCommand

# A service as far as supervision goes: health, and an end on SIGTERM. Its arguments: address, and words to print.
SERVICE = """
import asyncio, signal, sys
from outrider.serving import GrpcServer, ServingOptions

async def serve():
    server = GrpcServer(ServingOptions(listen=sys.argv[1]), [])
    await server.start()
    server.health.set_serving(True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sys.stdout.write(sys.argv[2] + chr(10))
    sys.stdout.flush()
    await stop.wait()
    await server.stop(0)
    sys.stdout.write("goodbye" + chr(10))

asyncio.run(serve())
"""
QUICK = {"START_SECONDS": HUNG_SECONDS, "STOP_SECONDS": HUNG_SECONDS, "FIRST_BACKOFF": 0.05, "LONGEST_BACKOFF": 0.2}
SECONDS = HUNG_SECONDS


def restart_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have supervisors wait for less than users would."""
    for name, seconds in QUICK.items():
        monkeypatch.setattr(supervisor, name, seconds)


class Lines:
    """What the supervisor and its services said."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self._more = asyncio.Event()

    def emit(self, name: str, line: str) -> None:
        self.heard.append((name, line))
        self._more.set()

    def count(self, name: str, words: str) -> int:
        return sum(1 for who, line in self.heard if who == name and words in line)

    async def wait(self, name: str, words: str, times: int = 1) -> None:
        async with asyncio.timeout(SECONDS):
            while self.count(name, words) < times:
                self._more.clear()
                await self._more.wait()


def service(name: str, folder: Path) -> ServiceCommand:
    address = f"unix:{folder / name}.sock"
    # Forked from one that has imported gRPC.
    python = str(shared_python("services") / "python")
    return ServiceCommand(name, (python, "-c", SERVICE, address, f"hello from {name}"), address)


def failing(name: str, status: int) -> ServiceCommand:
    return ServiceCommand(name, (sys.executable, "-c", f"raise SystemExit({status})"), "unix:/nowhere")
