"""A gateway of several processes behind one port: to callers it is one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from scripted_engine import ScriptedEngine
from waits import HUNG_SECONDS, until

TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
HELD = {**TEXT, "max_tokens": 200, "stream": True}
# Seconds a token: an answer of 200 is under way for as long as a test wants, or done in a moment.
SLOW, FAST = 0.4, 0.001
# What every answer has of its own, as every process does.
OWN = re.compile(rb'"(id|created|x-request-id)": ?("[^"]*"|\d+)')
# Each on a connection of its own, so that all workers get some.
ALONE = {"connection": "close"}


@dataclass
class Workers:
    """A gateway's parent and what it has logged."""

    process: asyncio.subprocess.Process
    url: str
    lines: list[str]
    reading: asyncio.Task[None]

    @property
    def children(self) -> list[psutil.Process]:
        """The workers, in no order."""
        return psutil.Process(self.process.pid).children()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=HUNG_SECONDS)

    def connections_of(self, worker: psutil.Process) -> set[int]:
        """The ports of clients that a worker is connected to."""
        port = int(self.url.rpartition(":")[2])
        return {one.raddr.port for one in worker.net_connections("tcp") if one.raddr and one.laddr.port == port}


@contextlib.asynccontextmanager
async def workers_before(target: str, *flags: str) -> AsyncIterator[Workers]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_gateway", "--listen", "127.0.0.1:0", "--target", target),
        *("--workers", "2", "--drain-seconds", "20", "--health-seconds", "0.1", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    lines: list[str] = []

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            lines.append(line.decode())

    reading = asyncio.create_task(read())
    try:
        await until(lambda: any("serving http://" in line for line in lines) or reading.done())
        (url,) = [line.split("serving ")[1].split()[0] for line in lines if "serving http://" in line] or [""]
        assert url, lines
        yield Workers(process, url, lines, reading)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    """/metrics, by series."""
    page = (await client.get("/metrics", headers=ALONE)).text
    rows = (line.rpartition(" ") for line in page.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in rows}


async def held_streams(address: str, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Streams on connections of their own, whose heads have come."""
    streams = [await asyncio.open_connection(*address.removeprefix("http://").split(":")) for _ in range(count)]
    await asyncio.gather(*(_begin_held(*stream) for stream in streams))
    return streams


async def outcomes(client: httpx.AsyncClient, bodies: Sequence[tuple[str, Any]]) -> list[tuple[int, bytes]]:
    """Status and text of each request, without what is every answer's own."""
    answers = [await client.post(path, json=body, headers=ALONE) for path, body in bodies]
    return [(one.status_code, OWN.sub(b"", one.content)) for one in answers]


async def test_workers_are_one_gateway(gateways: Any) -> None:
    """The answers, errors, limits, kept responses and metrics of one process; and an end that waits for answers."""
    asked: list[tuple[str, Any]] = [
        ("/v1/completions", TEXT),
        ("/v1/completions", {**TEXT, "n": 2, "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}),
        ("/v1/completions", {**TEXT, "n": 400}),
        ("/v1/completions", {**TEXT, "bogus": 1}),
        ("/v1/nothing", TEXT),
        ("/tokenize", {"model": "counter", "prompt": "abc"}),
    ]
    engine = ScriptedEngine(max_sequences=64)
    async with (
        gateways(engine, max_running=8) as alone,
        workers_before(alone.targets[0].server.address, "--max-running", "8") as workers,
        workers.client() as client,
    ):
        expected = await outcomes(alone.http, asked)
        for _ in range(2):
            assert await outcomes(client, asked) == expected
        await _kept_by_all(client)
        counted = await samples(client)
        assert counted['outrider_gateway_requests_total{endpoint="completions",status="200"}'] == 4
        assert counted['outrider_gateway_requests_total{endpoint="completions",status="400"}'] == 4
        of_target = f'{{target="{alone.targets[0].server.address}"}}'
        assert counted[f"outrider_gateway_target_healthy{of_target}"] == 1
        assert counted["process_resident_memory_bytes"] > sum(one.memory_info().rss for one in workers.children) * 0.9
        # One tenant gets three quarters of the eight places, whichever workers answer.
        engine.tick = SLOW
        streams = await held_streams(workers.url, 6)
        assert all(workers.connections_of(worker) for worker in workers.children)
        for _ in range(4):
            assert (await client.post("/v1/completions", json=TEXT, headers=ALONE)).status_code == 429
        assert (await samples(client))[f"outrider_gateway_running{of_target}"] == 6
        workers.process.send_signal(signal.SIGTERM)
        await until(lambda: any("draining" in line for line in workers.lines))
        engine.tick = FAST
        for reader, writer in streams:
            assert b"data: [DONE]" in await asyncio.wait_for(reader.read(), HUNG_SECONDS)
            writer.close()
        assert await asyncio.wait_for(workers.process.wait(), HUNG_SECONDS) == 0
        await workers.reading
        assert not any("Traceback" in line or " ERROR " in line for line in workers.lines)


async def _kept_by_all(client: httpx.AsyncClient) -> None:
    """A response is found, continued and forgotten by whoever is asked."""
    body = {"model": "counter", "input": "a", "max_output_tokens": 3, "temperature": 0}
    kept = (await client.post("/v1/responses", json=body, headers=ALONE)).json()
    for _ in range(3):
        assert (await client.get(f"/v1/responses/{kept['id']}", headers=ALONE)).json() == kept
        more = {**body, "previous_response_id": kept["id"]}
        assert (await client.post("/v1/responses", json=more, headers=ALONE)).status_code == 200
    of_another = {**ALONE, "outrider-tenant": "another"}
    assert (await client.get(f"/v1/responses/{kept['id']}", headers=of_another)).status_code == 404
    assert (await client.delete(f"/v1/responses/{kept['id']}", headers=ALONE)).json()["deleted"]
    for _ in range(3):
        assert (await client.get(f"/v1/responses/{kept['id']}", headers=ALONE)).status_code == 404


async def test_a_worker_that_dies_takes_its_own_streams_only(gateways: Any) -> None:
    engine = ScriptedEngine(max_sequences=64)
    async with (
        gateways(engine) as alone,
        workers_before(alone.targets[0].server.address, "--max-running", "8", "--max-connections", "64") as workers,
        workers.client() as client,
    ):
        for _ in range(4):
            assert (await client.post("/v1/completions", json=TEXT, headers=ALONE)).status_code == 200
        before = await samples(client)
        engine.tick = SLOW
        streams = await held_streams(workers.url, 6)
        victim, survivor = workers.children
        ports = {writer.get_extra_info("sockname")[1]: reader for reader, writer in streams}
        lost, kept = (ports.keys() & workers.connections_of(one) for one in (victim, survivor))
        # Connections that are about to close count where they are, so the streams may part otherwise than by halves.
        assert lost and kept and len(lost) + len(kept) == len(streams)
        os.kill(victim.pid, signal.SIGKILL)
        # Its streams end without their last event, at once.
        for port in lost:
            ended = await asyncio.wait_for(_read_to_the_end(ports[port]), HUNG_SECONDS)
            assert b"[DONE]" not in ended
        # Their places are free, for as many others.
        await until(lambda: any("is lost, with" in line for line in workers.lines))
        others = await held_streams(workers.url, len(lost))
        assert (await client.post("/v1/completions", json=TEXT, headers=ALONE)).status_code == 429
        engine.tick = FAST
        for reader in [*(ports[port] for port in kept), *(reader for reader, _ in others)]:
            await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), HUNG_SECONDS)
        for _, writer in [*streams, *others]:
            writer.close()
        # Both answer again, and what was counted is not forgotten.
        others = []
        async with asyncio.timeout(HUNG_SECONDS):
            while len(workers.children) < 2 or not all(map(workers.connections_of, workers.children)):
                others.append(await asyncio.open_connection(*workers.url.removeprefix("http://").split(":")))
                # As many as there are places would all stay with the worker that has them before the other is there.
                if len(others) > 8:
                    others.pop(0)[1].close()
        after = await samples(client)
        assert after["outrider_gateway_tokens_total"] >= before["outrider_gateway_tokens_total"] + 6 * 200
        assert after["process_cpu_seconds_total"] >= before["process_cpu_seconds_total"]
        for _, writer in others:
            writer.close()
        # Without their parent they end at once.
        left = workers.children
        workers.process.kill()
        await until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in left))


