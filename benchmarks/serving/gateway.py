"""What the HTTP gateway costs over gRPC: time to the first token, and throughput at many streams.

    PYTHONPATH=.:kernels:protos:clients:tests python -m benchmarks.serving.gateway [--json FILE] [--table FILE]

Target, gateway and clients are processes of their own on this machine. The target is the real server with an engine
that says one token for every sequence in each step and takes `--step-ms` for it, as a model on a device would: what is
measured is what stands between it and its clients. gRPC is read with the Python client; HTTP with a reader that only
looks for events, so that no HTTP library's own cost counts. Both paths take turns, round by round.

- first token: one request at a time on warm connections, from sending it to the first text, after a pause of random
  length. The engine looks for work every millisecond, which both paths wait for alike; differences are of the medians
  over all requests of a round.
- throughput: `--streams` answers at once, tokens over the time from the first request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared.report import parser_of, write_json
from outrider.runtime import prepare_grpc, run

# Before anything imports gRPC, as in the services.
prepare_grpc()

from outrider.machine import describe_commit, describe_machine, describe_versions  # noqa: E402
from outrider.sampling import SamplingParams  # noqa: E402
from outrider_client.client import Client  # noqa: E402

MODEL = "counter"
WARM_UP = 50
BARS = {"added_first_token_ms": 1.0, "throughput_ratio": 0.95}
# Reads one answer of so many tokens; returns when its first text came, and how many tokens there were.
Read = Callable[[int], Awaitable[tuple[float, int]]]


@dataclass(frozen=True)
class Figure:
    """The medians of the rounds of both paths, with the least and the greatest round, and of what is compared."""

    what: str
    unit: str
    n: int
    grpc: tuple[float, float, float]
    gateway: tuple[float, float, float]
    compared: tuple[float, float, float]
    gateway_cpu_us: float = 0.0


async def serve(step_ms: float) -> None:
    """The target's process: says where it listens, and serves until it is killed."""
    from scripted_engine import SERVED, ScriptedEngine
    from scripted_service import byte_tokenizer, target_over

    served = replace(SERVED, name=MODEL, max_context=4096, tokenizer=byte_tokenizer())
    engine = ScriptedEngine(tick=step_ms / 1e3, max_sequences=1024)
    async with target_over(engine, served) as target:
        sys.stdout.write(f"{target.server.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def services(step_ms: float) -> AsyncIterator[tuple[str, str, int]]:
    """A target and a gateway: their addresses, and the gateway's process id."""
    me = [sys.executable, __file__, "--serve", "--step-ms", str(step_ms)]
    gateway = [sys.executable, "-m", "outrider_gateway", "--listen", "127.0.0.1:0"]
    with contextlib.ExitStack() as leave:
        target = leave.enter_context(subprocess.Popen(me, stdout=subprocess.PIPE, text=True))
        leave.callback(target.kill)
        assert target.stdout is not None
        address = target.stdout.readline().strip()
        web = leave.enter_context(subprocess.Popen([*gateway, "--target", address], stderr=subprocess.PIPE, text=True))
        leave.callback(web.kill)
        assert web.stderr is not None
        line = next(line for line in web.stderr if "serving http://" in line)
        yield address, line.split("http://")[1].split()[0], web.pid


class HttpReader:
    """One connection of HTTP/1.1 that is kept alive, and reads streamed completions."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def read(self, tokens: int) -> tuple[float, int]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address.split(":"))
        reader, writer = self._streams
        asked = {"model": MODEL, "prompt": "a", "max_tokens": tokens, "temperature": 0, "stream": True}
        body = json.dumps({**asked, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        writer.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        first, text, rest = 0.0, 0, b""
        while not rest.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(65536)
            if not data:
                raise SystemExit("the gateway closed the connection")
            if not first and b'"text":"' in data:
                first = time.perf_counter()
            text += data.count(b'"text":"') - data.count(b'"text":""')
            rest = (rest + data)[-16:]
        return first, text

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()


async def grpc_read(client: Client, tokens: int) -> tuple[float, int]:
    """One answer over gRPC."""
    first, count = 0.0, 0
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async for chunk in client.generate(text="a", sampling=sampling, model=MODEL):
        first = first or time.perf_counter()
        count += len(chunk.token_ids)
    return first, count


async def first_tokens(read: Read, requests: int) -> float:
    """The median time to the first token, in milliseconds, of requests one after the other."""
    times = []
    pauses = random.Random(0)
    for _ in range(requests):
        # Without this a path's own length would decide where in the engine's millisecond its requests arrive.
        await asyncio.sleep(pauses.uniform(0.0, 0.004))
        begin = time.perf_counter()
        first, _ = await read(1)
        times.append((first - begin) * 1e3)
    return statistics.median(times)


async def throughput(reads: list[Read], tokens: int) -> float:
    """Tokens a second over all streams at once."""
    begin = time.perf_counter()
    await asyncio.gather(*(read(tokens) for read in reads))
    return len(reads) * tokens / (time.perf_counter() - begin)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, least, greatest."""
    return tuple(round(value, 4) for value in (statistics.median(values), min(values), max(values)))  # type: ignore[return-value]


def cpu_seconds(process: int) -> float:
    """Processor time of all threads of a process so far, in ticks of 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_first_token(options: argparse.Namespace) -> Figure:
    async with services(1.0) as (target, web, _), Client.connect(target) as client:
        http = HttpReader(web)

        async def direct(tokens: int) -> tuple[float, int]:
            return await grpc_read(client, tokens)

        paths: tuple[Read, Read] = (direct, http.read)
        for read in paths:
            await first_tokens(read, WARM_UP)
        rounds = [[await first_tokens(read, options.requests) for read in paths] for _ in range(options.rounds)]
        await http.close()
    added = [over_http - over_grpc for over_grpc, over_http in rounds]
    columns = [spread(list(column)) for column in zip(*rounds, strict=True)]
    return Figure("first token, one request at a time", "ms", options.requests, *columns, spread(added))


async def measure_throughput(options: argparse.Namespace, step_ms: float) -> Figure:
    async with services(step_ms) as (target, web, process), Client.connect(target) as client:
        readers = [HttpReader(web) for _ in range(options.streams)]

        async def direct(tokens: int) -> tuple[float, int]:
            return await grpc_read(client, tokens)

        paths: tuple[list[Read], list[Read]] = ([direct] * options.streams, [reader.read for reader in readers])
        for reads in paths:
            await throughput(reads, 20)
        rounds, cpu = [], 0.0
        for _ in range(options.rounds):
            over_grpc = await throughput(paths[0], options.tokens)
            before = cpu_seconds(process)
            rounds.append((over_grpc, await throughput(paths[1], options.tokens)))
            cpu += cpu_seconds(process) - before
        for reader in readers:
            await reader.close()
    ratios = [over_http / over_grpc for over_grpc, over_http in rounds]
    columns = [spread(list(column)) for column in zip(*rounds, strict=True)]
    n = options.streams * options.tokens
    each = round(cpu / options.rounds / n * 1e6, 1)
    return Figure(f"{options.streams} streams, a step of {step_ms:g} ms", "tokens/s", n, *columns, spread(ratios), each)


def table(document: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "| what | gRPC | gateway | compared | processor for each token in the gateway |",
        "|---|---|---|---|---|",
    ]
    for figure in document["figures"]:
        cells = ["{:.6g} ({:.6g} to {:.6g})".format(*figure[name]) for name in ("grpc", "gateway", "compared")]
        sign = "+ {} ms" if figure["unit"] == "ms" else "{} of gRPC"
        cpu = f"{figure['gateway_cpu_us']:g} µs" if figure["gateway_cpu_us"] else ""
        row = (f"{figure['what']}, {figure['unit']}", cells[0], cells[1], sign.format(cells[2]), cpu)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    figures = [await measure_first_token(options)]
    for step_ms in options.steps:
        figures.append(await measure_throughput(options, step_ms))
        sys.stderr.write(f"{figures[-1]}\n")
    return {
        "command": " ".join(["python", "-m", "benchmarks.serving.gateway", *sys.argv[1:]]),
        "commit": describe_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(("uvicorn", "starlette", "httptools", "uvloop")),
        "rounds": options.rounds,
        "bars": BARS,
        "figures": [asdict(figure) for figure in figures],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200, help="requests of a round, for the first token")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer, for the throughput")
    parser.add_argument("--steps", type=float, nargs="+", default=[20.0, 10.0, 0.5], help="step times in milliseconds")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        run(serve(options.step_ms))
        return
    document = run(measure(options))
    write_json(options.json, document)
    if options.table:
        options.table.write_text(table(document))
    sys.stdout.write(table(document))


if __name__ == "__main__":
    main()
