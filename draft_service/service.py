"""The draft service as a process: drafter, server, metrics, and shutdown."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc

from draft_service.compiling import LOOPS
from draft_service.config import DraftConfig, add_drafter_flags, drafter_config
from draft_service.drafters.base import Drafter, create, device_of, info_of, loops_of
from draft_service.server import SERVICE_NAME, DraftServicer
from draft_service.session import SequenceAdmission
from outrider.busy_polling import allowed_seconds
from outrider.errors import OutriderError
from outrider.runtime import configure_logging, in_thread_to_leave, run, settled
from outrider.serving import Authenticator, GrpcServer, Service, ServingOptions, check_free, load_and_serve
from outrider.settings import HELP_ALL, CommandParser, SettingsError, add_flags, load, settings_file
from outrider.telemetry.names import DRAFT_SERVICE
from outrider.telemetry.registry import MetricsServer
from outrider.telemetry.rpc import RpcMetricsInterceptor
from outrider.telemetry.tracing import Tracing, set_up_tracing
from outrider.v1 import draft_pb2_grpc

logger = logging.getLogger(__name__)


def provide_drafter(
    server: GrpcServer, config: DraftConfig, drafter: Drafter, tracing: Tracing | None = None
) -> DraftServicer:
    """Add the servicer of a started drafter to a server. Raises `SettingsError` if they do not fit each other."""
    vocabulary_size = config.vocabulary_size or drafter.vocabulary_size
    if drafter.vocabulary_size not in (0, vocabulary_size):
        raise SettingsError(
            f"vocabulary_size is {vocabulary_size}, but the drafter was made for {drafter.vocabulary_size}"
        )
    admission = SequenceAdmission(
        config.max_sequences,
        vocabulary_size,
        trusted_tenant=config.trusted_tenant if server.options.authenticator.required else None,
    )
    info = info_of(drafter, vocabulary_size, config.tokenizer_fingerprint)
    # Beside a drafter on the CPU the core has better uses.
    busy_poll_seconds = allowed_seconds(config.busy_poll_ms / 1e3) if device_of(drafter) != "cpu" else 0.0
    servicer = DraftServicer(drafter, admission, info, tracing, busy_poll_seconds)
    server.provide(SERVICE_NAME, lambda to: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, to))
    return servicer


def make_server(config: DraftConfig, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> GrpcServer:
    """A server whose servicer is added later, by `provide_drafter`. Needs a running event loop. Raises `SettingsError`
    for settings that contradict each other."""
    options = ServingOptions.of(config, config.listen, partial(Authenticator.from_file, config.auth_tokens))
    # While a drafter compiles for seconds, the target's pings queue up, which looks like abuse.
    options = replace(options, ping_strikes=0)
    return GrpcServer(options, [Service(SERVICE_NAME, loading="the drafter is being loaded")], interceptors)


async def serve(config: DraftConfig, drafter: Drafter) -> int:
    """Start the drafter and serve until SIGTERM or SIGINT; returns the process's exit status. Health and metrics are
    served from the start."""
    calls = RpcMetricsInterceptor()
    tracing = set_up_tracing(DRAFT_SERVICE, config.otlp_endpoint, ratio=config.trace_ratio)
    with ExitStack() as stack:
        stack.callback(tracing.shutdown)
        server = make_server(config, [calls])
        metrics = MetricsServer(config.metrics_listen) if config.metrics_listen else None
        if metrics is not None:
            stack.callback(metrics.close)

        LOOPS.compile_beside(loops_of(drafter))

        async def load() -> DraftServicer:
            # Compiling and loading take seconds.
            await in_thread_to_leave(drafter.start)
            stack.callback(drafter.stop)
            servicer = provide_drafter(server, config, drafter, tracing)
            # Runs before the drafter is stopped.
            stack.callback(servicer.close)
            if metrics is not None:
                metrics.add([servicer.metrics.families, calls.metrics])
            stack.enter_context(settled())
            logger.info("drafting with %s on %s", drafter.name, server.address)
            return servicer

        return await load_and_serve(server, load, config.drain_seconds)


def run_service(arguments: Sequence[str]) -> int:
    """Read settings and serve; returns the process's exit status, 2 for wrong settings."""
    parser = CommandParser(prog="outrider draft", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=None, help="TOML file with [draft] and the drafter's section")
    add_flags(parser, DraftConfig)
    try:
        # The flags depend on the drafter, so its name is read first.
        words = [word for word in arguments if word not in ("-h", "--help", HELP_ALL)]
        known, _ = parser.parse_known_args(words)
        path = settings_file(known)
        config = load(DraftConfig, "draft", known, os.environ, path)
        add_drafter_flags(parser, words, config.drafter, path)
        flags = parser.parse_args(arguments)
        settings_of = partial(drafter_config, flags=flags, environment=os.environ, path=path)
        drafter = create(config.drafter, settings_of)
        configure_logging(config.log_level)
        # Checked before a head is loaded, which takes long.
        check_free(config.listen)
        return run(serve(config, drafter))
    except (SettingsError, OutriderError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