async def test_an_idle_connection_makes_way_whichever_worker_has_it(gateways: Any) -> None:
    """A peer that has as many as it may gets a further one in place of its longest idle one."""
    engine = ScriptedEngine(max_sequences=64, tick=SLOW)
    async with (
        gateways(engine) as alone,
        workers_before(alone.targets[0].server.address, "--max-connections", "8") as workers,
    ):
        address = workers.url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(*address) for _ in range(7)]
        await until(lambda: sum(len(workers.connections_of(one)) for one in workers.children) == 7)
        busy, idle = sorted(workers.children, key=lambda one: len(workers.connections_of(one)))
        # One worker has four that are idle, the other three of which two become busy and one ends, so that it has the
        # fewest, and no idle one.
        mine = {writer.get_extra_info("sockname")[1]: (reader, writer) for reader, writer in opened}
        *streaming, ended = (mine[own] for own in workers.connections_of(busy))
        ended[1].close()
        for stream in streaming:
            await _begin_held(*stream)
        await until(lambda: len(workers.connections_of(busy)) == 2)
        opened.append(await asyncio.open_connection(*address))
        await _begin_held(*opened[-1])
        assert (len(workers.connections_of(busy)), len(workers.connections_of(idle))) == (3, 4)
        # The seventh of eight is the last that a lone peer gets.
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
            opened.append((reader, writer))
        assert (len(workers.connections_of(busy)), len(workers.connections_of(idle))) == (3, 4)
        for _, writer in opened:
            writer.close()


