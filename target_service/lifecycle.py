"""The target service as a process: engine, draft link, server, metrics, tracing, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import AsyncExitStack
from typing import Protocol

from outrider import __version__
from outrider.limits import TenantTable
from outrider.runtime import settled
from outrider.serving import Authenticator, GrpcServer, Service, ServingOptions, TlsFiles, serve_until_stopped
from outrider.telemetry.names import TARGET_SERVICE
from outrider.telemetry.registry import MetricsServer
from outrider.telemetry.rpc import RpcMetricsInterceptor
from outrider.telemetry.tracing import Tracing, set_up_tracing
from outrider.v1 import target_pb2_grpc
from outrider.wire.frames import DraftInfo
from target_service.api.admission import Admission, ServedModel
from target_service.api.server import SERVICE_NAME, StreamLimits, TargetServicer
from target_service.api.weights import WeightRules, WeightUpdates
from target_service.assembly import Assembled, assemble, engine_config, served_model
from target_service.config import TargetConfig
from target_service.core.events import EngineSnapshot, SequenceEngine, Sequences
from target_service.core.quotas import TenantQuotas
from target_service.core.weights import UpdateDone, WeightUpdate
from target_service.engine.engine import Engine
from target_service.engine.stats import EngineObserver
from target_service.engine_process.client import STOP_SECONDS
from target_service.model.runner import ModelRunner
from target_service.preflight import speculates
from target_service.speculation_state import SpeculationState, speculation_state
from target_service.telemetry.metrics import PrometheusObserver

logger = logging.getLogger(__name__)

# Seconds between two looks at whether the last request has ended: less than anybody notices at a stop.
_DRAIN_POLL = 0.02


class ServingEngine(SequenceEngine, Protocol):
    """The engine as far as serving goes; `target_service.engine.engine.Engine` says what each member means."""

    @property
    def draft_info(self) -> DraftInfo | None: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def last_beat_ns(self) -> int: ...
    def drain(self) -> None: ...
    def snapshot(self) -> EngineSnapshot: ...
    def update_weights(self, update: WeightUpdate, done: UpdateDone) -> int: ...
    def cancel_update(self, update_id: int) -> None: ...


class EngineHost(Protocol):
    """Whoever runs an engine: `SharedEngine` here, or `engine_process.client.EngineLink` for one in another process."""

    @property
    def served(self) -> ServedModel: ...
    def engine(self, observer: EngineObserver | None) -> ServingEngine: ...
    async def start(self, sequences: Sequences) -> None: ...
    async def stop(self) -> None: ...


class EngineWorker:
    """The engine as the server's lifecycle sees it."""

    def __init__(self, engine: ServingEngine, heartbeat_seconds: float) -> None:
        self._engine = engine
        self._heartbeat_seconds = heartbeat_seconds

    def alive(self) -> bool:
        """Whether the engine's loop has come round lately."""
        age = (time.monotonic_ns() - self._engine.last_beat_ns) / 1e9
        return self._engine.failure is None and age < self._heartbeat_seconds

    def failure(self) -> BaseException | None:
        return self._engine.failure

    async def drain(self) -> None:
        """Refuse new requests and wait for those under way."""
        self._engine.drain()
        while self._engine.snapshot().sequences:
            await asyncio.sleep(_DRAIN_POLL)


class SharedEngine:
    """An engine with a thread of its own in the process that serves."""

    def __init__(self, config: TargetConfig, runner: ModelRunner) -> None:
        self._config = config
        self._runner = runner
        self._assembled: Assembled | None = None
        self.served = served_model(config, runner)

    def engine(self, observer: EngineObserver | None) -> Engine:
        """Assemble it. `observer` is called in the engine's thread; raises what `assemble` raises."""
        self._assembled = assemble(self._config, self._runner, observer)
        return self._assembled.engine

    async def start(self, sequences: Sequences) -> None:
        """Deliver events to `sequences` from now on."""
        assert self._assembled is not None, "there is no engine yet"
        self._assembled.engine.start(sequences.deliver)

    async def stop(self) -> None:
        """Stop it, or leave it behind when a step hangs: its thread is a daemon and does not hold the process."""
        if self._assembled is None:
            return
        stopper = threading.Thread(target=self._assembled.stop, name="engine-stop", daemon=True)
        stopper.start()
        deadline = time.monotonic() + STOP_SECONDS
        while stopper.is_alive():
            if time.monotonic() > deadline:
                logger.error("a step of the engine hangs; leaving without it")
                return
            await asyncio.sleep(_DRAIN_POLL)


