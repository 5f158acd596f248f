"""Fixtures of the target area: certificates, a service that echoes, a scripted engine."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import scripted_service
from conversation import Conversation
from scripted_service import Target, target_over

from outrider.serving import GrpcServer, Service, ServingOptions, current_tenant

ECHO = "test.Echo"


@dataclass(frozen=True)
class Certificates:
    """A certificate authority, and a server's and a client's certificate that it signed."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority, authority_key = folder / "ca.pem", folder / "ca.key"
    _openssl("req", "-x509", *key, "-keyout", authority_key, "-out", authority, "-subj", "/CN=ca", "-days", "2")
    signed = []
    for name in ("server", "client"):
        request, private, chain = folder / f"{name}.csr", folder / f"{name}.key", folder / f"{name}.pem"
        names = folder / f"{name}.ext"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        _openssl("req", *key, "-keyout", private, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", authority, "-CAkey", authority_key, "-CAcreateserial",
            "-extfile", names, "-out", chain, "-days", "2",
        )  # fmt: skip
        signed += [chain, private]
    return Certificates(authority, *signed)


class Echo:
    """Four methods, one of each kind, that answer the tenant; `raises` is thrown instead when set."""

    def __init__(self) -> None:
        self.raises: BaseException | None = None
        self.released = asyncio.Event()

    def answer(self) -> bytes:
        if self.raises is not None:
            raise self.raises
        return current_tenant().encode()

    async def unary(self, _request: bytes, _context: Any) -> bytes:
        return self.answer()

    async def generate(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield self.answer()
        try:
            while request == b"forever":
                yield b"."
                await asyncio.sleep(0.001)
        finally:
            self.released.set()

    async def collect(self, requests: AsyncIterator[bytes], _context: Any) -> bytes:
        async for _ in requests:
            pass
        return self.answer()

    async def converse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for _ in requests:
            await context.write(self.answer())

    def add(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "Converse": grpc.stream_stream_rpc_method_handler(self.converse),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO, handlers),))


@asynccontextmanager
async def serving(echo: Echo, **options: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(ServingOptions(listen="127.0.0.1:0", **options), [Service(ECHO, echo.add)])
    await server.start()
    server.health.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)


async def call_echo(channel: grpc.aio.Channel, method: str, **options: Any) -> bytes:
    """One answer of any of the four methods."""
    path = f"/{ECHO}/{method}"
    if method == "Unary":
        return await channel.unary_unary(path)(b"", **options)
    if method == "Collect":
        return await channel.stream_unary(path)(iter([b"a", b"b"]), **options)
    stream = channel.unary_stream(path)(b"", **options) if method == "Generate" else None
    stream = stream or channel.stream_stream(path)(iter([b"a"]), **options)
    return b"".join([part async for part in stream])


@pytest.fixture
def echo() -> SimpleNamespace:
    """The echo service: `name`, its `methods`, `Echo`, `serving(echo, **options)` and `call(channel, method)`."""
    methods = ["Unary", "Generate", "Collect", "Converse"]
    return SimpleNamespace(name=ECHO, methods=methods, Echo=Echo, serving=serving, call=call_echo)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A tokenizer of single bytes, byte b being id 3 + b; ids 0 to 2 are pad, begin and end."""
    return scripted_service.byte_tokenizer()


@pytest.fixture(scope="session")
def model_tokenizer() -> Any:
    """The same as a target has it."""
    return scripted_service.served_tokenizer()


@pytest.fixture
def targets() -> Any:
    """`target_over(engine, served, limits, tracing, table, **serving_options)`: a context manager of a `Target`."""
    return target_over


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    async with target_over() as running:
        yield running


@pytest.fixture
async def talk(target: Any) -> AsyncIterator[Conversation]:
    conversation = Conversation(target)
    yield conversation
    conversation.call.cancel()
    await target.idle()
