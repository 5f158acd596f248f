"""Connections of many peers, and HTTP as clients of other kinds speak it."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from outrider_gateway.connections import HEALTH_CONNECTIONS

TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
# Longer than anything here takes on a busy machine.
HUNG_SECONDS = 60.0
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(gateway: Any, peer: str = "127.0.0.1") -> Stream:
    host, port = gateway.server.address.split(":")
    return await asyncio.open_connection(host, int(port), local_addr=(peer, 0))


def request(body: dict[str, Any], version: str = "1.1", more: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def answer(stream: Stream, sent: bytes) -> bytes:
    """All that is answered until the connection is closed."""
    reader, writer = stream
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), HUNG_SECONDS)
    finally:
        writer.close()


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def test_idle_connections_make_way_for_those_that_ask(gateways: Any) -> None:
    async with gateways(max_connections=32) as gateway:
        idle = [await connect(gateway) for _ in range(40)]
        for _ in range(5):
            assert b" 200 " in await answer(await connect(gateway), HEALTH)
            assert b"bcd" in await answer(await connect(gateway), request(TEXT, more="connection: close\r\n"))
        # Those that were silent for longest are gone.
        assert await asyncio.wait_for(idle[0][0].read(), HUNG_SECONDS) == b""
        assert not idle[-1][0].at_eof()
        for _, writer in idle:
            writer.close()


async def begins(stream: Stream) -> bool:
    """Whether an answer, which then goes on, begins on a connection; otherwise it is closed."""
    stream[1].write(request({**TEXT, "max_tokens": 250, "ignore_eos": True, "stream": True}))
    begun = b" 200 " in await asyncio.wait_for(stream[0].readline(), HUNG_SECONDS)
    if not begun:
        stream[1].close()
    return begun


async def test_busy_connections_of_one_peer_leave_places_to_others(gateways: Any) -> None:
    """Health is answered to the first too."""
    async with gateways(ScriptedEngine(tick=0.5), max_connections=16) as gateway:
        busy = []
        for _ in range(14):
            busy.append(await connect(gateway))
            assert await begins(busy[-1])
        for _ in range(3):
            refused = await answer(await connect(gateway), request(TEXT))
            assert b" 503 " in refused and b"retry-after: 1" in refused and b"too many connections" in refused
            assert b" 200 " in await answer(await connect(gateway), HEALTH)
            assert b" 200 " in await answer(await connect(gateway, "127.0.0.2"), HEALTH)
            asked = request({**TEXT, "max_tokens": 1}, more="connection: close\r\n")
            assert b" 200 " in await answer(await connect(gateway, "127.0.0.2"), asked)
        # Silent ones do not take the places of health.
        silent = [await connect(gateway) for _ in range(2 * HEALTH_CONNECTIONS)]
        assert b" 200 " in await answer(await connect(gateway), HEALTH)
        for _, writer in (*busy, *silent):
            writer.close()
        async with asyncio.timeout(HUNG_SECONDS):
            while b" 200 " not in await answer(await connect(gateway), HEALTH):
                await asyncio.sleep(0.01)


async def test_busy_connections_close_nobody_elses(gateways: Any) -> None:
    async with gateways(ScriptedEngine(tick=0.5), max_connections=16) as gateway:
        idle = await connect(gateway, "127.0.0.2")
        busy = [await connect(gateway)]
        while await begins(busy[-1]):
            busy.append(await connect(gateway))
        assert 8 < len(busy) < 16
        assert b" 200 " in await answer(idle, HEALTH)
        for _, writer in busy:
            writer.close()


OFFERS = [
    "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    "Connection: upgrade\r\nUpgrade: websocket\r\nsec-websocket-key: x\r\n",
    "upgrade: h2c\r\nconnection: close, upgrade\r\n",
]


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket", "closing"])
@pytest.mark.parametrize("step", [1, 50, 10_000])
async def test_offers_of_another_protocol_are_ignored(
    gateways: Any, offer: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateways() as gateway:
        reader, writer = await connect(gateway)
        # The next request on the connection is read as one.
        sent = request(TEXT, more=offer) + (b"" if "close" in offer else HEALTH)
        for begin in range(0, len(sent), step):
            writer.write(sent[begin : begin + step])
            await asyncio.sleep(0)
        said = await asyncio.wait_for(reader.read(), HUNG_SECONDS)
        writer.close()
    assert said.startswith(b"HTTP/1.1 200 ") and b'"bcd"' in said
    assert said.count(b" 200 ") == (1 if "close" in offer else 2)
    assert len(gateway.targets[0].engine.requests) == 1
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_a_chunked_body_behind_an_offer_is_read(gateways: Any) -> None:
    async with gateways() as gateway:
        content = json.dumps(TEXT).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + OFFERS[0]
        sent = f"{head}transfer-encoding: chunked\r\n\r\n{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n"
        assert b'"bcd"' in await answer(await connect(gateway), sent + HEALTH)


async def test_a_tunnel_is_refused(gateways: Any) -> None:
    async with gateways() as gateway:
        said = await answer(await connect(gateway), b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\nhello")
    assert b" 400 " in said.splitlines()[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_is_answered_without_chunks_and_closed(gateways: Any, stream: bool) -> None:
    async with gateways() as gateway:
        said = await answer(
            await connect(gateway),
            request({**TEXT, "stream": stream}, "1.0", "connection: keep-alive\r\nexpect: 100-continue\r\n"),
        )
        head, _, body = said.partition(b"\r\n\r\n")
        assert b"200" in head.splitlines()[0] and b"transfer-encoding" not in head and b"connection: close" in head
        if stream:
            assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
            assert b"content-length" not in head
        else:
            assert json.loads(body)["choices"][0]["text"] == "bcd"
        assert b"200" in (await answer(await connect(gateway), b"GET / HTTP/1.0\r\n\r\n")).splitlines()[0]


async def test_what_is_no_http_is_logged_seldom(
    gateways: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.log_limit.time", SimpleNamespace(monotonic=lambda: 1e9))
    async with gateways() as gateway:
        for number in range(20):
            assert b" 400 " in await answer(await connect(gateway), b"no HTTP at all %d\r\n\r\n" % number)
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and len(lines[0].getMessage()) < 200
