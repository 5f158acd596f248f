"""The engine in a process of its own, behind the real server: what it says, how it ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from readiness import becomes, ready
from scripted_engine import SERVED
from scripted_engine_process import FATAL, FOUND, GARBLED, HANGS, LOADED
from waits import HUNG_SECONDS, until
from warm_python import behind, shared_python, warm_executable

from outrider.errors import InvalidField
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc, tree_pb2
from outrider.wire.trees import error_of_rpc
from target_service.config import TargetConfig
from target_service.engine_process import client as engine_link
from target_service.engine_process.client import EngineLink
from target_service.grammars import vocabulary
from target_service.lifecycle import serve_engine
from target_service.preflight import EngineRefused
from target_service.text.tokenizer import ModelTokenizer

TESTS = Path(__file__).parents[1]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
# The scripted engine counts up: three hundred tokens, of which 2 ends an output.
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def started_in_a_moment() -> Iterator[None]:
    with warm_executable(shared_python("services")):
        yield


def scripted() -> tuple[str, str]:
    """The command of an engine's process."""
    return sys.executable, str(TESTS / "scripted_engine_process.py")


@dataclass
class Service:
    """A running target whose engine is elsewhere, and a channel to it."""

    link: EngineLink
    channel: grpc.aio.Channel
    task: asyncio.Task[int]
    stopping: asyncio.Event

    @property
    def stub(self) -> Any:
        return target_pb2_grpc.TargetServiceStub(self.channel)

    async def tokens(self, *prompt: int, **sampling: Any) -> list[int]:
        request = pb.GenerateRequest(tokens={"token_ids": prompt}, sampling=sampling)
        return [token async for response in self.stub.Generate(request) for token in response.chunk.token_ids]

    async def update(self, folder: str, **options: Any) -> Any:
        """Have the weights exchanged for those of a folder."""
        request = pb.UpdateWeightsRequest(begin=pb.BeginUpdate(folder=folder))
        return await self.stub.UpdateWeights(iter([request]), **options)

    async def watch(self) -> Any:
        """A health watch that has seen SERVING."""
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest())
        await becomes(watch, SERVING)
        return watch

    async def empty(self) -> None:
        """Wait until the engine holds nothing, or fail."""
        async with asyncio.timeout(HUNG_SECONDS):
            while (held := self.link.snapshot()).sequences or held.pages_used:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def served_apart(folder: Path, **settings: Any) -> AsyncIterator[Service]:
    config = TargetConfig(**({"listen": f"unix:{folder}/target", "drain_seconds": 60.0} | settings))
    link = EngineLink(config, scripted())
    stopping = asyncio.Event()
    task = asyncio.create_task(serve_engine(config, link, stopping))
    async with grpc.aio.insecure_channel(config.listen) as channel:
        await asyncio.wait_for(ready(channel), HUNG_SECONDS)
        yield Service(link, channel, task, stopping)
        stopping.set()
        await asyncio.wait_for(task, HUNG_SECONDS)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of ours outlives a test, and no descriptor stays open."""
    before = {child.pid for child in psutil.Process().children()}
    yield
    assert {child.pid for child in psutil.Process().children()} - before == set()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with served_apart(tmp_path) as running:
        yield running


class TestWeights:
    """Updates of the weights, over the socket."""

    async def test_an_update_and_its_refusal(self, tmp_path: Path) -> None:
        for name in ("step-1", "refused"):
            (tmp_path / "weights" / name).mkdir(parents=True)
        settings = {"weights_folder": str(tmp_path / "weights"), "weights_without_token": True}
        async with served_apart(tmp_path, **settings) as service:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.update("refused")
            assert isinstance(error_of_rpc(caught.value), InvalidField)
            assert (await service.update("step-1")).model_version == 2
            # Whoever hears of it finds it.
            assert (await service.stub.GetTargetInfo(pb.GetTargetInfoRequest())).model_version == 2

    async def test_an_update_that_is_given_up(self, tmp_path: Path) -> None:
        for name in ("held", "step-1"):
            (tmp_path / "weights" / name).mkdir(parents=True)
        settings = {"weights_folder": str(tmp_path / "weights"), "weights_without_token": True}
        async with served_apart(tmp_path, **settings) as service:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.update("held", timeout=0.3)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await service.update("step-1")).model_version == 2

    async def test_the_engines_death_is_heard(self, tmp_path: Path) -> None:
        (tmp_path / "weights" / "held").mkdir(parents=True)
        settings = {"weights_folder": str(tmp_path / "weights"), "weights_without_token": True}
        async with served_apart(tmp_path, **settings) as service:
            waiting = asyncio.create_task(service.update("held"))
            await asyncio.sleep(0.2)
            os.kill(service.link.pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await waiting
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.wait_for(service.task, HUNG_SECONDS) == 1


class TestWork:
    async def test_generates_and_verifies(self, service: Service) -> None:
        assert await service.tokens(10, 20, 30, **LONG) == [(31 + i) % 300 for i in range(200)]
        call = service.stub.Verify()
        await call.write(pb.VerifyRequest(open={"token_ids": [10, 20, 30], "sampling": LONG}))
        opened = (await call.read()).opened
        tree = tree_pb2.TokenTree(token_ids=[30, 31, 32, 9], parents=[0, 0, 1, 2])
        await call.write(pb.VerifyRequest(tree={"sequence_id": opened.sequence_id, "step": 0, "tree": tree}))
        verdict = (await call.read()).verdict
        assert (list(verdict.accepted_rows), list(verdict.token_ids)) == ([1, 2], [31, 32, 33])
        # The root has moved on.
        await call.write(pb.VerifyRequest(tree={"sequence_id": opened.sequence_id, "step": 1, "tree": tree}))
        status = (await call.read()).status.status
        assert status.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        call.cancel()
        await service.empty()

    async def test_draft_is_named(self, service: Service) -> None:
        async with asyncio.timeout(HUNG_SECONDS):
            while (await service.stub.GetTargetInfo(pb.GetTargetInfoRequest())).drafter != "scripted":
                await asyncio.sleep(0.02)

    async def test_cancelled_calls_are_forgotten_on_both_sides(self, service: Service) -> None:
        calls = [service.stub.Generate(pb.GenerateRequest(tokens={"token_ids": [5]}, sampling=LONG)) for _ in range(8)]
        for call in calls:
            for _ in range(3):
                await call.read()
        assert service.link.snapshot().pages_used == 8
        for call in calls:
            call.cancel()
        await service.empty()

    async def test_waiting_is_bounded(self, tmp_path: Path) -> None:
        """The scripted engine runs whatever it has, so that only what it has not said yet waits."""
        async with served_apart(tmp_path, max_waiting=0) as service:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.tokens(5, max_tokens=2)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_refusal_of_the_engine_reaches_its_caller(self, service: Service) -> None:
        """The ninth sequence is more than the scripted engine takes."""
        outcomes = await asyncio.gather(*(service.tokens(5, **LONG) for _ in range(9)), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert [len(outcome) for outcome in outcomes if isinstance(outcome, list)] == [200] * 8


class TestEnds:
    async def test_drains(self, service: Service) -> None:
        call = service.stub.Generate(pb.GenerateRequest(tokens={"token_ids": [5]}, sampling=LONG))
        await call.read()
        service.stopping.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            # Until it has heard of it.
            while True:
                await service.tokens(5, max_tokens=2)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        while (response := await call.read()) is not grpc.aio.EOF:
            last = response
        assert last.finished.usage.completion_tokens == 200
        assert await asyncio.wait_for(service.task, HUNG_SECONDS) == 0
        assert not psutil.pid_exists(service.link.pid)

    @pytest.mark.parametrize("how", ["killed", "step_fails", "garbled"])
    async def test_death_of_the_engine(self, service: Service, how: str, caplog: pytest.LogCaptureFixture) -> None:
        watch = await service.watch()
        call = service.stub.Generate(pb.GenerateRequest(tokens={"token_ids": [5]}, sampling=LONG))
        await call.read()
        if how == "killed":
            os.kill(service.link.pid, signal.SIGKILL)
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                await service.tokens(FATAL if how == "step_fails" else GARBLED, max_tokens=2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "swordfish" not in str(caught.value.details())
        assert (await watch.read()).status == NOT_SERVING
        assert await asyncio.wait_for(service.task, HUNG_SECONDS) == 1
        assert f"ended with status {-signal.SIGKILL if how == 'killed' else 1}" in caplog.text

    async def test_signals_of_the_group_are_not_the_engines(self, service: Service) -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            os.kill(service.link.pid, name)
        assert len(await service.tokens(5, **LONG)) == 200

    async def test_stopped_engine_is_not_serving(self, tmp_path: Path) -> None:
        async with served_apart(tmp_path, heartbeat_seconds=0.5) as service:
            watch = await service.watch()
            engine = behind(psutil.Process(service.link.pid))
            engine.suspend()
            await becomes(watch, NOT_SERVING)
            engine.resume()
            await becomes(watch, SERVING)
            assert len(await service.tokens(5, **LONG)) == 200
            watch.cancel()

    async def test_hung_step_does_not_hold_the_process(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_link, "STOP_SECONDS", 0.5)
        async with served_apart(tmp_path, drain_seconds=0.1) as service:
            request = asyncio.create_task(service.tokens(HANGS, max_tokens=2))
            await until(lambda: service.link.snapshot().sequences)
            service.stopping.set()
            assert await asyncio.wait_for(service.task, HUNG_SECONDS) == 0
            with pytest.raises(grpc.aio.AioRpcError):
                await request
        assert "hangs" in caplog.text

    async def test_descriptors_are_given_back(self, tmp_path: Path) -> None:
        held: list[int] = []
        for _ in range(2):
            async with served_apart(tmp_path) as service:
                await service.tokens(5, max_tokens=2)
            # Tests' processes leave objects excluded from collection, and what the service had when it started among
            # them: what is known by this name keeps a few descriptors.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            held.append(psutil.Process().num_fds())
        assert held[-1] <= held[0]


class TestStart:
    @pytest.mark.parametrize(
        ("model", "status", "reason"),
        [("refused", 2, "no such thing"), ("broken", 1, "ended with status 1")],
        ids=["refused", "broken"],
    )
    def test_engine_that_cannot_run(self, model: str, status: int, reason: str) -> None:
        before = psutil.Process().num_fds()
        link = EngineLink(TargetConfig(model=model), scripted())
        with pytest.raises(EngineRefused, match=reason) as caught:
            asyncio.run(link.load())
        assert caught.value.status == status
        assert not psutil.pid_exists(link.pid)
        assert psutil.Process().num_fds() == before

    def test_the_tokenizer_is_loaded_while_the_model_is(self, tmp_path: Path) -> None:
        """The model is not there before the tokenizer is."""
        loaded = tmp_path / "tokenizer"
        load_tokenizer: Any = loaded.touch
        link = EngineLink(TargetConfig(model=f"{FOUND}{loaded}"), scripted(), load_tokenizer)

        async def load() -> None:
            await asyncio.wait_for(link.load(), HUNG_SECONDS)
            await link.stop()

        asyncio.run(load())

    def test_forms_are_prepared_while_steps_are_captured(
        self, tmp_path: Path, model_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine is not ready before they are."""
        prepared = tmp_path / "forms"
        asked: list[tuple[object, int, tuple[int, ...]]] = []

        def warm_up(*of: Any) -> None:
            asked.append(of)
            prepared.touch()

        monkeypatch.setattr(vocabulary, "warm_up", warm_up)
        link = EngineLink(TargetConfig(model=f"{LOADED}{prepared}"), scripted(), lambda: model_tokenizer)

        async def load() -> None:
            await asyncio.wait_for(link.load(), HUNG_SECONDS)
            await link.stop()

        asyncio.run(load())
        assert asked == [(model_tokenizer, SERVED.vocabulary_size, SERVED.end_token_ids)]

    def test_engine_ends_with_the_process_that_serves(self) -> None:
        """Killed, so that nothing in it can tell its engine."""
        script = (
            "import asyncio, sys\n"
            "from target_service.config import TargetConfig\n"
            "from target_service.engine_process.client import EngineLink\n"
            f"link = EngineLink(TargetConfig(), {scripted()!r})\n"
            "async def main():\n"
            "    await link.load()\n"
            "    sys.stdout.write(f'{link.pid}\\n'), sys.stdout.flush()\n"
            "    await asyncio.sleep(3600)\n"
            "asyncio.run(main())\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            engine = psutil.Process(int(parent.stdout.readline()))
            assert engine.is_running()
            parent.kill()
        psutil.wait_procs([engine], timeout=HUNG_SECONDS)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
