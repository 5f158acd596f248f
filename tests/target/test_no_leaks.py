"""Nothing that a caller said shows in logs, metrics, spans or errors at the default log level."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from readiness import ready
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import runner_for
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc
from outrider_client.demo.trace_sink import TraceSink
from target_service.config import TargetConfig
from target_service.lifecycle import serve_engine
from target_service.shared_engine import SharedEngine

SECRET = "swordfish"
TOKEN = 173


def requests() -> list[pb.GenerateRequest]:
    """One that succeeds, and one for each way in which what was said might be quoted back."""
    chat = pb.ChatInput(messages=[pb.ChatMessage(role=SECRET, content=SECRET)])
    wrong = pb.TokenInput(token_ids=[TOKEN, 2**31 + TOKEN])
    asked = [
        pb.GenerateRequest(text=SECRET),
        pb.GenerateRequest(text=SECRET * 2000),
        pb.GenerateRequest(text=SECRET),
        pb.GenerateRequest(chat=chat),
        pb.GenerateRequest(tokens=wrong),
        pb.GenerateRequest(text=SECRET),
    ]
    for request in asked:
        request.sampling.max_tokens = 4
    asked[2].sampling.temperature = math.nan
    asked[5].sampling.stop.extend([SECRET * 100])
    return asked


def page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=HUNG_SECONDS) as response:
        return str(response.read().decode())


async def test_what_was_said_is_not_told(
    tiny_model: Any, model_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, unused_port: int
) -> None:
    caplog.set_level(logging.INFO)
    sink = TraceSink()
    await sink.start()
    config = TargetConfig(
        listen=f"unix:{tmp_path}/target",
        metrics_listen=f"127.0.0.1:{unused_port}",
        otlp_endpoint=sink.endpoint,
        trace_steps=True,
        drain_seconds=HUNG_SECONDS,
        draft="inprocess:prompt_lookup",
    )
    runner = runner_for(tiny_model, model_tokenizer, num_pages=64, page_size=16, name="tiny")
    stopping = asyncio.Event()
    running = asyncio.create_task(serve_engine(config, SharedEngine(config, runner), stopping))
    told: list[str] = []
    async with grpc.aio.insecure_channel(config.listen) as channel:
        await asyncio.wait_for(ready(channel), HUNG_SECONDS)
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        for request in requests():
            try:
                async for _ in stub.Generate(request):
                    pass
            except grpc.aio.AioRpcError as error:
                told += [str(error.details()), str(error.trailing_metadata())]
        told += [await asyncio.to_thread(page, unused_port, path) for path in ("/metrics", "/metrics/vllm")]
    stopping.set()
    assert await running == 0
    await sink.stop()
    spans = [f"{span.name} {span.attributes}" for span in sink._spans]
    assert len(spans) >= len(requests())
    assert len(told) > 4
    for text in (*told, *spans, caplog.text):
        assert SECRET not in text
        assert str(2**31 + TOKEN) not in text


@pytest.fixture
def unused_port() -> int:

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
