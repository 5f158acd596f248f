"""The whole target in one process: a tiny model, the real engine, the real server, and its ends."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from readiness import becomes
from waits import HUNG_SECONDS, until
from whole_target import whole_target

from outrider.settings import SettingsError
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from target_service import shared_engine
from target_service.preflight import EngineRefused

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def running(tiny_model: Any, model_tokenizer: Any, tmp_path: Any) -> Any:
    return partial(whole_target, tiny_model, model_tokenizer, tmp_path)


PROMPT = {"token_ids": [10, 20, 30]}
TOKEN = "a-token-of-twenty-characters"
FIFTY = {"max_tokens": 50, "ignore_eos": True}


async def test_a_tenants_limits_are_read_anew_on_sighup(running: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN} acme\n")
    who = (("authorization", f"Bearer {TOKEN}"),)

    async with running(auth_tokens=str(path)) as service:

        async def refused() -> bool:
            asked = pb.GenerateRequest(tokens=PROMPT, sampling={"max_tokens": 8, "ignore_eos": True})
            try:
                async for _ in service.stub.Generate(asked, metadata=who):
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return True
            return False

        assert not await refused()
        path.write_text(f"{TOKEN} acme\ntenant acme kv_tokens=5\n")
        assert not await refused()
        signal.raise_signal(signal.SIGHUP)
        async with asyncio.timeout(HUNG_SECONDS):
            while not await refused():
                await asyncio.sleep(0.01)
        # One that cannot be read changes nothing.
        path.write_text(f"{TOKEN} acme\ntenant acme kv_tokens=many\n")
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.1)
        assert await refused()


class TestWork:
    async def test_drafted_output_is_plain_output(self, running: Any) -> None:
        async with running(draft="inprocess:trie", row_budget="all") as service:
            async with asyncio.timeout(HUNG_SECONDS):
                while (await service.stub.GetTargetInfo(pb.GetTargetInfoRequest())).drafter != "trie":
                    await asyncio.sleep(0.02)
            plain = await service.tokens(tokens=PROMPT, sampling=FIFTY, speculation={"enabled": False})
            drafted = [await service.tokens(tokens=PROMPT, sampling=FIFTY) for _ in range(2)]
            assert len(plain) == 50
            assert drafted == [plain, plain]

    async def test_client_that_drafts_gets_what_generate_says(self, running: Any) -> None:
        """Trees of the true continuation, of nonsense, and of the root alone, step by step."""
        async with running() as service:
            plain = await service.tokens(tokens=PROMPT, sampling=FIFTY)
            call = service.stub.Verify()
            await call.write(pb.VerifyRequest(open=pb.OpenVerification(**PROMPT, sampling=FIFTY)))
            sequence_id = (await call.read()).opened.sequence_id
            said: list[int] = []
            step = accepted = 0
            while len(said) < 50:
                drafted = [plain[len(said) : len(said) + 4], [1, 2, 3], []][step % 3]
                root = said[-1] if said else PROMPT["token_ids"][-1]
                tree = tree_pb2.TokenTree(token_ids=[root, *drafted], parents=[0, *range(len(drafted))])
                await call.write(pb.VerifyRequest(tree=pb.VerifyTree(sequence_id=sequence_id, step=step, tree=tree)))
                verdict = (await call.read()).verdict
                said += verdict.token_ids
                accepted += len(verdict.accepted_rows)
                step = verdict.next_step
            call.cancel()
            assert said == plain
            assert verdict.finish_reason == pb.FINISH_REASON_LENGTH
            assert accepted >= 20
            await service.pages_free()

    async def test_cancelled_calls_give_their_pages_back(self, running: Any) -> None:
        async with running() as service:
            calls = [
                service.stub.Generate(
                    pb.GenerateRequest(tokens=PROMPT, sampling={"max_tokens": 400, "ignore_eos": True})
                )
                for _ in range(4)
            ]
            for call in calls:
                for _ in range(3):
                    await call.read()
            assert service.runner.cache.used_pages >= 4
            for call in calls:
                call.cancel()
            await service.pages_free()
            assert await service.tokens(tokens=PROMPT, sampling={"max_tokens": 2, "ignore_eos": True})

    async def test_metrics(self, running: Any, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        async with running(metrics_listen="127.0.0.1:0") as service:
            await service.tokens(tokens=PROMPT, sampling=FIFTY)
            (url,) = re.findall(r"metrics on (\S+)", caplog.text)
            page = await asyncio.to_thread(_read, url)
        assert 'outrider_requests_total{outcome="length"} 1.0' in page
        assert 'method="outrider.v1.TargetService/Generate"' in page


def _read(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read().decode())


class TestEnds:
    async def test_stop_drains(self, running: Any) -> None:
        async with running() as service:
            call = service.stub.Generate(pb.GenerateRequest(tokens=PROMPT, sampling=FIFTY))
            await call.read()
            service.stopping.set()
            count = 0
            while (response := await call.read()) is not grpc.aio.EOF:
                count += len(response.chunk.token_ids)
            assert count == 50
            assert await asyncio.wait_for(service.task, HUNG_SECONDS) == 0

    async def test_dead_engine_ends_the_process(self, running: Any) -> None:
        async with running() as service:
            watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
            await becomes(watch, SERVING)
            service.runner.failure = RuntimeError("a kernel failed")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.tokens(tokens=PROMPT, sampling=FIFTY)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "kernel" not in str(caught.value.details())
            assert (await watch.read()).status == NOT_SERVING
            assert await asyncio.wait_for(service.task, HUNG_SECONDS) == 1

    async def test_hung_step_is_not_serving(self, running: Any) -> None:
        async with running(heartbeat_seconds=0.5) as service:
            watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
            await becomes(watch, SERVING)
            service.runner.may_go_on.clear()
            service.runner.in_pass.clear()
            request = asyncio.create_task(service.tokens(tokens=PROMPT, sampling=FIFTY))
            await until(service.runner.in_pass.is_set)
            await becomes(watch, NOT_SERVING)
            service.runner.may_go_on.set()
            assert len(await request) == 50
            await becomes(watch, SERVING)
            watch.cancel()

    async def test_hung_step_does_not_hold_the_process(
        self, running: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_engine, "STOP_SECONDS", 0.5)
        async with running(drain_seconds=0.1) as service:
            service.runner.may_go_on.clear()
            service.runner.in_pass.clear()
            request = asyncio.create_task(service.tokens(tokens=PROMPT, sampling=FIFTY))
            await until(service.runner.in_pass.is_set)
            service.stopping.set()
            assert await asyncio.wait_for(service.task, HUNG_SECONDS) == 0
            with pytest.raises(grpc.aio.AioRpcError):
                await request
        assert "hangs" in caplog.text

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"listen": "nowhere"}, "cannot listen: 'nowhere' is not HOST:PORT"),
            ({"draft": "inprocess:absent"}, "absent"),
            ({"metrics_listen": "nowhere:x"}, "cannot serve metrics"),
            ({"admin_listen": "0.0.0.0:0"}, "loopback"),
        ],
        ids=["address", "drafter", "metrics", "admin"],
    )
    async def test_settings_that_cannot_work(self, running: Any, settings: Any, message: str) -> None:
        with pytest.raises(Exception, match=message) as caught:
            async with running(**settings):
                pass
        # What its drafter cannot be, the engine's own process says.
        assert isinstance(caught.value, SettingsError | EngineRefused)


async def test_every_method_that_reflection_finds_wants_a_token(running: Any, tmp_path: Any) -> None:
    """The list of methods comes from the server itself, so that a new one cannot be forgotten."""
    token = "a-token-of-some-length"
    (tmp_path / "tokens").write_text(f"{token} acme\n")
    async with running(auth_tokens=str(tmp_path / "tokens"), reflection=True) as service:
        bearer = (("authorization", f"Bearer {token}"),)
        paths = await _methods(service.channel, bearer)
        assert {path.split("/")[1] for path in paths} == {
            "outrider.v1.TargetService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for path in (path for path in paths if not path.startswith("/grpc.health.v1.Health/")):
            assert await _refusal(service.channel, path) is grpc.StatusCode.UNAUTHENTICATED, path
        info = await service.stub.GetTargetInfo(pb.GetTargetInfoRequest(), metadata=bearer)
        assert info.model == "tiny"


async def _refusal(channel: grpc.aio.Channel, path: str) -> grpc.StatusCode | None:
    """The status of a call without a token; None for one that is answered."""
    # Some hundred times as often as it happens.
    for _ in range(100):
        try:
            async for _ in channel.stream_stream(path)(iter([b""]), timeout=HUNG_SECONDS):
                pass
            return None
        except grpc.aio.AioRpcError as error:
            # What gRPC's own client makes of a write to a call that has ended: the refusal was faster.
            if error.details() != "Internal error from Core":
                return error.code()
    raise AssertionError(f"{path}: every write came too late")


async def _methods(channel: grpc.aio.Channel, metadata: Any) -> list[str]:
    """The path of every method that the server's reflection knows."""
    ask = reflection_pb2.ServerReflectionRequest
    stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(metadata=metadata)
    await stream.write(ask(list_services=""))
    names = [service.name for service in (await stream.read()).list_services_response.service]
    paths = []
    for name in names:
        await stream.write(ask(file_containing_symbol=name))
        for blob in (await stream.read()).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(blob)
            paths += [
                f"/{name}/{method.name}"
                for service in file.service
                if f"{file.package}.{service.name}" == name
                for method in service.method
            ]
    stream.cancel()
    return paths
