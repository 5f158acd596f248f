"""The target service as a process: engine, draft link, server, metrics, tracing, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import AsyncExitStack

from outrider import __version__
from outrider.metrics import MetricsServer
from outrider.rpc_metrics import RpcMetricsInterceptor
from outrider.serving import Authenticator, GrpcServer, Service, ServingOptions, TlsFiles, serve_until_stopped
from outrider.settings import SettingsError
from outrider.telemetry import TARGET_SERVICE
from outrider.tracing import Tracing, set_up_tracing
from outrider.v1 import target_pb2_grpc
from target_service.admission import Admission, ServedModel
from target_service.config import TargetConfig
from target_service.draft_client import StoppableLink, connect_draft
from target_service.drafting import DraftingConfig
from target_service.engine import Engine, EngineConfig
from target_service.events import Sequences
from target_service.metrics import PrometheusObserver
from target_service.model.runner import ModelRunner
from target_service.model.threads import in_passing_thread
from target_service.preflight import link_options
from target_service.profile import measure_step_cost
from target_service.scheduler import SchedulerConfig
from target_service.server import SERVICE_NAME, StreamLimits, TargetServicer

logger = logging.getLogger(__name__)

_DRAIN_POLL = 0.02
# Longer than any step takes; a step that takes longer still will not end.
_STOP_SECONDS = 5.0


class EngineWorker:
    """The engine as the server's lifecycle sees it."""

    def __init__(self, engine: Engine, heartbeat_seconds: float) -> None:
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


def engine_config(config: TargetConfig) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        scheduler=SchedulerConfig(config.max_running, config.max_step_rows, config.prefill_chunk),
        drafting=DraftingConfig(
            enabled=_speculates(config),
            disable_above=config.speculative_disable_queue_size,
            wait_seconds=config.draft_wait_ms / 1e3,
            failures_to_open=config.draft_failures_to_open,
        ),
        max_waiting=config.max_waiting,
        max_draft_nodes=config.max_draft_nodes,
    )


def served_model(config: TargetConfig, runner: ModelRunner) -> ServedModel:
    """What clients are told of the model, and held to."""
    cache = runner.cache
    kv_tokens = cache.num_pages * cache.page_size
    return ServedModel(
        name=runner.name,
        vocabulary_size=runner.vocabulary_size,
        max_context=min(runner.max_context, kv_tokens),
        max_rows=min(config.max_draft_nodes + 1, config.max_step_rows),
        dtype=str(runner.dtype).removeprefix("torch."),
        page_size=cache.page_size,
        kv_tokens=kv_tokens,
        end_token_ids=runner.end_token_ids,
        tokenizer_fingerprint=runner.tokenizer_fingerprint,
        tokenizer=runner.tokenizer,
        speculation=_speculates(config),
    )


def _speculates(config: TargetConfig) -> bool:
    return config.speculation and bool(config.draft)


def _connect(config: TargetConfig, runner: ModelRunner, engine: Engine) -> StoppableLink:
    try:
        return connect_draft(
            config.draft,
            engine.draft_events,
            runner.vocabulary_size,
            runner.tokenizer_fingerprint,
            link_options(config),
        )
    except ValueError as error:
        raise SettingsError(f"--draft: {error}") from None


async def _stop(engine: Engine) -> None:
    """Stop the engine, or leave it behind when a step hangs: its thread is a daemon and does not hold the process."""
    stopper = threading.Thread(target=engine.stop, args=(0.0,), name="engine-stop", daemon=True)
    stopper.start()
    deadline = time.monotonic() + _STOP_SECONDS
    while stopper.is_alive():
        if time.monotonic() > deadline:
            logger.error("a step of the engine hangs; leaving without it")
            return
        await asyncio.sleep(_DRAIN_POLL)


def _make_engine(config: TargetConfig, runner: ModelRunner, observer: PrometheusObserver | None) -> Engine:
    cost = None
    if _speculates(config) and config.row_budget == "adaptive":
        logger.info("measuring what a step costs by its rows")
        cost = in_passing_thread(lambda: measure_step_cost(runner, config.max_step_rows))
    return Engine(runner, engine_config(config), step_cost=cost, observer=observer)


def _make_server(
    config: TargetConfig,
    served: ServedModel,
    sequences: Sequences,
    engine: Engine,
    tracing: Tracing,
    calls: RpcMetricsInterceptor,
) -> GrpcServer:
    def drafter() -> str:
        return "" if engine.draft_info is None else engine.draft_info.drafter

    limits = StreamLimits(max_sequences=config.max_sequences_per_stream, idle_seconds=config.verify_idle_seconds)
    servicer = TargetServicer(sequences, Admission(served), limits, drafter, tracing)
    options = ServingOptions(
        listen=config.listen,
        max_message_bytes=config.max_message_bytes,
        # Twice what the engine takes: the rest is for health, information, and those it refuses with a reason.
        max_concurrent_calls=2 * (config.max_running + config.max_waiting) + 64,
        authenticator=Authenticator.from_file(config.auth_tokens),
        tls=TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca),
        reflection=config.reflection,
        admin_listen=config.admin_listen,
    )
    service = Service(SERVICE_NAME, lambda to: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, to))
    return GrpcServer(options, [service], [calls])


async def serve(config: TargetConfig, runner: ModelRunner, stopping: asyncio.Event | None = None) -> int:
    """Serve a loaded model until SIGTERM, SIGINT (or `stopping`) or the engine's death; returns the exit status.

    Raises `SettingsError` for settings that cannot work, and what the drafter of an in-process link raises.
    """
    served = served_model(config, runner)
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
        engine = _make_engine(config, runner, observer)
        sequences = Sequences(engine, asyncio.get_running_loop())
        server = _make_server(config, served, sequences, engine, tracing, calls)
        if observer is not None:
            observer.watch(engine.snapshot, lambda: engine.last_beat_ns, lambda: engine.failure)
            collectors = [observer.metrics, calls.metrics]
            metrics = MetricsServer(config.metrics_listen, collectors, observer.vllm_names)
            stack.callback(metrics.close)
            logger.info("metrics on http://%s/metrics", metrics.address)
        if _speculates(config):
            link = await asyncio.to_thread(_connect, config, runner, engine)
            stack.push_async_callback(asyncio.to_thread, link.stop)
            engine.attach_draft(link)
        engine.start(sequences.deliver)
        stack.push_async_callback(_stop, engine)
        await server.start()
        logger.info("ready: %s on %s", served.name, server.address)
        return await serve_until_stopped(
            server, EngineWorker(engine, config.heartbeat_seconds), config.drain_seconds, stopping
        )
