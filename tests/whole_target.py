"""The whole target in this process: the real engine and the real server over a tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from readiness import ready
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import runner_for
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc
from target_service.config import TargetConfig
from target_service.lifecycle import serve_engine
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from target_service.shared_engine import SharedEngine


class FaultyRunner:
    """A runner that can be told to hang, or to fail, in its next pass."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.failure: Exception | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.in_pass = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: ForwardInput) -> Any:
        if self.failure is not None:
            raise self.failure
        self.in_pass.set()
        assert self.may_go_on.wait(HUNG_SECONDS)
        return self._runner.forward(batch)


@dataclass
class Service:
    """A running target and a channel to it."""

    runner: FaultyRunner
    channel: grpc.aio.Channel
    task: asyncio.Task[int]
    stopping: asyncio.Event

    @property
    def stub(self) -> Any:
        return target_pb2_grpc.TargetServiceStub(self.channel)

    async def tokens(self, **fields: Any) -> list[int]:
        request = pb.GenerateRequest(**fields)
        return [token async for response in self.stub.Generate(request) for token in response.chunk.token_ids]

    async def pages_free(self) -> None:
        """Wait until every page is given back, or fail after ten seconds."""
        async with asyncio.timeout(HUNG_SECONDS):
            while self.runner.cache.used_pages:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def whole_target(model: Any, tokenizer: Any, folder: Path, **settings: Any) -> AsyncIterator[Service]:
    runner = FaultyRunner(runner_for(model, tokenizer, num_pages=64, page_size=16, name="tiny"))
    config = TargetConfig(**({"listen": f"unix:{folder}/target", "drain_seconds": 60.0} | settings))
    stopping = asyncio.Event()
    task = asyncio.create_task(serve_engine(config, SharedEngine(config, runner), stopping))  # type: ignore[arg-type]
    async with grpc.aio.insecure_channel(config.listen) as channel:
        try:
            is_ready = asyncio.create_task(ready(channel))
            await asyncio.wait((is_ready, task), timeout=HUNG_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            is_ready.cancel()
            if task.done():
                task.result()
            yield Service(runner, channel, task, stopping)
        finally:
            stopping.set()
            runner.may_go_on.set()
            if not task.done():
                await asyncio.wait_for(task, HUNG_SECONDS)
