"""One gRPC server as both services run it: limits, security, health, and the optional admin port."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.serving import health
from outrider.serving.credentials import TlsFiles
from outrider.serving.health import HealthServicer
from outrider.serving.interceptors import AuthInterceptor, ErrorInterceptor
from outrider.serving.tenancy import Authenticator
from outrider.settings import MAX_MESSAGE_BYTES, SettingsError

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16 * 1024


@dataclass(frozen=True)
class Service:
    """One service to serve: its full name, and what adds its servicer to a server."""

    name: str
    add: Callable[[grpc.aio.Server], None]


@dataclass(frozen=True)
class ServingOptions:
    """How a server is reached and what it bears. Fields mean what the settings of the same name say."""

    listen: str = "127.0.0.1:0"
    max_message_bytes: int = MAX_MESSAGE_BYTES
    # Calls at once, health checks among them; more are refused with RESOURCE_EXHAUSTED.
    max_concurrent_calls: int = 1024
    authenticator: Authenticator = field(default_factory=Authenticator)
    tls: TlsFiles = field(default_factory=TlsFiles)
    reflection: bool = False
    admin_listen: str = ""
    # Pings that come too soon after each other before a client is sent away; 0 bears any number.
    ping_strikes: int = 2

    def channel_options(self) -> list[tuple[str, Any]]:
        """C-core arguments. Keepalive alone does not notice a frozen peer; the ping timeout does."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", self.max_concurrent_calls),
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
    """A server with its services, health, reflection and admin port. NOT_SERVING until told otherwise."""

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
        self._guards = [*interceptors, ErrorInterceptor(), AuthInterceptor(options.authenticator)]
        self._server = self._make(options.max_concurrent_calls)
        for service in services:
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

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give running ones `grace` seconds, then cancel them."""
        self.health.close()
        await self._server.stop(grace)
        if self._admin is not None:
            await self._admin.stop(0)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise SettingsError(f"cannot listen on {address}: {error}") from None
    if port == 0 and not address.startswith("unix:"):
        raise SettingsError(f"cannot listen on {address}")
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _is_local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _require_loopback(address: str) -> None:
    if not _is_local(address):
        raise SettingsError(f"the admin port {address} must be a loopback address or a unix socket")
