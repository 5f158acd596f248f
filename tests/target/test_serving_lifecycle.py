"""Health, TLS and the lifecycle of a server, over real sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waits import HUNG_SECONDS

from outrider.errors import Draining, EngineDead
from outrider.serving import GrpcServer, Service, ServingOptions, TlsFiles, load_and_serve
from outrider.settings import SettingsError
from outrider.wire.trees import error_of_rpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class TestHealth:
    async def test_check(self, echo: Any) -> None:
        async with echo.serving(echo.Echo()) as server, grpc.aio.insecure_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", echo.name):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
            server.health.set_serving(False)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="absent"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    async def test_watch_tells_each_change_once(self, echo: Any) -> None:
        async with echo.serving(echo.Echo()) as server, grpc.aio.insecure_channel(server.address) as channel:
            stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=echo.name))
            assert (await stream.read()).status == SERVING
            server.health.set_serving(True)
            server.health.set_serving(False)
            assert (await stream.read()).status == NOT_SERVING
            server.health.set_serving(True)
            assert (await stream.read()).status == SERVING
            server.health.close()
            server.health.set_serving(True)
            assert (await stream.read()).status == NOT_SERVING

    async def test_watch_of_an_unknown_service_stays_open(self, echo: Any) -> None:
        async with echo.serving(echo.Echo()) as server, grpc.aio.insecure_channel(server.address) as channel:
            stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="absent"))
            assert (await stream.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.read(), 0.2)


class TestTls:
    async def test_server_certificate(self, echo: Any, certificates: Any) -> None:
        tls = TlsFiles(str(certificates.server), str(certificates.server_key))
        async with echo.serving(echo.Echo(), tls=tls) as server:
            trust = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
            async with grpc.aio.secure_channel(server.address, trust) as channel:
                assert await echo.call(channel, "Unary") == b"default"
            async with grpc.aio.insecure_channel(server.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await echo.call(channel, "Unary", timeout=HUNG_SECONDS)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_client_certificate_is_required(self, echo: Any, certificates: Any) -> None:
        tls = TlsFiles(str(certificates.server), str(certificates.server_key), str(certificates.authority))
        roots = certificates.authority.read_bytes()
        known = grpc.ssl_channel_credentials(
            roots, certificates.client_key.read_bytes(), certificates.client.read_bytes()
        )
        async with echo.serving(echo.Echo(), tls=tls) as server:
            async with grpc.aio.secure_channel(server.address, known) as channel:
                assert await echo.call(channel, "Unary") == b"default"
            async with grpc.aio.secure_channel(server.address, grpc.ssl_channel_credentials(roots)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await echo.call(channel, "Unary", timeout=HUNG_SECONDS)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_renewed_certificate_is_used(self, echo: Any, certificates: Any, tmp_path: Path) -> None:
        """The server starts with the client's certificate, then the file is renewed under it."""
        chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
        shutil.copy(certificates.client, chain)
        shutil.copy(certificates.client_key, key)
        async with echo.serving(echo.Echo(), tls=TlsFiles(str(chain), str(key))) as server:
            shutil.copy(certificates.server, chain)
            shutil.copy(certificates.server_key, key)
            host, _, port = server.address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port), ssl=_trusting(certificates.authority))
            subject = writer.get_extra_info("peercert")["subject"]
            writer.close()
            assert dict(pair for part in subject for pair in part)["commonName"] == "server"

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (TlsFiles(certificate="c"), "needs its key"),
            (TlsFiles(key="k"), "needs its key"),
            (TlsFiles(client_ca="c"), "need TLS"),
            (TlsFiles(certificate="/absent", key="/absent"), "No such file"),
        ],
        ids=["no-key", "no-certificate", "ca-alone", "missing"],
    )
    def test_bad_combinations(self, files: TlsFiles, message: str) -> None:
        with pytest.raises(SettingsError, match=message):
            files.server_credentials()


def _trusting(authority: Path) -> Any:
    context = ssl.create_default_context(cafile=str(authority))
    context.set_alpn_protocols(["h2"])
    return context


class FakeWorker:
    """A worker whose life is set by the test."""

    def __init__(self) -> None:
        self.is_alive = True
        self.died: BaseException | None = None
        self.draining = asyncio.Event()
        self.drained = asyncio.Event()

    def alive(self) -> bool:
        return self.is_alive and self.died is None

    def failure(self) -> BaseException | None:
        return self.died

    async def drain(self) -> None:
        self.draining.set()
        await self.drained.wait()


