"""What a client says where one side speaks TLS and the other does not, or its certificate is another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sdk.certificates import Certificates
from tcp_server import answering

from outrider.serving import GrpcServer, Service, ServingOptions, TlsFiles
from outrider.v1 import target_pb2, target_pb2_grpc
from outrider_client.client import Client
from outrider_client.connection import Tls
from outrider_client.failures import ServiceUnreachable, TlsProblem


class Servicer(target_pb2_grpc.TargetServiceServicer):
    async def GetTargetInfo(self, _request: Any, _context: Any) -> Any:  # type: ignore[override]
        return target_pb2.GetTargetInfoResponse(model="scripted")


@asynccontextmanager
async def serving(tls: TlsFiles) -> AsyncIterator[str]:
    """The address of a target."""
    service = Service(
        "outrider.v1.TargetService", lambda to: target_pb2_grpc.add_TargetServiceServicer_to_server(Servicer(), to)
    )
    server = GrpcServer(ServingOptions(listen="127.0.0.1:0", tls=tls), [service])
    await server.start()
    server.health.set_serving(True)
    try:
        yield server.address
    finally:
        await server.stop(0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"), "IP:127.0.0.1")


def server_files(certificates: Certificates, *, mutual: bool = False) -> TlsFiles:
    authority = str(certificates.authority) if mutual else ""
    return TlsFiles(str(certificates.server), str(certificates.server_key), authority)


async def failure(address: str, tls: Tls | None) -> ServiceUnreachable:
    async with Client.connect(address, tls=tls) as client:
        with pytest.raises(ServiceUnreachable) as raised:
            await client.info()
    return raised.value


async def test_plain_text_to_tls(certificates: Certificates, outrider: Any) -> None:
    async with serving(server_files(certificates)) as address:
        error = await failure(address, None)
        status, _, err = await outrider("generate", "x", "--target", address)
    assert error.tls_problem is TlsProblem.EXPECTED
    assert "as a server does that speaks TLS" in str(error)
    assert status == 1 and "--tls-ca FILE" in err and "Is it running" not in err


async def test_tls_to_plain_text(certificates: Certificates, outrider: Any) -> None:
    async with serving(TlsFiles()) as address:
        error = await failure(address, Tls(certificates.authority))
        words = ("--target", address, "--tls-ca", str(certificates.authority))
        status, _, err = await outrider("generate", "x", *words)
        _, health, _ = await outrider("health", *words)
    assert error.tls_problem is TlsProblem.NOT_SPOKEN
    assert str(error) == f"cannot reach {address}: the server does not speak TLS"
    assert status == 1 and "Leave out --tls" in err
    assert health == f"{address} UNREACHABLE  the server does not speak TLS\n"


async def test_no_certificate_of_our_own(certificates: Certificates) -> None:
    async with serving(server_files(certificates, mutual=True)) as address:
        error = await failure(address, Tls(certificates.authority))
    assert error.tls_problem is TlsProblem.EXPECTED


async def test_unknown_authority(certificates: Certificates) -> None:
    async with serving(server_files(certificates)) as address:
        error = await failure(address, Tls())
    assert error.tls_problem is TlsProblem.NOT_TRUSTED
    assert "its certificate is not trusted: " in str(error) and not str(error).endswith("OK")


async def test_another_name(tmp_path: Any) -> None:
    certificates = Certificates.make(tmp_path)
    async with serving(server_files(certificates)) as address:
        error = await failure(address, Tls(certificates.authority))
    assert error.tls_problem is TlsProblem.NOT_TRUSTED
    assert str(error).endswith("its certificate is of another name")


async def test_both_agree_and_nobody_listens(certificates: Certificates, unused_tcp_port: int) -> None:
    tls = Tls(certificates.authority, certificates.client, certificates.client_key)
    async with (
        serving(server_files(certificates, mutual=True)) as address,
        Client.connect(address, tls=tls) as client,
    ):
        assert (await client.info()).model == "scripted"
    # What breaks or is not there has no TLS problem.
    assert (await failure(f"127.0.0.1:{unused_tcp_port}", tls)).tls_problem is None


@pytest.mark.parametrize(
    ("detail", "problem"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: recvmsg:Connection reset by peer", True),
        ("failed to connect to all addresses; last error: UNKNOWN: Connection reset by peer (104)", True),
        ("failed to connect to all addresses; last error: UNAVAILABLE: a:1: Secure read failed (Socket closed)", True),
        ("failed to connect to all addresses; last error: UNKNOWN: Connection refused", False),
        # These were connected before.
        ("Socket closed", False),
        ("recvmsg:Connection reset by peer", False),
    ],
)
def test_who_hangs_up_at_once_may_expect_tls(detail: str, problem: bool) -> None:
    assert ServiceUnreachable("a:1", detail).tls_problem is (TlsProblem.EXPECTED if problem else None)


async def test_a_port_of_http(outrider: Any) -> None:
    """As a gateway's is."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()

    async with answering(answer) as address:
        status, _, err = await outrider("info", "--target", address)
    assert status == 1 and "speaks HTTP/1 and no gRPC" in err
    assert "port of its own" in err and "Is it running" not in err


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (("--tls-ca", "{page}"), "holds no PEM certificate"),
        (("--tls-ca", "{folder}/nothing.pem"), "no such file"),
        (("--tls-certificate", "{folder}/client.pem", "--tls-key", "{folder}/server.key"), "KEY_VALUES_MISMATCH"),
        (("--tls-certificate", "{page}", "--tls-key", "{page}"), "no certificate and its key: no PEM file of one"),
        (("--tls-certificate", "{folder}/client.pem"), "needs its key"),
    ],
)
@pytest.mark.parametrize("command", ["info", "generate x"], ids=["info", "generate"])
async def test_files_are_looked_at_before_anybody_is_called(
    certificates: Certificates, outrider: Any, command: str, flags: tuple[str, ...], refusal: str
) -> None:
    folder = certificates.authority.parent
    page = folder / "page.html"
    page.write_text("<html></html>")
    words = [flag.format(folder=folder, page=page) for flag in flags]
    status, _, err = await outrider(*command.split(), "--target", "127.0.0.1:1", *words)
    assert status == 2 and refusal in err and len(err.splitlines()) == 2


async def test_a_program_hears_of_files_at_once(certificates: Certificates) -> None:
    for tls in (
        Tls(certificates.server_key),
        Tls(certificates.authority, certificates.client, certificates.server_key),
    ):
        with pytest.raises(ValueError, match=r"PEM certificate|no certificate and its key"):
            Client.connect("127.0.0.1:1", tls=tls)


def test_a_name_that_nobody_knows() -> None:
    detail = "errors resolving a:1: [field:hostname lookup error:address lookup failed for a:1: Domain name not found]"
    assert str(ServiceUnreachable("a:1", detail)) == "cannot reach a:1: the name is not resolved: Domain name not found"