def _make_server(
    config: TargetConfig,
    served: ServedModel,
    sequences: Sequences,
    engine: ServingEngine,
    tracing: Tracing,
    calls: RpcMetricsInterceptor,
) -> GrpcServer:
    def speculation() -> SpeculationState:
        return speculation_state(
            engine_config(config).drafting,
            engine.snapshot(),
            engine.draft_info,
            draft=config.draft,
            wanted=config.speculation,
            lookup=served.runtime.lookup,
        )

    def read_tokens() -> Authenticator:
        """The tokens' file holds what tenants may take too; a file that cannot be read changes neither."""
        authenticator = Authenticator.from_file(config.auth_tokens)
        sequences.quotas.table = TenantTable.from_file(config.auth_tokens, config.tenant_limits)
        return authenticator

    weights = WeightUpdates(
        engine,
        WeightRules(
            config.weights_folder,
            config.weights_staging,
            int(config.weights_stream_gb * 1e9),
            config.weights_without_token,
        ),
    )
    limits = StreamLimits(max_sequences=config.max_sequences_per_stream, idle_seconds=config.verify_idle_seconds)
    admission = Admission(served, sequences.quotas)
    servicer = TargetServicer(
        sequences, admission, limits, speculation, tracing, weights, tokens=bool(config.auth_tokens)
    )
    options = ServingOptions(
        listen=config.listen,
        max_message_bytes=config.max_message_bytes,
        first_message_seconds=config.first_message_seconds,
        # Twice what the engine takes: the rest is for health, information, and those it refuses with a reason.
        max_concurrent_calls=2 * (config.max_running + config.max_waiting) + 64,
        authenticator=Authenticator.from_file(config.auth_tokens),
        read_tokens=read_tokens,
        tls=TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca),
        reflection=config.reflection,
        admin_listen=config.admin_listen,
    )
    service = Service(SERVICE_NAME, lambda to: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, to))
    return GrpcServer(options, [service], [calls])


async def serve(config: TargetConfig, runner: ModelRunner, stopping: asyncio.Event | None = None) -> int:
    """Serve a loaded model from this process. See `serve_engine`; raises what the drafter of an in-process link raises,
    too."""
    return await serve_engine(config, SharedEngine(config, runner), stopping)


async def serve_engine(config: TargetConfig, host: EngineHost, stopping: asyncio.Event | None = None) -> int:
    """Serve until SIGTERM, SIGINT (or `stopping`) or the engine's death; returns the exit status.

    Raises `SettingsError` for settings that cannot work. The engine has been stopped in any case.
    """
    served = host.served
    calls = RpcMetricsInterceptor()
    observer = PrometheusObserver(served.name, served.dtype, __version__) if config.metrics_listen else None
    async with AsyncExitStack() as stack:
        tracing = set_up_tracing(
            TARGET_SERVICE,
            config.otlp_endpoint,
            ratio=config.trace_ratio,
            steps=config.trace_steps,
            version=__version__,
        )
        stack.push_async_callback(asyncio.to_thread, tracing.shutdown)
        stack.push_async_callback(host.stop)
        engine = host.engine(observer)
        quotas = TenantQuotas(TenantTable.from_file(config.auth_tokens, config.tenant_limits))
        sequences = Sequences(engine, asyncio.get_running_loop(), quotas)
        server = _make_server(config, served, sequences, engine, tracing, calls)
        if observer is not None:
            observer.watch(
                engine.snapshot, lambda: engine.last_beat_ns, lambda: engine.failure, drafted=speculates(config)
            )
            collectors = [observer.metrics, calls.metrics]
            metrics = MetricsServer(config.metrics_listen, collectors, observer.vllm_names)
            stack.callback(metrics.close)
            logger.info("metrics on http://%s/metrics", metrics.address)
        stack.enter_context(settled())
        await host.start(sequences)
        await server.start()
        logger.info("ready: %s on %s", served.name, server.address)
        return await serve_until_stopped(
            server, EngineWorker(engine, config.heartbeat_seconds), config.drain_seconds, stopping
        )
