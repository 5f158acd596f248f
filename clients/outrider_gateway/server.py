"""The gateway's process: uvicorn around the application, from listening to the end of the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from outrider.addresses import address_at
from outrider.host_names import is_loopback
from outrider.runtime import settled
from outrider.settings import SettingsError
from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import Tracing, set_up_tracing
from outrider_client.client import Client
from outrider_client.connection import Connection
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.app import Application
from outrider_gateway.config import GatewayConfig, host_and_port
from outrider_gateway.connections import Connections, GatewayProtocol
from outrider_gateway.discovery import AddressSource, Resolver, TargetName, target_name
from outrider_gateway.served_models import ServedModels
from outrider_gateway.shared_state import SharedState, most_connections
from outrider_gateway.targets import FoundTargets, Targets

if TYPE_CHECKING:
    from outrider_gateway.workers.parent import GatewayParent

logger = logging.getLogger(__name__)


class GatewayServer:
    """The gateway as an async context manager, inside which it answers at `address`, or on connections that it is
    given."""

    def __init__(self, config: GatewayConfig, access: AccessOptions, state: SharedState | None = None) -> None:
        """`access` is how the gateway itself reaches its targets, for their health; callers bring their own. With a
        `state` that other processes share it listens nowhere, and `adopt` takes its connections."""
        self._config = config
        self._access = access
        self._listens = state is None
        self._state = SharedState.of_one_process(config) if state is None else state
        self._connections = Connections(self._state.places.connections, self._state.places.idle)
        self._leave = contextlib.AsyncExitStack()
        self.address = ""

    async def __aenter__(self) -> GatewayServer:
        config, access = self._config, self._access
        async with contextlib.AsyncExitStack() as leave:
            raise_file_limit(config)
            listening = []
            if self._listens:
                listening.append(leave.enter_context(contextlib.closing(listen(config.listen))))
                self.address = address_of(listening[0])
            tracing = set_up_tracing(telemetry.GATEWAY_SERVICE, config.otlp_endpoint, ratio=config.trace_ratio)
            leave.callback(tracing.shutdown)
            targets = targets_of(config, access, tracing)
            self.application = application_for(config, targets, self._state)
            self._server = _Uvicorn(_uvicorn_config(config, self.application, self._connections))
            # From here on a signal may have it drain.
            await leave.enter_async_context(targets)
            self._serving = asyncio.create_task(self._server.serve(listening))
            leave.push_async_callback(self._stop)
            while not self._server.started:
                if self._serving.done():
                    await self._serving
                    raise SettingsError(f"cannot serve on {config.listen}")
                await asyncio.sleep(0.005)
            self._leave = leave.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave.aclose()

    async def adopt(self, connection: socket.socket, *, make_room: bool = False) -> None:
        """Answer on a connection that another process has accepted. Returns once it is ready, which takes a handshake
        with TLS. With `make_room` an idle one is closed then if its peer could have no further one in any process.
        Raises `OSError` where it is gone by then."""
        adopted = await self._server.adopt(connection)
        if make_room:
            self._connections.make_room(adopted.peer)

    @property
    def draining(self) -> bool:
        return self.application.draining

    def drain(self, *, at_once: bool = False) -> None:
        """Take no new connection, and end when running answers have ended, or `at_once`."""
        self.application.draining = True
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or at_once

    async def ended(self) -> None:
        """Wait for the end that `drain` asked for. Raises what ended the serving without being asked to."""
        await asyncio.wait([self._serving])
        self._serving.result()

    async def _stop(self) -> None:
        self.drain()
        await self.ended()


def log_address(config: GatewayConfig, address: str) -> None:
    """Log where a gateway serves, and a warning where tokens are not safe."""
    scheme = "https" if config.tls_certificate else "http"
    host, _ = host_and_port(config.listen)
    logger.info("serving %s://%s for %s", scheme, address, ", ".join(config.targets))
    if scheme == "http" and not is_loopback(host):
        logger.warning("%s is reachable from elsewhere without TLS: tokens travel in plain text", address)


async def serve(config: GatewayConfig, make: Callable[[], GatewayServer | GatewayParent]) -> int:
    """Serve until SIGTERM or SIGINT; a second one does not wait. Returns the process's exit status. Raises
    `SettingsError` for settings that cannot work."""
    loop, server = asyncio.get_running_loop(), make()

    def on_signal() -> None:
        if server.draining:
            logger.info("stopping at once")
        else:
            logger.info("draining for at most %g s", config.drain_seconds)
        server.drain(at_once=server.draining)

    # First: whoever gets an answer may send a signal.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    async with server:
        log_address(config, server.address)
        if config.processes > 1:
            logger.info("%d workers answer", config.processes)
        with settled():
            await server.ended()
    logger.info("stopped")
    return 0


class _Uvicorn(uvicorn.Server):
    """Uvicorn that leaves signals to us: it would end the process by the signal that it got."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def adopt(self, connection: socket.socket) -> GatewayProtocol:
        """See `GatewayServer.adopt`."""
        config = self.config

        def protocol() -> GatewayProtocol:
            # As `uvicorn.Server.startup` makes one for a connection that it accepts.
            return config.http_protocol_class(  # type: ignore[call-arg, return-value]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        _, adopted = await asyncio.get_running_loop().connect_accepted_socket(protocol, connection, ssl=config.ssl)
        return adopted


def _uvicorn_config(config: GatewayConfig, application: Application, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        application.asgi,
        # A class for uvicorn, which calls it for each connection.
        http=partial(GatewayProtocol, connections),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        # Ours are set up already. A line for every request is what metrics are for.
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # Chosen: above the 60 s of common load balancers.
        timeout_keep_alive=65,
        timeout_graceful_shutdown=math.ceil(config.drain_seconds),
        ssl_certfile=config.tls_certificate or None,
        ssl_keyfile=config.tls_key or None,
    )


def targets_of(
    config: GatewayConfig, access: AccessOptions, tracing: Tracing, sources: Sequence[AddressSource] = ()
) -> Targets:
    """The targets that the settings name, and those that `sources` find. Raises `SettingsError` for credentials that
    cannot be read."""
    names = {address: target_name(address) for address in config.targets}
    return Targets(
        [_client(access.connection(address), tracing) for address, name in names.items() if name is None],
        sources=[
            *(_targets_of_name(name, access, tracing) for name in names.values() if name is not None),
            *(FoundTargets(source, lambda each: _client(access.connection(each), tracing)) for source in sources),
        ],
        health_seconds=config.health_seconds,
        load_bound=config.load_bound,
        start_seconds=config.target_start_seconds,
    )


def application_for(config: GatewayConfig, targets: Targets, state: SharedState) -> Application:
    """The gateway's application before these targets, for a server that is here or elsewhere."""
    return Application(config, targets, ServedModels(targets, int(time.time())), state)


def _targets_of_name(name: TargetName, access: AccessOptions, tracing: Tracing) -> FoundTargets:
    """The targets behind a name, whose certificates are for the name."""
    return FoundTargets(
        Resolver(name), lambda address: _client(access.connection(address, server_name=name.host), tracing)
    )


def _client(connection: Connection, tracing: Tracing) -> Client:
    """A client of one target. All answers of a step come in one message."""
    return Client(connection, tracing, carries=True)


def raise_file_limit(config: GatewayConfig) -> None:
    """Have descriptors for all connections: without one for a further, none is accepted, not even for health."""
    # Descriptors besides those of connections: of targets, logs and libraries. Chosen.
    wanted = most_connections(config) + 128
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        logger.warning("%d files may be open, too few for --max-connections: the limit should be %d", most, wanted)


def listen(where: str) -> socket.socket:
    """The socket of a gateway that listens on HOST:PORT. Raises `SettingsError`."""
    host, port = host_and_port(where)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise SettingsError(f"cannot listen on {where}: {error.strerror}") from None


def address_of(listening: socket.socket) -> str:
    """HOST:PORT that a socket listens on."""
    return address_at(*listening.getsockname()[:2])
