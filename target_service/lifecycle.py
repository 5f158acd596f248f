"""The target service as a process: engine, draft link, server, metrics, tracing, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from outrider import __version__
from outrider.limits import TenantTable
from outrider.runtime import settled
from outrider.serving import Authenticator, GrpcServer, Service, ServingOptions, load_and_serve
from outrider.telemetry.names import TARGET_SERVICE
from outrider.telemetry.registry import MetricsServer
from outrider.telemetry.rpc import RpcMetricsInterceptor
from outrider.telemetry.tracing import set_up_tracing
from outrider.v1 import target_pb2_grpc
from target_service.api.admission import ServedModel
from target_service.api.kv_events import KvEventLog, PagesFollower
from target_service.api.server import SERVICE_NAME, TargetServicer
from target_service.config import TargetConfig
from target_service.core.events import DRAIN_POLL_SECONDS, EngineObserver, Sequences, ServingEngine
from target_service.core.quotas import TenantQuotas
from target_service.openengine.services import OpenEngineServices
from target_service.telemetry.metrics import PrometheusObserver

logger = logging.getLogger(__name__)


class EngineHost(Protocol):
    """Runs an engine: `shared_engine.SharedEngine` in this process, `engine_process.client.EngineLink` in another. Its
    methods are called in this order, `stop` at any time."""

    async def load(self) -> ServedModel: ...
    async def engine(self, observer: EngineObserver | None) -> ServingEngine: ...
    async def start(self, sequences: Sequences) -> None: ...
    async def stop(self) -> None: ...


@dataclass
class EngineWorker:
    """The engine as a worker of the server's lifecycle."""

    engine: ServingEngine
    heartbeat_seconds: float

    def alive(self) -> bool:
        """Whether the engine's loop ran recently."""
        age = (time.monotonic_ns() - self.engine.last_beat_ns) / 1e9
        return self.engine.failure is None and age < self.heartbeat_seconds

    def failure(self) -> BaseException | None:
        return self.engine.failure

    async def drain(self) -> None:
        """Refuse new requests and wait for those under way."""
        self.engine.drain()
        while self.engine.snapshot().sequences:
            await asyncio.sleep(DRAIN_POLL_SECONDS)


def _make_server(
    config: TargetConfig, quotas: TenantQuotas, calls: RpcMetricsInterceptor, others: Sequence[Service]
) -> GrpcServer:
    """A server, whose servicer is added once there is an engine, with `others` beside it."""

    def read_tokens() -> Authenticator:
        """Read tokens and tenants' limits from the same file; if it cannot be read, neither changes."""
        authenticator = Authenticator.from_file(config.auth_tokens)
        quotas.table = TenantTable.from_file(config.auth_tokens, config.tenant_limits)
        return authenticator

    # Twice what the engine takes; the rest is for health, information, and refusals with a reason.
    most = 2 * (config.max_running + config.max_waiting) + 64
    options = ServingOptions.of(config, config.listen, read_tokens, most)
    return GrpcServer(options, [Service(SERVICE_NAME), *others], [calls])


async def serve_engine(config: TargetConfig, host: EngineHost, stopping: asyncio.Event | None = None) -> int:
    """Load and serve until SIGTERM, SIGINT (or `stopping`) or the engine's failure; returns the exit status.

    Health and scrapes are answered from the start. Raises `SettingsError` for settings that cannot work, and what the
    host's `load` and `engine` raise. The engine is always stopped.
    """
    calls = RpcMetricsInterceptor()
    async with AsyncExitStack() as stack:
        endpoint, ratio = config.otlp_endpoint, config.trace_ratio
        tracing = set_up_tracing(TARGET_SERVICE, endpoint, ratio=ratio, steps=config.trace_steps)
        stack.push_async_callback(asyncio.to_thread, tracing.shutdown)
        stack.push_async_callback(host.stop)
        # Their table is read with the tokens.
        quotas = TenantQuotas()
        openengine = OpenEngineServices() if config.openengine else None
        server = _make_server(config, quotas, calls, openengine.services if openengine is not None else ())
        # At first with the metrics of the process only.
        metrics = MetricsServer(config.metrics_listen) if config.metrics_listen else None
        if metrics is not None:
            stack.callback(metrics.close)
            logger.info("metrics on http://%s/metrics", metrics.address)

        async def load() -> EngineWorker:
            served = await host.load()
            observer = PrometheusObserver(served.name, served.dtype, __version__) if metrics else None
            events = KvEventLog(config.kv_events, config.page_size) if config.kv_events else None
            engine = await host.engine(observer if events is None else PagesFollower(events, observer))
            sequences = Sequences(engine, quotas)
            servicer = TargetServicer(config, served, sequences, tracing, events)
            if observer is not None and metrics is not None:
                observer.watch(engine, drafted=config.speculates)
                metrics.add([observer.metrics, calls.metrics], observer.vllm_names)
            stack.enter_context(settled())
            await host.start(sequences)
            server.provide(SERVICE_NAME, lambda to: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, to))
            if openengine is not None:
                openengine.serve(server, servicer)
            logger.info("ready: %s on %s", served.name, server.address)
            return EngineWorker(engine, config.heartbeat_seconds)

        return await load_and_serve(server, load, config.drain_seconds, stopping)
