"""The gRPC server that both services run: limits, security, health, and the optional admin port."""

from __future__ import annotations

import asyncio
import logging
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.addresses import address_problem, is_local
from outrider.errors import Draining, OutriderError
from outrider.ports import port_refusal
from outrider.serving import health
from outrider.serving.calls import MAX_METADATA_BYTES, CallLimits, Calls
from outrider.serving.carried_calls import CarryingInterceptor
from outrider.serving.credentials import TlsFiles
from outrider.serving.health import HealthServicer
from outrider.serving.interceptors import AuthInterceptor, ErrorInterceptor
from outrider.serving.pending import PendingService
from outrider.serving.tenancy import Authenticator
from outrider.settings import ServiceSettings, SettingsError

logger = logging.getLogger(__name__)
# Seconds to send the statuses of calls that a stop ends; a caller that reads nothing gets none. Chosen, not measured.
LAST_WORDS_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    """One service to serve: its full name, and the function that adds its servicer to a server. Without `add` the
    servicer is added by `GrpcServer.provide`; callers get the message `loading` until then."""

    name: str
    add: Callable[[Any], None] | None = None
    loading: str = "the model is being loaded"


@dataclass(frozen=True)
class ServingOptions:
    """Addresses, limits and security of a server. See the settings of the same names."""

    listen: str = "127.0.0.1:0"
    limits: CallLimits = field(default_factory=CallLimits)
    authenticator: Authenticator = field(default_factory=Authenticator)
    read_tokens: Callable[[], Authenticator] | None = None  # reads the tokens again, for `GrpcServer.reload`
    tls: TlsFiles = field(default_factory=TlsFiles)
    reflection: bool = False
    admin_listen: str = ""
    ping_strikes: int = 2  # pings in too quick succession before a client is disconnected; 0 allows any number

    @classmethod
    def of(
        cls, settings: ServiceSettings, listen: str, read_tokens: Callable[[], Authenticator], calls: int = 1024
    ) -> ServingOptions:
        """Those of a service's settings, for so many calls at once. Raises `SettingsError` as `read_tokens` does."""
        seconds, size = settings.first_message_seconds, settings.max_message_bytes
        limits = CallLimits(calls, first_message_seconds=seconds, message_bytes=size)
        tls = TlsFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        return cls(listen, limits, read_tokens(), read_tokens, tls, settings.reflection, settings.admin_listen)


