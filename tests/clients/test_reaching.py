"""What is between a command and its target: proxies, and ports where something else listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tcp_server import answering

from outrider_client.failures import ServiceUnreachable

NOBODY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
REFUSED = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"


async def test_what_is_on_this_machine_is_reached_without_a_proxy(running: Any, outrider: Any) -> None:
    """As browsers and curl do; gRPC would ask the proxy of the environment."""
    status, out, err = await outrider("info", "--target", running.address, environment=NOBODY)
    assert (status, err) == (0, "") and running.address in out


def test_a_proxy_is_named_where_it_may_be_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("grpc_proxy", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    assert str(ServiceUnreachable("models:1", REFUSED)) == "cannot reach models:1: Connection refused"
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert str(ServiceUnreachable("models:1", REFUSED)).endswith(
        "Connection refused (gRPC takes the proxy of http_proxy, unless no_proxy names the host)"
    )
    assert str(ServiceUnreachable("127.0.0.1:1", REFUSED)) == "cannot reach 127.0.0.1:1: Connection refused"


async def test_a_port_of_something_else(outrider: Any) -> None:
    """As the pages of Python's own server, which answers HTTP/2 with a page."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"<!DOCTYPE HTML>\n<html><head></head><body>Bad request version</body></html>")
        await writer.drain()

    async with answering(answer) as address:
        status, _, err = await outrider("info", "--target", address)
    assert status == 1 and "it speaks no HTTP/2, and so no gRPC" in err and "port of its own" in err
