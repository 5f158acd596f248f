"""A draft service while its drafter loads: its port is open, it says that it lives, and it takes no calls."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from readiness import ready
from scripted_drafter import ScriptedDrafter
from waits import HUNG_SECONDS

from draft_service.config import DraftConfig
from draft_service.server import SERVICE_NAME
from draft_service.service import serve
from outrider.errors import NotSupported
from outrider.v1 import draft_pb2, draft_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("liveness", "readiness", "", SERVICE_NAME)
TOKEN = "a-token-of-twenty-characters"
BEARER = (("authorization", f"Bearer {TOKEN}"),)


class SlowDrafter(ScriptedDrafter):
    """One that takes until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start = threading.Event()

    def start(self) -> None:
        assert self.may_start.wait(HUNG_SECONDS)
        if self.refuses is not None:
            raise self.refuses
        super().start()


@pytest.fixture
def config(tmp_path: Path) -> DraftConfig:
    (tmp_path / "tokens").write_text(f"{TOKEN} acme\n")
    return DraftConfig(
        listen=f"unix:{tmp_path}/draft", vocabulary_size=1000, auth_tokens=str(tmp_path / "tokens"), drain_seconds=60.0
    )


async def health(channel: grpc.aio.Channel) -> list[int]:
    """By `NAMES`, as probes ask, who have no token."""
    stub = health_pb2_grpc.HealthStub(channel)
    return [
        (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=HUNG_SECONDS)).status for name in NAMES
    ]


async def test_it_lives_then_is_ready_then_drains(config: DraftConfig) -> None:
    drafter = SlowDrafter()
    task = asyncio.create_task(serve(config, drafter))
    async with grpc.aio.insecure_channel(config.listen) as channel:
        await asyncio.wait_for(ready(channel, "liveness"), HUNG_SECONDS)
        assert await health(channel) == [SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        for call in (
            stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), metadata=BEARER),
            stub.Propose(metadata=BEARER),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if hasattr(call, "read") else call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "the drafter is being loaded"
        drafter.may_start.set()
        await asyncio.wait_for(ready(channel), HUNG_SECONDS)
        assert await health(channel) == [SERVING] * 4
        info = await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), metadata=BEARER)
        assert info.drafter == "scripted"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, HUNG_SECONDS) == 0
    assert (drafter.started, drafter.stopped) == (1, 1)


async def test_told_to_stop_it_does_not_wait_for_the_drafter(config: DraftConfig) -> None:
    drafter = SlowDrafter()
    task = asyncio.create_task(serve(config, drafter))
    async with grpc.aio.insecure_channel(config.listen) as channel:
        await asyncio.wait_for(ready(channel, "liveness"), HUNG_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, HUNG_SECONDS) == 0
    drafter.may_start.set()
    assert drafter.stopped == 0


async def test_a_drafter_that_cannot_start_ends_it_with_the_reason(config: DraftConfig) -> None:
    drafter = SlowDrafter()
    drafter.refuses = NotSupported("no such head")
    drafter.may_start.set()
    with pytest.raises(NotSupported, match="no such head"):
        await asyncio.wait_for(serve(config, drafter), HUNG_SECONDS)
