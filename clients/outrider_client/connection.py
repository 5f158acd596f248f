"""A channel to one service, with the caller's credentials."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.addresses import address_problem, is_local, proxy_options
from outrider.limits import TENANT_KEY, TOKEN_KEY
from outrider.pem import check_authority, check_pair
from outrider_client.failures import cancellations, typed_error

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    # The services allow a ping every five seconds; its timeout detects a frozen service.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A service that is being started should be found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True)
class Tls:
    """PEM files: roots to verify the service with (None: gRPC's own), and the client's certificate and key."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises `OSError` for a file that cannot be read, `ValueError` for one with other content."""
        roots, key, chain = (path.read_bytes() if path else None for path in (self.ca, self.key, self.certificate))
        if self.ca:
            check_authority(self.ca)
        if bool(self.certificate) != bool(self.key):
            raise ValueError("a client certificate needs its key, and a key its certificate")
        if self.certificate and self.key:
            check_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(roots, key, chain)


class AsyncClosing(ABC):
    """Is closed when an `async with` block is left."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Connection(AsyncClosing):
    """A channel and the metadata that every call on it carries."""

    def __init__(
        self, address: str, *, tls: Tls | None = None, token: str = "", tenant: str = "", server_name: str = ""
    ) -> None:
        """`address` is HOST:PORT, unix:PATH, or dns:///HOST:PORT for calls that go in turn to every address of the name
        that is ready. The service's certificate is for `server_name`, by default for the address's host. Must be called
        from a running event loop. Raises `ValueError` for an invalid address, for a token or tenant that is not
        printable ASCII, and for files of `tls` with other content; `OSError` for those that cannot be read; `TypeError`
        for an address that is no string."""
        if not isinstance(address, str):
            raise TypeError(f"address: expected a string, got {type(address).__name__}")
        if problem := address_problem(address):
            raise ValueError(problem)
        self.address = address
        self.metadata = _metadata(token, tenant)
        if token and tls is None and not is_local(address):
            logger.warning("the token travels to %s in plain text: use TLS", address)
        options = (*_OPTIONS, *proxy_options(address))
        if address.startswith("dns:"):
            # Calls go round several services, past those whose health (service "") is not SERVING.
            turns = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
            options += (("grpc.service_config", json.dumps(turns)),)
        if server_name:
            options += (("grpc.ssl_target_name_override", server_name), ("grpc.default_authority", server_name))
        if tls is None:
            self.channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self.channel = grpc.aio.secure_channel(address, tls.credentials(), options=options)

    def acting_for(self, token: str = "", tenant: str = "") -> Connection:
        """The same channel for another caller, whose credentials take the place of this one's."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, metadata=_metadata(token, tenant))
        return other

    async def call(self, method: Callable[..., Awaitable[Answer]], request: object, timeout: float | None) -> Answer:
        """The answer to a message. Raises errors of `outrider.errors`, or `ServiceUnreachable`."""
        try:
            return await method(request, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            raise typed_error(error, self.address) from error

    async def call_with_all(
        self, method: Callable[..., Awaitable[Answer]], messages: AsyncIterator[object], timeout: float | None
    ) -> Answer:
        """As `call`, for the answer to all messages; raises what they raise. gRPC only cancels the call then, which
        would look as if the caller had cancelled it."""
        raised: list[Exception] = []

        async def kept() -> AsyncIterator[object]:
            try:
                async for message in messages:
                    yield message
            except Exception as error:
                raised.append(error)
                raise

        before = cancellations()
        try:
            return await self.call(method, kept(), timeout)
        except asyncio.CancelledError:
            if raised and cancellations() == before:
                raise raised[0] from None
            raise

    async def serving(self, service: str = "", timeout: float = 5.0) -> bool:
        """Whether `service` ("" for the process) reports SERVING. Raises as every call does."""
        check = health_pb2_grpc.HealthStub(self.channel).Check
        response = await self.call(check, health_pb2.HealthCheckRequest(service=service), timeout)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Cancel running calls and close the channel."""
        await self.channel.close()


def _metadata(token: str, tenant: str) -> tuple[tuple[str, str], ...]:
    for name, value in (("token", token), ("tenant", tenant)):
        # gRPC would refuse the call, and quote the token.
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"{name}: must be printable ASCII")
    pairs = ((TOKEN_KEY, f"Bearer {token}" if token else ""), (TENANT_KEY, tenant))
    return tuple((key, value) for key, value in pairs if value)
