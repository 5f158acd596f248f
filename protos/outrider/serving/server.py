"""One gRPC server as both services run it: limits, security, health, and the optional admin port."""

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

from outrider.addresses import address_problem
from outrider.errors import Draining, OutriderError
from outrider.host_names import is_loopback
from outrider.ports import port_refusal
from outrider.serving import health
from outrider.serving.calls import CallLimits, Calls
from outrider.serving.credentials import TlsFiles
from outrider.serving.health import HealthServicer
from outrider.serving.interceptors import AuthInterceptor, ErrorInterceptor
from outrider.serving.pending import PendingService
from outrider.serving.tenancy import Authenticator
from outrider.settings import FIRST_MESSAGE_SECONDS, MAX_MESSAGE_BYTES, SettingsError

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16 * 1024
# What statuses of calls that a stop ends are given to leave; a caller that reads nothing is left without. Chosen, not
# measured.
LAST_WORDS_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    """One service to serve: its full name, and what adds its servicer to a server.

    Without `add` the servicer comes with `GrpcServer.provide`; callers get the message `loading` until then.
    """

    name: str
    add: Callable[[Any], None] | None = None
    loading: str = "the model is being loaded"


@dataclass(frozen=True)
class ServingOptions:
    """How a server is reached and what it bears. Fields mean what the settings of the same name say."""

    listen: str = "127.0.0.1:0"
    max_message_bytes: int = MAX_MESSAGE_BYTES
    # Calls at once, health checks not among them; more are refused with RESOURCE_EXHAUSTED.
    max_concurrent_calls: int = 1024
    # A caller that sends headers has so many seconds to send a lone request.
    request_seconds: float = 10.0
    # And so many to send the first message of a stream.
    first_message_seconds: float = FIRST_MESSAGE_SECONDS
    authenticator: Authenticator = field(default_factory=Authenticator)
    # Reads the tokens anew, for `GrpcServer.reload`.
    read_tokens: Callable[[], Authenticator] | None = None
    tls: TlsFiles = field(default_factory=TlsFiles)
    reflection: bool = False
    admin_listen: str = ""
    # Pings that come too soon after each other before a client is sent away; 0 bears any number.
    ping_strikes: int = 2

    @property
    def call_limits(self) -> CallLimits:
        """Of calls at once."""
        return CallLimits(self.max_concurrent_calls)

    def channel_options(self) -> list[tuple[str, Any]]:
        """C-core arguments. Keepalive alone does not notice a frozen peer; the ping timeout does."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", self.call_limits.per_connection),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", self.ping_strikes),
            # A second server on the same port must fail, not share its traffic.
            ("grpc.so_reuseport", 0),
        ]


class GrpcServer:
    """A server with its services, health, reflection and admin port. NOT_SERVING until that is set."""

    def __init__(
        self,
        options: ServingOptions,
        services: Sequence[Service],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`interceptors` run outermost, so that a tracing one sees the final status of each call.

        Must be called from a running event loop. Raises `SettingsError` for settings that cannot work.
        """
        self.options = options
        self.health = HealthServicer(service.name for service in services)
        self.address = ""
        self.admin_address = ""
        calls = Calls(options.call_limits, by_tenant=options.authenticator.required)
        self._known = AuthInterceptor(
            options.authenticator, calls, options.request_seconds, options.first_message_seconds
        )
        self._errors = ErrorInterceptor()
        self._guards = [*interceptors, self._errors, self._known]
        self._server = self._make(options.call_limits.backstop)
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
            _require_loopback(options.admin_listen)
            self._admin = self._make(16)
            channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz.aio.ChannelzServicer(), self._admin)

    def _make(self, max_calls: int) -> grpc.aio.Server:
        return grpc.aio.server(
            interceptors=self._guards,
            options=self.options.channel_options(),
            maximum_concurrent_rpcs=max_calls,
        )

    async def start(self) -> None:
        """Bind and answer; `address` then holds the port given for port 0. Raises `SettingsError`."""
        credentials = self.options.tls.server_credentials()
        self.address = _bind(self._server, self.options.listen, credentials)
        if self._admin is not None:
            self.admin_address = _bind(self._admin, self.options.admin_listen, credentials)
            await self._admin.start()
        await self._server.start()
        if credentials is None and not self.options.authenticator.required and not _is_local(self.options.listen):
            logger.warning("%s is reachable from elsewhere without TLS and without tokens", self.address)

    def provide(self, name: str, add: Callable[[Any], None]) -> None:
        """Bring the servicer of a service that was named without one: its calls are taken from now on."""
        add(self._pending.pop(name))

    def reload(self) -> None:
        """Read the tokens anew: calls that begin from now on are held against them. What cannot be read changes
        nothing. Certificates are read again by themselves."""
        if self.options.read_tokens is None:
            return
        try:
            self._known.authenticator = self.options.read_tokens()
        except SettingsError as error:
            logger.error("the tokens stay what they were: %s", error)
        else:
            logger.info("the tokens were read anew")

    async def stop(self, grace: float, reason: OutriderError | None = None) -> None:
        """Refuse new calls, give running ones `grace` seconds, then end them with `reason`, which is `Draining` when
        None."""
        self.health.close()
        stopped = asyncio.ensure_future(self._server.stop(grace + LAST_WORDS_SECONDS))
        try:
            await asyncio.wait({stopped}, timeout=grace)
        finally:
            # Also when nobody has the patience to wait for `grace`.
            if not stopped.done():
                self._errors.end_calls(reason or Draining("the service has stopped"))
            await asyncio.shield(stopped)
        if self._admin is not None:
            await self._admin.stop(0)


def check_free(address: str) -> None:
    """Raise `SettingsError`, with the system's reason, where nobody could listen on this address now: HOST:PORT or
    unix:PATH. For a service that has much to load before it listens."""
    if address.startswith("unix:"):
        _refuse_taken(Path(address.removeprefix("unix:")))
        return
    host, _, port = address.rpartition(":")
    # The system chooses a port for 0, and no host is all of the machine's addresses.
    meant = f"{host or 'localhost'}:{1 if port == '0' else port}" if ":" in address else address
    if address_problem(meant) is not None:
        raise SettingsError(f"cannot listen: {address_problem(address)}")
    refusal = port_refusal(host, int(port))
    if refusal is not None:
        raise SettingsError(f"cannot listen on {address}: {refusal.strerror or refusal}")


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    if address.startswith("unix:"):
        _refuse_taken(Path(address.removeprefix("unix:")))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        # gRPC does not say why.
        check_free(address)
        raise SettingsError(f"cannot listen on {address}: {error}") from None
    if port == 0 and not address.startswith("unix:"):
        raise SettingsError(f"cannot listen on {address}")
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _refuse_taken(path: Path) -> None:
    """Raise `SettingsError` where another process listens: gRPC would take its socket away without a word. One that was
    left behind is gRPC's to replace."""
    if not path.parent.is_dir():
        raise SettingsError(f"cannot listen on unix:{path}: there is no folder {path.parent}")
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(f"cannot listen on unix:{path}: there is something that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        # Where it listens, it is there at once, or has a queue that is full.
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise SettingsError(f"cannot listen on unix:{path}: {error}") from None
    raise SettingsError(f"cannot listen on unix:{path}: another process does")


def _is_local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    return is_loopback(address.rpartition(":")[0])


def _require_loopback(address: str) -> None:
    if not _is_local(address):
        raise SettingsError(f"the admin port {address} must be a loopback address or a unix socket")
