"""A target while it loads: its port is open, it says that it lives, and it takes no calls."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from readiness import ready
from safetensors.torch import save_file
from scripted_service import byte_tokenizer
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import runner_for
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc
from target_service.api.admission import ServedModel
from target_service.api.server import SERVICE_NAME
from target_service.config import TargetConfig
from target_service.lifecycle import serve_engine
from target_service.preflight import EngineRefused
from target_service.shared_engine import SharedEngine

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LIVE = {"liveness": SERVING}
READINESS = ("", "readiness", SERVICE_NAME)
TOKEN = "a-token-of-twenty-characters"
BEARER = (("authorization", f"Bearer {TOKEN}"),)
ASKED = pb.GenerateRequest(tokens={"token_ids": [10, 20, 30]}, sampling={"max_tokens": 400, "ignore_eos": True})


class SlowHost(SharedEngine):
    """A host whose model takes until it is told."""

    def __init__(self, config: TargetConfig, runner: Any) -> None:
        super().__init__(config, runner)
        self.may_load = asyncio.Event()
        self.refusal: Exception | None = None

    async def load(self) -> ServedModel:
        await self.may_load.wait()
        if self.refusal is not None:
            raise self.refusal
        return await super().load()


@dataclass
class Loading:
    host: SlowHost
    config: TargetConfig
    channel: grpc.aio.Channel
    task: asyncio.Task[int]
    stopping: asyncio.Event

    @property
    def stub(self) -> Any:
        return target_pb2_grpc.TargetServiceStub(self.channel)

    async def health(self) -> dict[str, int]:
        """What probes are told, who have no token."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        asked = {name: health_pb2.HealthCheckRequest(service=name) for name in ("liveness", *READINESS)}
        return {
            name: (await stub.Check(request, timeout=HUNG_SECONDS, wait_for_ready=True)).status
            for name, request in asked.items()
        }

    async def page(self) -> str:
        def read() -> str:
            with urllib.request.urlopen(f"http://{self.config.metrics_listen}/metrics", timeout=HUNG_SECONDS) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(read)


@pytest.fixture
async def loading(
    tiny_model: Any, model_tokenizer: Any, tmp_path: Path, unused_tcp_port: int
) -> AsyncIterator[Loading]:
    (tmp_path / "tokens").write_text(f"{TOKEN} acme\n")
    config = TargetConfig(
        listen=f"unix:{tmp_path}/target",
        metrics_listen=f"127.0.0.1:{unused_tcp_port}",
        auth_tokens=str(tmp_path / "tokens"),
        drain_seconds=20.0,
    )
    host = SlowHost(config, runner_for(tiny_model, model_tokenizer, num_pages=64, page_size=16, name="tiny"))
    stopping = asyncio.Event()
    task = asyncio.create_task(serve_engine(config, host, stopping))
    async with grpc.aio.insecure_channel(config.listen) as channel:
        await asyncio.wait_for(ready(channel, "liveness"), HUNG_SECONDS)
        yield Loading(host, config, channel, task, stopping)
        stopping.set()
        await asyncio.wait({task}, timeout=HUNG_SECONDS)
        assert task.done()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(HUNG_SECONDS):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if not hasattr(call, "read") else call.read())
    return caught.value


async def test_probes_need_no_token_and_hear_both_answers(loading: Loading) -> None:
    assert await loading.health() == LIVE | dict.fromkeys(READINESS, NOT_SERVING)
    loading.host.may_load.set()
    await asyncio.wait_for(ready(loading.channel), HUNG_SECONDS)
    assert await loading.health() == LIVE | dict.fromkeys(READINESS, SERVING)
    # The first answer of a call that lasts: then it is told to stop.
    call = loading.stub.Generate(ASKED, metadata=BEARER)
    await call.read()
    loading.stopping.set()
    async with asyncio.timeout(HUNG_SECONDS):
        while (await loading.health())[""] == SERVING:
            await asyncio.sleep(0.01)
    assert await loading.health() == LIVE | dict.fromkeys(READINESS, NOT_SERVING)
    call.cancel()
    assert await asyncio.wait_for(loading.task, HUNG_SECONDS) == 0


@pytest.mark.parametrize("method", ["GetTargetInfo", "Generate", "Verify", "UpdateWeights"])
async def test_calls_are_refused_with_a_time_to_try_again(loading: Loading, method: str) -> None:
    calls = {
        "GetTargetInfo": lambda: loading.stub.GetTargetInfo(pb.GetTargetInfoRequest(), metadata=BEARER),
        "Generate": lambda: loading.stub.Generate(ASKED, metadata=BEARER),
        "Verify": lambda: loading.stub.Verify(metadata=BEARER),
        "UpdateWeights": lambda: loading.stub.UpdateWeights(iter([pb.UpdateWeightsRequest()]), metadata=BEARER),
    }
    error = await refused(calls[method]())
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the model is being loaded")
    status = rpc_status.from_call(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status.details) and info.reason == "LOADING"
    assert any(detail.Unpack(retry) for detail in status.details) and retry.retry_delay.ToTimedelta().total_seconds()