class GrpcServer:
    """A server with its services, health, reflection and admin port. NOT_SERVING until health is set."""

    def __init__(
        self,
        options: ServingOptions,
        services: Sequence[Service],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`interceptors` run outermost, so that a tracing one sees the final status of each call. Must be called from a
        running event loop. Raises `SettingsError` for settings that cannot work."""
        self.options = options
        self.health = HealthServicer(service.name for service in services)
        self.address = ""
        self.admin_address = ""
        limits = options.limits
        self._auth = AuthInterceptor(options.authenticator, Calls(limits, by_tenant=options.authenticator.required))
        self._errors = ErrorInterceptor()
        self._carrying = CarryingInterceptor([*interceptors, self._errors, self._auth], limits.per_connection)
        self._server = self._make(limits.backstop, limits.per_connection)
        self._pending: dict[str, PendingService] = {}
        for service in services:
            if service.add is None:
                self._pending[service.name] = PendingService(service.name, service.loading)
                self._server.add_generic_rpc_handlers((self._pending[service.name],))
            else:
                service.add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        if options.reflection:
            names = [service.name for service in services]
            reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._admin: grpc.aio.Server | None = None
        if options.admin_listen:
            if not is_local(options.admin_listen):
                raise SettingsError(
                    f"the admin port {options.admin_listen} must be a loopback address or a unix socket"
                )
            self._admin = self._make(16, limits.per_connection)
            channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz.aio.ChannelzServicer(), self._admin)

    def _make(self, max_calls: int, max_streams: int) -> grpc.aio.Server:
        # Keepalive alone does not notice a frozen peer; the ping timeout does.
        options = [
            ("grpc.max_receive_message_length", self.options.limits.message_bytes),
            ("grpc.max_send_message_length", -1),
            # Both the same: between them gRPC refuses by chance.
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", max_streams),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", self.options.ping_strikes),
            # A second server on the same port must fail, not share its traffic.
            ("grpc.so_reuseport", 0),
        ]
        return grpc.aio.server(interceptors=[self._carrying], options=options, maximum_concurrent_rpcs=max_calls)

    async def start(self) -> None:
        """Bind and serve; `address` then has the port chosen for port 0. Raises `SettingsError`."""
        credentials = self.options.tls.server_credentials()
        self.address = _bind(self._server, self.options.listen, credentials)
        if self._admin is not None:
            self.admin_address = _bind(self._admin, self.options.admin_listen, credentials)
            await self._admin.start()
        await self._server.start()
        if credentials is None and not self.options.authenticator.required and not is_local(self.options.listen):
            logger.warning("%s is reachable from elsewhere without TLS and without tokens", self.address)

    def provide(self, name: str, add: Callable[[Any], None]) -> None:
        """Add the servicer of a service that was made without one; its calls are served from now on."""
        add(self._pending.pop(name))

    def reload(self) -> None:
        """Read the tokens again, for calls that begin from now on. A file that cannot be read changes nothing.
        Renewed certificates are read without this."""
        if self.options.read_tokens is None:
            return
        try:
            self._auth.authenticator = self.options.read_tokens()
        except SettingsError as error:
            logger.error("the tokens are unchanged: %s", error)
        else:
            logger.info("the tokens were read again")

    async def stop(self, grace: float, reason: OutriderError | None = None) -> None:
        """Refuse new calls, give running ones `grace` seconds, then end them with `reason`; None is `Draining`."""
        self.health.close()
        self._carrying.finish()
        stopped = asyncio.ensure_future(self._server.stop(grace + LAST_WORDS_SECONDS))
        try:
            await asyncio.wait({stopped}, timeout=grace)
        finally:
            # Also when the wait is cancelled.
            if not stopped.done():
                self._errors.end_calls(reason or Draining("the service has stopped"))
            await asyncio.shield(stopped)
        if self._admin is not None:
            await self._admin.stop(0)


def check_free(address: str) -> None:
    """Raise `SettingsError`, with the system's reason, unless a server could listen on this address now: HOST:PORT or
    unix:PATH. For a service with a model to load before it listens."""
    if address.startswith("unix:"):
        _refuse_taken(Path(address.removeprefix("unix:")))
        return
    host, port = _host_and_port(address)
    refusal = port_refusal(host, port)
    if refusal is not None:
        raise SettingsError(f"cannot listen on {address}: {refusal.strerror or refusal}")


def _host_and_port(address: str) -> tuple[str, int]:
    """The two parts of HOST:PORT. Raises `SettingsError` for anything else."""
    host, _, port = address.rpartition(":")
    # Unlike for clients, port 0 is valid (the system chooses one), and so is no host (all addresses).
    checked = f"{host or 'localhost'}:{1 if port == '0' else port}" if ":" in address else address
    if address_problem(checked) is not None:
        raise SettingsError(f"cannot listen: {address_problem(address)}")
    # gRPC's other names are addresses for clients, with or without a port.
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise SettingsError(f"cannot listen: {address!r} is not HOST:PORT or unix:PATH")
    return host, int(port)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    # gRPC's error has no reason.
    check_free(address)
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise SettingsError(f"cannot listen on {address}: {error}") from None
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _refuse_taken(path: Path) -> None:
    """Raise `SettingsError` if another process listens: gRPC would silently take over its socket. gRPC may replace a
    socket that was left behind."""
    if not path.parent.is_dir():
        raise SettingsError(f"cannot listen on unix:{path}: there is no folder {path.parent}")
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"cannot listen on unix:{path}: there is something that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        # A listening process accepts at once, or has a full queue.
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise SettingsError(f"cannot listen on unix:{path}: {error}") from None
    raise SettingsError(f"cannot listen on unix:{path}: another process does")