async def test_a_worker_that_starts_again_gets_connections_while_idle_ones_have_all_places(gateways: Any) -> None:
    async with (
        gateways() as alone,
        workers_before(alone.targets[0].server.address, "--max-connections", "8") as workers,
        contextlib.AsyncExitStack() as clients,
    ):

        async def answered() -> None:
            """On a connection that stays open."""
            client = await clients.enter_async_context(workers.client())
            assert (await client.get("/v1/models")).status_code == 200

        def times(words: str) -> int:
            return sum(words in line for line in workers.lines)

        survivor, other = workers.children
        # The seventh of eight is the last that a lone peer gets. Once more where the other was back before they came.
        for kills in itertools.count(1):
            os.kill(other.pid, signal.SIGKILL)
            await until(lambda kills=kills: times("is lost, with") == kills)
            for _ in range(7):
                await answered()
            full = len(workers.connections_of(survivor)) == 7
            await until(lambda kills=kills: times("serves again") == kills)
            (other,) = (one for one in workers.children if one != survivor)
            if full:
                break
        held = []
        for _ in range(8):
            await answered()
            held.append((len(workers.connections_of(survivor)), len(workers.connections_of(other))))
        # Each second one goes to it, until it has as many.
        assert held == [(6, 0), (6, 1), (5, 1), (5, 2), (4, 2), (4, 3), (4, 3), (4, 3)]


async def _begin_held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for an answer that is under way for long, and wait for its head."""
    content = json.dumps(HELD).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(content), content))
    assert b" 200 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)


async def _read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    read = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            read += data
    return read


async def test_what_a_worker_refuses_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CLIENT_TLS_CA", "/no/such/file")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_gateway", "--listen", "127.0.0.1:0", "--workers", "2"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    assert process.returncode == 2
    assert said.decode().splitlines()[-1] == "outrider gateway: error: /no/such/file: no such file"