@asynccontextmanager
async def lifecycle(echo: Any, drain_seconds: float = 10.0) -> AsyncIterator[tuple[Any, ...]]:
    """A server under `load_and_serve`, and its Watch stream after the first SERVING."""
    worker, stopping = FakeWorker(), asyncio.Event()
    server = GrpcServer(ServingOptions(), [Service(echo.name, echo.Echo().add)])
    loaded = asyncio.Event()

    async def load() -> FakeWorker:
        loaded.set()
        return worker

    task = asyncio.create_task(load_and_serve(server, load, drain_seconds, stopping))
    # Where it fails before it loads, its error is the test's.
    await asyncio.wait({task, asyncio.create_task(loaded.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert loaded.is_set(), await task
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=echo.name))
        while (await watch.read()).status != SERVING:
            pass
        yield worker, stopping, watch, task, channel
    stopping.set()
    worker.drained.set()
    await asyncio.wait_for(task, HUNG_SECONDS)


class TestLifecycle:
    async def test_stop_drains_while_calls_go_on(self, echo: Any) -> None:
        async with lifecycle(echo) as (worker, stopping, watch, task, channel):
            stream = channel.unary_stream(f"/{echo.name}/Generate")(b"forever")
            stopping.set()
            assert (await watch.read()).status == NOT_SERVING
            await worker.draining.wait()
            for _ in range(5):
                assert await stream.read()
            assert await echo.call(channel, "Unary") == b"default"
            stream.cancel()
            watch.cancel()
            worker.drained.set()
            assert await asyncio.wait_for(task, HUNG_SECONDS) == 0

    async def test_first_signal_drains_and_the_second_does_not_wait(self, echo: Any) -> None:
        async with lifecycle(echo, drain_seconds=60) as (worker, _, watch, task, _channel):
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            await worker.draining.wait()
            assert not task.done()
            os.kill(os.getpid(), signal.SIGINT)
            assert await asyncio.wait_for(task, HUNG_SECONDS) == 0

    async def test_liveness_outlasts_readiness_and_falls_with_the_work(self, echo: Any) -> None:
        async with lifecycle(echo) as (worker, stopping, ready, _task, channel):
            stub = health_pb2_grpc.HealthStub(channel)
            live = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
            assert (await live.read()).status == SERVING
            worker.is_alive = False
            assert (await live.read()).status == (await ready.read()).status == NOT_SERVING
            worker.is_alive = True
            assert (await live.read()).status == (await ready.read()).status == SERVING
            stopping.set()
            assert (await ready.read()).status == NOT_SERVING
            asked = health_pb2.HealthCheckRequest(service="liveness")
            assert (await stub.Check(asked)).status == SERVING
            live.cancel()
            ready.cancel()

    async def test_drain_is_bounded(self, echo: Any) -> None:
        async with lifecycle(echo, drain_seconds=0.1) as (_, stopping, watch, task, _channel):
            watch.cancel()
            stopping.set()
            assert await asyncio.wait_for(task, HUNG_SECONDS) == 0

    @pytest.mark.parametrize("method", ["Generate", "Converse"])
    @pytest.mark.parametrize("dies", [False, True], ids=["drained", "died"])
    async def test_what_still_runs_is_told_to_try_elsewhere(self, echo: Any, method: str, dies: bool) -> None:
        """gRPC's own end is CANCELLED, as if the caller had wished it, and nobody tries that again."""
        async with lifecycle(echo, drain_seconds=0.1) as (worker, stopping, _watch, task, channel):
            if method == "Generate":
                stream = channel.unary_stream(f"/{echo.name}/Generate")(b"forever")
            else:
                stream = channel.stream_stream(f"/{echo.name}/Converse")()
                await stream.write(b"")
            assert await stream.read()
            if dies:
                worker.died = RuntimeError("kernel")
            stopping.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await stream.read() is not grpc.aio.EOF:
                    pass
            assert isinstance(error_of_rpc(caught.value), EngineDead if dies else Draining)
            assert await asyncio.wait_for(task, HUNG_SECONDS) == int(dies)

    async def test_stalled_worker_is_not_serving_and_may_recover(self, echo: Any) -> None:
        async with lifecycle(echo) as (worker, _, watch, task, _channel):
            worker.is_alive = False
            assert (await watch.read()).status == NOT_SERVING
            worker.is_alive = True
            assert (await watch.read()).status == SERVING
            assert not task.done()
            watch.cancel()

    @pytest.mark.parametrize("while_draining", [False, True], ids=["serving", "draining"])
    async def test_death_ends_with_a_status(self, echo: Any, while_draining: bool) -> None:
        async with lifecycle(echo) as (worker, stopping, watch, task, _channel):
            if while_draining:
                stopping.set()
                await worker.draining.wait()
            worker.died = RuntimeError("kernel")
            assert (await watch.read()).status == NOT_SERVING
            assert await asyncio.wait_for(task, HUNG_SECONDS) == 1
