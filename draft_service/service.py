"""The draft service as a process: drafter, server, metrics, and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path

import grpc

from draft_service.config import DraftConfig, drafter_config
from draft_service.drafters.base import Drafter, create, device_of, drafter_spec, info_of
from draft_service.server import SERVICE_NAME, DraftServicer
from draft_service.session import Admission
from draft_service.telemetry.metrics import PrometheusDraftObserver
from draft_service.telemetry.observer import DraftObserver
from outrider import __version__
from outrider.busy_polling import allowed_seconds
from outrider.command_line import CommandParser
from outrider.errors import OutriderError
from outrider.runtime import configure_logging, in_thread_to_leave, run, settled
from outrider.serving import (
    Authenticator,
    GrpcServer,
    Service,
    ServingOptions,
    TlsFiles,
    check_free,
    load_and_serve,
)
from outrider.settings import CONFIG_VARIABLE, SettingsError, add_flags, load
from outrider.telemetry.names import DRAFT_SERVICE
from outrider.telemetry.registry import MetricsServer
from outrider.telemetry.rpc import RpcMetricsInterceptor
from outrider.telemetry.tracing import Tracing, set_up_tracing
from outrider.v1 import draft_pb2_grpc

logger = logging.getLogger(__name__)

# Seconds between looks at whether the last sequence has ended. Chosen, not measured: an end is noticed later by no more
# than this, out of seconds of `drain_seconds`, and a look reads one number.
_DRAIN_POLL = 0.05


class DraftWorker:
    """The work behind the server, as its lifecycle sees it. A drafter's failure ends the stream that met it and not the
    service, so this lives as the event loop does."""

    def __init__(self, admission: Admission, close: Callable[[], None]) -> None:
        """`close` waits for the drafter's thread, if it has one."""
        self.admission = admission
        self.close = close

    def alive(self) -> bool:
        return True

    def failure(self) -> BaseException | None:
        return None

    async def drain(self) -> None:
        """Refuse new sequences and wait for the open ones to end."""
        self.admission.draining = True
        while self.admission.sequences:
            await asyncio.sleep(_DRAIN_POLL)


def build_server(
    config: DraftConfig,
    drafter: Drafter,
    observer: DraftObserver | None = None,
    tracing: Tracing | None = None,
) -> tuple[GrpcServer, DraftWorker]:
    """A server over a started drafter, not yet listening. Needs a running event loop.

    Raises `SettingsError` for settings that contradict each other or the drafter.
    """
    server = _make_server(config, ())
    return server, _provide(server, config, drafter, observer, tracing)


def _provide(
    server: GrpcServer, config: DraftConfig, drafter: Drafter, observer: DraftObserver | None, tracing: Tracing | None
) -> DraftWorker:
    """Bring a server the servicer of a started drafter."""
    vocabulary_size = config.vocabulary_size or drafter.vocabulary_size
    if drafter.vocabulary_size not in (0, vocabulary_size):
        raise SettingsError(
            f"vocabulary_size is {vocabulary_size}, but the drafter was made for {drafter.vocabulary_size}"
        )
    admission = Admission(
        config.max_sequences,
        vocabulary_size,
        trusted_tenant=config.trusted_tenant if server.options.authenticator.required else None,
    )
    info = info_of(drafter, vocabulary_size, config.tokenizer_fingerprint)
    # A drafter on the CPU, and whatever computes beside it, can use the core.
    busy_poll_seconds = allowed_seconds(config.busy_poll_ms / 1e3) if device_of(drafter) != "cpu" else 0.0
    servicer = DraftServicer(drafter, admission, info, observer, tracing, busy_poll_seconds)
    server.provide(SERVICE_NAME, lambda to: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, to))
    return DraftWorker(admission, servicer.close)


def _make_server(config: DraftConfig, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> GrpcServer:
    """A server whose servicer comes once there is a drafter."""
    options = ServingOptions(
        listen=config.listen,
        max_message_bytes=config.max_message_bytes,
        first_message_seconds=config.first_message_seconds,
        authenticator=Authenticator.from_file(config.auth_tokens),
        read_tokens=partial(Authenticator.from_file, config.auth_tokens),
        tls=TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca),
        reflection=config.reflection,
        admin_listen=config.admin_listen,
        # A drafter that compiles or computes for seconds lets its target's pings pile up, which looks like abuse.
        ping_strikes=0,
    )
    return GrpcServer(options, [Service(SERVICE_NAME, loading="the drafter is being loaded")], interceptors)


async def serve(config: DraftConfig, drafter: Drafter) -> int:
    """Start the drafter and serve until SIGTERM or SIGINT; returns the process's exit status. Health and scrapes are
    answered from the start."""
    calls = RpcMetricsInterceptor()
    tracing = set_up_tracing(DRAFT_SERVICE, config.otlp_endpoint, ratio=config.trace_ratio, version=__version__)
    with ExitStack() as stack:
        stack.callback(tracing.shutdown)
        server = _make_server(config, [calls])
        metrics = MetricsServer(config.metrics_listen, ()) if config.metrics_listen else None
        if metrics is not None:
            stack.callback(metrics.close)

        async def load() -> DraftWorker:
            # Compiling and loading take seconds.
            await in_thread_to_leave(drafter.start)
            stack.callback(drafter.stop)
            observer = PrometheusDraftObserver(drafter.name, __version__, drafter.stats)
            worker = _provide(server, config, drafter, observer, tracing)
            # Before the drafter is stopped.
            stack.callback(worker.close)
            if metrics is not None:
                metrics.add([observer.metrics, calls.metrics])
            stack.enter_context(settled())
            logger.info("drafting with %s on %s", drafter.name, server.address)
            return worker

        return await load_and_serve(server, load, config.drain_seconds)


def run_service(arguments: Sequence[str]) -> int:
    """Read settings and serve; returns the process's exit status, 2 for settings that cannot work."""
    parser = CommandParser(prog="outrider draft", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=None, help="TOML file with [draft] and the drafter's section")
    add_flags(parser, DraftConfig)
    path_name = os.environ.get(CONFIG_VARIABLE)
    try:
        # Which flags there are depends on the drafter, so that one is found out first.
        words = [word for word in arguments if word not in ("-h", "--help")]
        known, _ = parser.parse_known_args(words)
        path = known.config or (Path(path_name) if path_name else None)
        config = load(DraftConfig, "draft", known, os.environ, path)
        _add_drafter_flags(parser, words, config.drafter, path)
        flags = parser.parse_args(arguments)
        settings_of = partial(drafter_config, flags=flags, environment=os.environ, path=path)
        drafter = create(config.drafter, settings_of(config.drafter), settings_of)
        configure_logging(config.log_level)
        # A head takes long to load for a service that cannot listen.
        check_free(config.listen)
        return run(serve(config, drafter))
    except (SettingsError, OutriderError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _add_drafter_flags(parser: argparse.ArgumentParser, words: Sequence[str], drafter: str, path: Path | None) -> None:
    """The flags of a drafter and of those that it is made of. One that several have is for each of them."""
    spec = drafter_spec(drafter)
    add_flags(parser, spec.config)
    known, _ = parser.parse_known_args(words)
    added = {field.name for field in fields(spec.config)}
    for part in spec.parts(drafter_config(drafter, known, os.environ, path)):
        config = drafter_spec(part).config
        add_flags(parser, config, added)
        added |= {field.name for field in fields(config)}
