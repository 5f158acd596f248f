"""Names that the gateway answers to: a page whose own name comes to mean this machine gets nothing (DNS rebinding)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from waits import HUNG_SECONDS

from outrider.host_names import HostNames
from outrider.serving import Authenticator, Caller
from outrider.settings import SettingsError
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.hosts import HostCheck, host_check
from outrider_gateway.server import GatewayServer, log_address

TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
EVIL = {"host": "evil.example:8000"}


async def application(_scope: Any, _receive: Any, _send: Any) -> None:
    """Stands for what the check protects."""


def names(**settings: Any) -> HostNames:
    """What a gateway with these settings answers to."""
    check = host_check(application, GatewayConfig(**settings))
    assert isinstance(check, HostCheck)
    return check.names


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80", "[::1]:8000", "[fe80::1]", "0.0.0.0:8000"),
        *("localhost", "localhost:8000", "LocalHost:1", "localhost.:8000", "chat.localhost:8000"),
        *(socket.gethostname(), f"{socket.gethostname().upper()}:8000"),
    ],
)
def test_addresses_and_names_of_this_machine(host: str) -> None:
    assert names().answers(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "gateway:8000", "host.docker.internal:8000"),
        *("localhost.evil.example", "evillocalhost", "127.0.0.1.nip.io", "127.0.0.1.evil.example:8000"),
        *("localhost:8000:evil.example", "evil.example:localhost", "[evil.example]", "[::1", "::1", ":8000", "a b"),
    ],
)
def test_all_others_are_refused(host: str) -> None:
    assert not names().answers(host)


def test_what_the_operator_lists() -> None:
    listed = names(allow_host="llm.example, .svc.cluster.local,gateway", listen="Box.lan:8000")
    for host in (
        "llm.example",
        "LLM.example:443",
        "gateway:8000",
        "a.b.svc.cluster.local",
        "svc.cluster.local",
        "box.lan",
    ):
        assert listed.answers(host)
    for host in ("a.llm.example", "example", "xsvc.cluster.local", "gateway.evil.example", "lan"):
        assert not listed.answers(host)
    # What is listed is added to what is answered anyhow.
    assert listed.answers("localhost:8000") and listed.answers("127.0.0.1")


@pytest.mark.parametrize(
    "hosts",
    ["llm.example:8000", "https://llm.example", "LLM.example", "a..b", ".", "-a.b", "a b", "*,a.b", "*.a.b", "a" * 64],
)
def test_names_that_cannot_be(hosts: str) -> None:
    with pytest.raises(SettingsError, match="--allow-host"):
        GatewayConfig(allow_host=hosts)


def test_names_end_at_the_length_of_dns() -> None:
    longest = ".".join(["a" * 63] * 3 + ["b" * 61])
    assert names(allow_host=longest).answers(f"{longest}:8000")
    with pytest.raises(SettingsError, match="--allow-host"):
        GatewayConfig(allow_host=f"{longest}b")


def test_where_names_are_not_checked(tmp_path: Path) -> None:
    """Where the operator says so, with TLS (a page has no certificate that its own name could be served with), and
    where others reach the gateway by names that nobody listed."""
    for listen in ("0.0.0.0:8000", "[::]:8000", "10.1.2.3:8000", "box.lan:8000"):
        assert host_check(application, GatewayConfig(listen=listen)) is application
        assert not names(listen=listen, allow_host="llm.example").answers("evil.example")
    for listen in ("127.0.0.1:8000", "[::1]:8000", "localhost:8000", "127.1.2.3:8000"):
        assert not names(listen=listen).answers("evil.example")
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    words = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost")
    subprocess.run(
        ["openssl", "req", "-x509", *words, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    assert host_check(application, GatewayConfig(allow_host="*")) is application
    tls = GatewayConfig(tls_certificate=str(certificate), tls_key=str(key))
    assert host_check(application, tls) is application


@pytest.mark.parametrize(("listen", "warns"), [("127.0.0.1:0", False), ("127.0.0.2:0", False), ("0.0.0.0:0", True)])
async def test_warning_of_tokens_without_tls(listen: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = GatewayConfig(listen=listen)
    async with GatewayServer(config, AccessOptions()) as server:
        caplog.clear()
        caplog.set_level("INFO", "outrider_gateway.server")
        log_address(config, server.address)
    records = [record for record in caplog.records if record.name == "outrider_gateway.server"]
    assert [record.levelname for record in records] == ["INFO", "WARNING"][: 1 + warns]


async def test_a_page_of_another_name_gets_nothing(gateways: Any) -> None:
    """From any path, with whichever method, preflights included; and nothing is read of what it sends."""
    token = "sixteen-letters!"
    serving = {"authenticator": Authenticator({token: Caller("acme")})}
    async with gateways(serving=serving, allow_origin="*") as gateway:
        paths = set(gateway.server.application.paths)
        assert {"/", "/health", "/metrics", "/v1/models", "/v1/completions"} <= paths
        page = {**EVIL, "origin": "http://evil.example:8000", "authorization": f"Bearer {token}"}
        asking = {**page, "access-control-request-method": "POST"}
        for path in paths | {"/absent"}:
            for method in ("GET", "POST", "OPTIONS"):
                answer = await gateway.http.request(method, path, json=TEXT, headers=asking)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
                assert "access-control-allow-origin" not in answer.headers
        assert gateway.targets[0].engine.requests == []
        # The same from a name that is this machine's own.
        own = {**page, "host": f"localhost:{gateway.server.address.rpartition(':')[2]}"}
        assert (await gateway.http.post("/v1/completions", json=TEXT, headers=own)).status_code == 200


async def test_the_refusal_says_what_to_do(gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    answers = [await gateway.http.get("/v1/models", headers=EVIL) for _ in range(3)]
    error = answers[0].json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "permission_error"
    assert "'evil.example'" in error["message"]
    assert "--allow-host" in error["message"] and "OUTRIDER_GATEWAY_ALLOW_HOST" in error["message"]
    assert answers[0].headers["x-request-id"]
    # One line for all of them, and nothing that they wrote.
    (line,) = [record.getMessage() for record in caplog.records if "--allow-host" in record.getMessage()]
    assert "127.0.0.1" in line and "evil" not in line
    long = (await gateway.http.get("/", headers={"host": "a" * 5000})).json()["error"]
    assert len(long["message"]) < 300


async def test_listed_names_are_served(gateways: Any) -> None:
    """As behind a proxy that passes on the name that it was asked for, or under the name of a compose service."""
    async with gateways(allow_host="gateway,llm.example") as gateway:
        for host, status in (("gateway:8000", 200), ("llm.example", 200), ("evil.example", 403)):
            answer = await gateway.http.post("/v1/completions", json=TEXT, headers={"host": host})
            assert answer.status_code == status
    async with gateways(allow_host="*") as gateway:
        assert (await gateway.http.post("/v1/completions", json=TEXT, headers=EVIL)).status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        # A load balancer's probe; no browser leaves the name out.
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 403),
        # What stands in the first line names no server.
        (b"GET http://localhost/health HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 403),
    ],
)
async def test_headers_that_no_browser_sends(gateway: Any, head: bytes, status: int) -> None:
    reader, writer = await asyncio.open_connection(*gateway.server.address.split(":"))
    writer.write(head)
    assert (await asyncio.wait_for(reader.readline(), HUNG_SECONDS)).split()[1] == str(status).encode()
    writer.close()
