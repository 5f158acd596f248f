"""A draft service on a free port, and a target's end of a `Propose` stream, for tests of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from scripted_drafter import ScriptedDrafter
from waits import HUNG_SECONDS

from draft_service.config import DraftConfig
from draft_service.drafters.base import Drafter
from draft_service.server import SERVICE_NAME, DraftServicer
from draft_service.service import make_server, provide_drafter
from draft_service.telemetry.metrics import DraftMetrics
from outrider.errors import OutriderError
from outrider.serving import GrpcServer
from outrider.telemetry.tracing import Tracing
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import open_to_pb
from outrider.wire.frames import OpenSequence
from outrider.wire.trees import error_of

PROPOSE = f"/{SERVICE_NAME}/Propose"


class Stream:
    """A target's end of one `Propose` call, frame by frame."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **frame: Any) -> None:
        await self.call.write(draft_pb2.ProposeRequest(**frame))

    async def credit(self, frames: int = 100) -> None:
        await self.send(credit=draft_pb2.Credit(frames=frames))

    async def open(self, sequence: OpenSequence) -> None:
        await self.send(open=open_to_pb(sequence))

    async def advance(self, *parts: tuple[int, int, list[int]]) -> None:
        advances = [draft_pb2.SequenceAdvance(sequence_id=i, step=s, token_ids=t) for i, s, t in parts]
        await self.send(advance=draft_pb2.AdvanceSequences(sequences=advances))

    async def hear(self) -> Any:
        async with asyncio.timeout(HUNG_SECONDS):
            return await self.call.read()

    async def growth(self) -> draft_pb2.GrowSequences:
        frame = await self.hear()
        assert frame.WhichOneof("frame") == "growth", frame
        return frame.growth

    async def failure(self) -> tuple[int, OutriderError]:
        frame = await self.hear()
        assert frame.WhichOneof("frame") == "status", frame
        return frame.status.sequence_id, error_of(frame.status.status)

    async def reason(self) -> tuple[int, str]:
        sequence_id, error = await self.failure()
        return sequence_id, error.reason

    async def opened(self) -> draft_pb2.SequenceOpened:
        frame = await self.hear()
        assert frame.WhichOneof("frame") == "opened", frame
        return frame.opened


@dataclass
class Draft:
    drafter: Any
    server: GrpcServer
    worker: DraftServicer
    channel: grpc.aio.Channel
    metrics: DraftMetrics

    @property
    def stub(self) -> Any:
        return draft_pb2_grpc.DraftServiceStub(self.channel)

    @asynccontextmanager
    async def stream(self, credit: int = 100, **options: Any) -> AsyncIterator[Stream]:
        call = self.stub.Propose(**options)
        stream = Stream(call)
        if credit:
            await stream.credit(credit)
        try:
            yield stream
        finally:
            call.cancel()

    async def empty(self) -> None:
        """Wait until the drafter follows nothing, or fail."""
        async with asyncio.timeout(HUNG_SECONDS):
            while self.drafter.open_sequences or self.worker.admission.sequences:
                await asyncio.sleep(0.002)


def build_server(
    config: DraftConfig, drafter: Drafter, tracing: Tracing | None = None
) -> tuple[GrpcServer, DraftServicer]:
    """A server over a started drafter, not yet listening."""
    server = make_server(config)
    return server, provide_drafter(server, config, drafter, tracing)


@asynccontextmanager
async def draft_over(drafter: Drafter | None = None, **settings: Any) -> AsyncIterator[Draft]:
    drafter = drafter or ScriptedDrafter()
    config = replace(DraftConfig(listen="127.0.0.1:0"), **settings)
    server, worker = build_server(config, drafter)
    await server.start()
    server.health.set_serving(True)
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Draft(drafter, server, worker, channel, worker.metrics)
    finally:
        # One that runs on would end at some later test's cost.
        await server.stop(0)


async def becomes(read: Callable[[], float], value: float) -> None:
    """Wait until a metric has a value, or fail: figures are taken after the frames that they are about."""
    async with asyncio.timeout(HUNG_SECONDS):
        while read() != value:
            await asyncio.sleep(0.002)
