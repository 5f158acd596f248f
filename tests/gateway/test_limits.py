"""Bounds that hold whatever clients do: memory for those who do not read, connections, and the time of a drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest
from scripted_engine import ScriptedEngine
from waits import HUNG_SECONDS, ever_longer, until

from outrider_gateway.caller import caller_from
from outrider_gateway.heads import HEAD_BYTES

TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
MIB = 2**20


@contextlib.asynccontextmanager
async def gateway_process(target: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """The address of a gateway in a process of its own, whose memory can be looked at."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_gateway", "--listen", "127.0.0.1:0", "--target", target),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(HUNG_SECONDS):
            while b"serving http://" not in (line := await process.stderr.readline()):
                assert line, "the gateway ended"
        yield line.split(b"serving http://")[1].split()[0].decode(), psutil.Process(process.pid)
    finally:
        process.kill()
        await process.wait()


async def begin(address: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose answer nobody reads."""
    # As little as possible is buffered here.
    reader, writer = await asyncio.open_connection(*address.split(":"), limit=1024)
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(content), content))
    return reader, writer


async def test_readers_that_stop_do_not_grow_memory(gateways: Any) -> None:
    """Two answers of some 20 MiB each, of which their clients read nothing."""
    engine = ScriptedEngine(tick=0.0, max_sequences=16)
    served = {"max_context": 20_000}
    async with (
        gateways(engine, served=served) as gateway,
        gateway_process(gateway.targets[0].server.address) as (address, process),
    ):
        asked = {**TEXT, "max_tokens": 19_000, "stream": True, "ignore_eos": True, "logprobs": 20}
        before = process.memory_info().rss
        streams = [await begin(address, asked) for _ in range(2)]
        most, still = 0, 0
        # Until nothing has moved for a second: all have stopped at what lies between engine and client, or were given
        # up by the target as readers that are too slow.
        last = -1.0
        async with asyncio.timeout(HUNG_SECONDS):
            while still < 5:
                await asyncio.sleep(0.2)
                most = max(most, process.memory_info().rss - before)
                now = sum(process.cpu_times()[:2])
                still, last = (still + 1 if now - last < 0.02 else 0), now
        # Of four such answers 16 MiB in three runs, 34 beside other work; all that two answer would be 40.
        assert most < 25 * MIB, f"{most / MIB:.0f} MiB more"
        for _, writer in streams:
            writer.close()
        # What they held is free again.
        await gateway.targets[0].idle()


async def test_more_connections_than_allowed_are_refused(gateways: Any) -> None:
    engine = ScriptedEngine()
    engine.pause_after(10)
    async with gateways(engine, max_connections=2) as gateway:
        running = [await begin(gateway.server.address, {**TEXT, "max_tokens": 200, "stream": True}) for _ in range(2)]
        for reader, _ in running:
            assert b" 200 " in await reader.readline()
        reader, writer = await begin(gateway.server.address, TEXT)
        assert b" 503 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
        for _, closing in (*running, (reader, writer)):
            closing.close()
        await gateway.idle()
    async with gateways(max_connections=1) as gateway:
        assert (await gateway.http.post("/v1/completions", json=TEXT)).status_code == 200


async def test_a_drain_ends_in_time(gateways: Any) -> None:
    """Answers that would go on for longer are cut off, and free what they held."""
    engine = ScriptedEngine()
    engine.pause_after(10)
    async with gateways(engine, drain_seconds=1.0) as gateway:
        reader, writer = await begin(gateway.server.address, {**TEXT, "max_tokens": 250, "stream": True})
        await reader.readline()
        gateway.server.drain()
        with pytest.raises(TimeoutError):
            # Not at once: it had a second.
            await asyncio.wait_for(gateway.server.ended(), 0.5)
        await asyncio.wait_for(gateway.server.ended(), HUNG_SECONDS)
        rest = await asyncio.wait_for(reader.read(2**20), HUNG_SECONDS)
        assert b"[DONE]" not in rest
        await gateway.targets[0].idle()
        assert len(engine.cancelled) == 1
        writer.close()


async def test_a_head_without_end_is_refused(gateways: Any) -> None:
    async with gateways() as gateway:
        reader, writer = await asyncio.open_connection(*gateway.server.address.split(":"))
        start = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "
        # Not a byte more than is read, so that the refusal is not lost in a reset.
        writer.write(start + b"a" * (HEAD_BYTES + 1 - len(start)))
        assert b" 400 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
        writer.close()
        # A body is bounded by itself, and a head that is merely long is read.
        long = {**TEXT, "prompt": "a" * 2**17}
        answer = await gateway.http.post("/v1/completions", json=long, headers={"x-own": "a" * 2**15})
        assert answer.json()["error"]["code"] != "invalid_json"
        for _ in range(3):
            assert (await gateway.http.get("/health", headers={"x-own": "a" * 2**15})).status_code == 200


async def test_connections_that_say_nothing_give_their_places_back(
    gateways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ever_longer():
        monkeypatch.setattr("outrider_gateway.heads.HEAD_SECONDS", seconds)
        engine = ScriptedEngine()
        engine.pause_after(10)
        async with gateways(engine, max_connections=3) as gateway:
            address = gateway.server.address.split(":")
            silent = [await asyncio.open_connection(*address) for _ in range(2)]
            for _, writer in silent[1:]:
                # One that stops half-way.
                writer.write(b"GET /health HTTP/1.1\r\nhost: loc")
            for reader, writer in silent:
                assert await asyncio.wait_for(reader.read(), HUNG_SECONDS) == b""
                writer.close()
            # Answers may take longer than heads.
            asking = asyncio.create_task(gateway.http.post("/v1/completions", json={**TEXT, "max_tokens": 60}))
            await until(lambda: engine.paused.is_set() or asking.done())  # noqa: B023
            if asking.done() and isinstance(asking.exception(), httpx.TransportError):
                # Its own head came too late.
                continue
            await asyncio.sleep(1.5 * seconds)
            engine.go_on()
            assert (await asking).status_code == 200
            return
    pytest.fail("no head came in time")


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED += b"transfer-encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


@pytest.mark.parametrize("trailers", [b"x: " + b"a" * 2**20, b"x: a\r\n" * 2**17], ids=["a long one", "many"])
async def test_trailers_without_end_are_refused(gateways: Any, trailers: bytes) -> None:
    async with gateways() as gateway:
        reader, writer = await asyncio.open_connection(*gateway.server.address.split(":"))
        writer.write(CHUNKED + chunk(json.dumps(TEXT).encode()) + b"0\r\n")
        with contextlib.suppress(ConnectionError):
            for begin in range(0, len(trailers), 2**14):
                writer.write(trailers[begin : begin + 2**14])
                await asyncio.wait_for(writer.drain(), HUNG_SECONDS)
                if reader.at_eof() or reader._buffer:  # type: ignore[attr-defined]
                    break
            else:
                pytest.fail("a mebibyte was taken")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
        writer.close()


async def test_a_body_of_many_small_chunks_is_read(gateways: Any) -> None:
    """What frames them is more than a head may have."""
    async with gateways() as gateway:
        reader, writer = await asyncio.open_connection(*gateway.server.address.split(":"))
        content = json.dumps({**TEXT, "user": "a" * HEAD_BYTES}).encode()
        writer.write(CHUNKED + b"".join(chunk(content[i : i + 1]) for i in range(len(content))) + b"0\r\nx: y\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
        writer.close()


async def test_trailers_are_no_headers(gateways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that looks at headers has not seen them."""
    seen: list[list[bytes]] = []

    def looked_at(headers: Any) -> Any:
        seen.append([name for name, _ in headers])
        return caller_from(headers)

    monkeypatch.setattr("outrider_gateway.endpoint.caller_from", looked_at)
    async with gateways() as gateway:
        reader, writer = await asyncio.open_connection(*gateway.server.address.split(":"))
        # In one piece: all is parsed before the request is looked at.
        writer.write(CHUNKED + chunk(json.dumps(TEXT).encode()) + b"0\r\noutrider-tenant: other\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
        writer.close()
    assert seen == [[b"host", b"content-type", b"transfer-encoding"]]


async def test_a_body_that_goes_on_after_its_answer_gives_its_place_back(
    gateways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ever_longer():
        monkeypatch.setattr("outrider_gateway.heads.HEAD_SECONDS", seconds)
        async with gateways(body_seconds=0.2) as gateway:
            reader, writer = await asyncio.open_connection(*gateway.server.address.split(":"))
            writer.write(CHUNKED)
            said = asyncio.create_task(reader.readline())
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(HUNG_SECONDS):
                    while True:
                        writer.write(chunk(b"a"))
                        await writer.drain()
                        await asyncio.sleep(0.05)
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await said
            writer.close()
            if answer:
                assert b" 408 " in answer
                return
            # Its head came too late.
    pytest.fail("no head came in time")