async def test_strangers_are_told_nothing(loading: Loading) -> None:
    error = await refused(loading.stub.Generate(ASKED))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    for path in ("/outrider.v1.NoService/Call", f"/{SERVICE_NAME}/NoSuchMethod"):
        error = await refused(loading.channel.unary_unary(path)(b"", metadata=BEARER))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_everything_works_once_it_is_loaded(loading: Loading) -> None:
    await refused(loading.stub.Generate(ASKED, metadata=BEARER))
    page = await loading.page()
    # It is up, and nothing is said of an engine that is not there, nor of calls that are refused until it is.
    assert "process_resident_memory_bytes" in page and "outrider_" not in page
    loading.host.may_load.set()
    await asyncio.wait_for(ready(loading.channel, SERVICE_NAME), HUNG_SECONDS)
    assert (await loading.stub.GetTargetInfo(pb.GetTargetInfoRequest(), metadata=BEARER)).model == "tiny"
    tokens = [token async for part in loading.stub.Generate(ASKED, metadata=BEARER) for token in part.chunk.token_ids]
    assert len(tokens) == 400
    assert (await refused(loading.stub.Generate(ASKED))).code() is grpc.StatusCode.UNAUTHENTICATED
    error = await refused(loading.channel.unary_unary(f"/{SERVICE_NAME}/NoSuchMethod")(b"", metadata=BEARER))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "outrider_engine_up 1.0" in await loading.page()


async def test_a_watch_hears_that_it_is_ready(loading: Loading) -> None:
    watch = health_pb2_grpc.HealthStub(loading.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert (await watch.read()).status == NOT_SERVING
    loading.host.may_load.set()
    assert (await asyncio.wait_for(watch.read(), HUNG_SECONDS)).status == SERVING
    watch.cancel()


async def test_told_to_stop_it_does_not_wait_for_the_model(loading: Loading) -> None:
    loading.stopping.set()
    assert await asyncio.wait_for(loading.task, HUNG_SECONDS) == 0


async def test_a_model_that_cannot_be_served_ends_it_with_the_reason(loading: Loading) -> None:
    loading.host.refusal = EngineRefused(1, "cannot serve it")
    loading.host.may_load.set()
    with pytest.raises(EngineRefused, match="cannot serve it"):
        await asyncio.wait_for(loading.task, HUNG_SECONDS)
    error = await refused(loading.stub.GetTargetInfo(pb.GetTargetInfoRequest(), metadata=BEARER))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and error.details() != "the model is being loaded"


# Python runs it before anything else: whoever loads a model waits for the library that knows how.
NEVER_LOADED = """
import os, pathlib, sys, time

class Stuck:
    def find_spec(self, name, path=None, target=None):
        # Not the package itself: whether that is there is asked before anything is loaded.
        if name == "transformers.utils":
            pathlib.Path(__file__).with_name(f"{os.getpid()}.stuck").touch()
            time.sleep(600)

sys.meta_path.insert(0, Stuck())
"""


@asynccontextmanager
async def stuck(folder: Path, arrangement: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process that loads its model for ever, and its address."""
    (folder / "sitecustomize.py").write_text(NEVER_LOADED)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    byte_tokenizer().save_pretrained(folder)
    command = [sys.executable, "-m", "target_service", "--model", str(folder), "--engine-process", arrangement]
    command += ["--listen", "127.0.0.1:0", "--threads", "1"]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
    assert process.stderr is not None
    try:
        said = ""
        async with asyncio.timeout(HUNG_SECONDS):
            while (found := re.search(r"loading; health is answered on (\S+)", said)) is None:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said += line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# Of a start, so by a real Python.
@pytest.mark.values
@pytest.mark.parametrize("arrangement", ["shared", "own"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_process_answers_while_it_loads_and_stops_when_told(
    tmp_path: Path, arrangement: str, number: signal.Signals
) -> None:
    async with stuck(tmp_path, arrangement) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(ready(channel, "liveness"), HUNG_SECONDS)
            error = await refused(target_pb2_grpc.TargetServiceStub(channel).Generate(ASKED))
            assert error.details() == "the model is being loaded"
            checked = 0
            async with asyncio.timeout(HUNG_SECONDS):
                # All the while that PyTorch is imported, and after.
                while checked < 5:
                    stub = health_pb2_grpc.HealthStub(channel)
                    assert (
                        await stub.Check(health_pb2.HealthCheckRequest(), timeout=HUNG_SECONDS)
                    ).status == NOT_SERVING
                    await asyncio.sleep(0.1)
                    checked += bool(list(tmp_path.glob("*.stuck")))
        process.send_signal(number)
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.read(), HUNG_SECONDS)).decode()
        assert await asyncio.wait_for(process.wait(), HUNG_SECONDS) == 0, said
        assert "stopped while loading" in said and "Traceback" not in said


NOWHERE = """
import asyncio, sys
from target_service.config import TargetConfig
from target_service.preflight import EngineRefused
from target_service.shared_engine import SharedEngine
try:
    asyncio.run(SharedEngine(TargetConfig(model="/nowhere/model")).load())
except EngineRefused as refusal:
    print(refusal.status, refusal.reason, "torch" in sys.modules)
"""


def test_a_model_that_is_not_there_is_refused_before_pytorch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOWHERE], capture_output=True, text=True, timeout=HUNG_SECONDS, check=True
    )
    assert done.stdout == "1 cannot serve /nowhere/model: there is no such folder False\n"
