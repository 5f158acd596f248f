"""What the HTTP gateway costs beside gRPC: time to the first token, and throughput at many streams.

    python -m benchmarks.serving.gateway [--json FILE] [--table FILE]

Target, gateway and clients are separate processes on this machine. The target is the real server with a scripted
engine, which emits one token for every sequence in each step of a given time, as a model on a device would. So the
figures are of what is between it and its clients. gRPC is read with the Python client; HTTP with a reader that only
searches for events, so that no HTTP library's cost is in them.

Measurements are pairs, one of either path right after the other in alternating order, so that other load on the
machine affects both alike. Intervals are of 95 %, by a bootstrap over the pairs.

- first token: one request at a time on warm connections, from sending it to the first text, after a pause of random
  length, since the engine takes requests once a millisecond. Medians over all are compared.
- throughput: `--streams` answers at once, tokens over the time from the first request to the last token. The median of
  the ratios of the pairs is compared.
- processor: time that all threads of a process were running for each token, by the kernel's scheduler. Waiting for a
  core is not in it.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared.processes import processor_seconds
from benchmarks.shared.report import interval_95, markdown_table, parser_of, provenance, write_json
from outrider.runtime import prepare_grpc, run

# Before anything imports gRPC, as in the services.
prepare_grpc()

from outrider.sampling import SamplingParams  # noqa: E402
from outrider_client.client import Client  # noqa: E402

MODEL = "counter"
# Has the scripted engine.
_SCRIPTED = Path(__file__).parents[2] / "tests"
# Of the bootstrap.
DRAWS = 4000
BARS = {"added_first_token_ms": 1.0, "throughput_ratio": 0.95}
# Reads one answer of a given number of tokens; returns when its first text arrived, and the number of tokens.
Read = Callable[[int], Awaitable[tuple[float, int]]]
# Measures one value of a path. A pair is a value over gRPC, and one over the gateway.
Measure = Callable[[], Awaitable[float]]
Pair = tuple[float, float]


@dataclass(frozen=True)
class GatewayFigure:
    """The medians of both paths with their quartiles, and their comparison with its interval of 95 %.

    `processor_us` is the median processor time of each token, by path and process.
    """

    what: str
    unit: str
    pairs: int
    grpc: tuple[float, float, float]
    gateway: tuple[float, float, float]
    compared: tuple[float, float, float]
    processor_us: dict[str, float]


async def serve(step_ms: float) -> None:
    """The target's process: prints its address, and serves until it is killed."""
    from scripted_engine import SERVED, ScriptedEngine
    from scripted_service import model_tokenizer, target_over

    served = replace(SERVED, name=MODEL, max_context=4096, tokenizer=model_tokenizer())
    engine = ScriptedEngine(tick=step_ms / 1e3, max_sequences=1024)
    async with target_over(engine, served) as target:
        sys.stdout.write(f"{target.server.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def services(step_ms: float) -> AsyncIterator[tuple[str, dict[str, int], str]]:
    """A target and a gateway: the target's address, process ids by name with this one's, and the gateway's address."""
    me = [sys.executable, "-m", "benchmarks.serving.gateway", "--serve", "--step-ms", str(step_ms)]
    path = os.pathsep.join([str(_SCRIPTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    gateway = [sys.executable, "-m", "outrider_gateway", "--listen", "127.0.0.1:0"]
    with contextlib.ExitStack() as leave:
        target = leave.enter_context(
            subprocess.Popen(me, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
        )
        leave.callback(target.kill)
        assert target.stdout is not None
        address = target.stdout.readline().strip()
        web = leave.enter_context(subprocess.Popen([*gateway, "--target", address], stderr=subprocess.PIPE, text=True))
        leave.callback(web.kill)
        assert web.stderr is not None
        line = next(line for line in web.stderr if "serving http://" in line)
        processes = {"target": target.pid, "gateway": web.pid, "client": os.getpid()}
        yield address, processes, line.split("http://")[1].split()[0]


class HttpReader:
    """Reads streamed completions over one HTTP/1.1 connection, which is kept alive."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def read(self, tokens: int) -> tuple[float, int]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address.split(":"))
        reader, writer = self._streams
        request = {"model": MODEL, "prompt": "a", "max_tokens": tokens, "temperature": 0, "stream": True}
        body = json.dumps({**request, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
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
    """Read one answer over gRPC; see `Read`."""
    first, count = 0.0, 0
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async for chunk in client.generate(text="a", sampling=sampling, model=MODEL):
        first = first or time.perf_counter()
        count += len(chunk.token_ids)
    return first, count


async def throughput(reads: list[Read], tokens: int) -> float:
    """Tokens a second of one answer from each reader, all at once."""
    begin = time.perf_counter()
    await asyncio.gather(*(read(tokens) for read in reads))
    return len(reads) * tokens / (time.perf_counter() - begin)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return round(middle, 4), round(low, 4), round(high, 4)


def compared(pairs: Sequence[Pair], compare: Callable[[Sequence[Pair]], float]) -> tuple[float, float, float]:
    """The comparison of the pairs, and its interval of 95 %."""
    rng = random.Random(0)
    low, high = interval_95([compare(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS)])
    return round(compare(pairs), 4), low, high


def added(pairs: Sequence[Pair]) -> float:
    """The median over the gateway less that over gRPC."""
    return statistics.median(pair[1] for pair in pairs) - statistics.median(pair[0] for pair in pairs)


def share(pairs: Sequence[Pair]) -> float:
    """The median of the ratios of the gateway's value to gRPC's."""
    return statistics.median(web / direct for direct, web in pairs)


async def measure_first_token(options: argparse.Namespace) -> GatewayFigure:
    pauses = random.Random(0)
    async with services(1.0) as (address, processes, web), Client.connect(address) as client:
        http = HttpReader(web)

        async def first(read: Read) -> float:
            # Without this the path would decide where in the engine's millisecond a request arrives.
            await asyncio.sleep(pauses.uniform(0.0, 0.004))
            begin = time.perf_counter()
            return ((await read(1))[0] - begin) * 1e3

        async def direct() -> float:
            return await first(lambda tokens: grpc_read(client, tokens))

        async def over_http() -> float:
            return await first(http.read)

        pairs, processor = await measure_pairs(direct, over_http, options.requests, processes, 1)
        await http.close()
    return figure("first token, one request at a time", "ms", pairs, added, processor)


async def measure_throughput(options: argparse.Namespace, step_ms: float) -> GatewayFigure:
    async with services(step_ms) as (address, processes, web), Client.connect(address) as client:
        readers = [HttpReader(web) for _ in range(options.streams)]

        async def direct() -> float:
            return await throughput([lambda tokens: grpc_read(client, tokens)] * options.streams, options.tokens)

        async def over_http() -> float:
            return await throughput([reader.read for reader in readers], options.tokens)

        tokens = options.streams * options.tokens
        pairs, processor = await measure_pairs(direct, over_http, options.rounds, processes, tokens)
        for reader in readers:
            await reader.close()
    return figure(f"{options.streams} streams, a step of {step_ms:g} ms", "tokens/s", pairs, share, processor)


async def measure_pairs(
    direct: Measure, over_http: Measure, count: int, processes: Mapping[str, int], tokens: int
) -> tuple[list[Pair], dict[str, float]]:
    """`count` pairs, after some that are not counted, and the median processor time of each process for a token."""
    used: dict[str, list[float]] = {}

    async def one(path: str, measure: Measure) -> float:
        before = {name: processor_seconds(number) for name, number in processes.items()}
        value = await measure()
        for name, number in processes.items():
            spent = (processor_seconds(number) - before[name]) / tokens * 1e6
            used.setdefault(f"{path}: {name}", []).append(spent)
        return value

    for _ in range(1 + count // 20):
        await direct()
        await over_http()
    pairs: list[Pair] = []
    for turn in range(count):
        if turn % 2:
            web, plain = await one("gateway", over_http), await one("gRPC", direct)
        else:
            plain, web = await one("gRPC", direct), await one("gateway", over_http)
        pairs.append((plain, web))
    return pairs, {name: round(statistics.median(values), 1) for name, values in sorted(used.items())}


def figure(
    what: str,
    unit: str,
    pairs: Sequence[Pair],
    compare: Callable[[Sequence[Pair]], float],
    processor: dict[str, float],
) -> GatewayFigure:
    """The figure of measured pairs."""
    direct, web = (quartiles(values) for values in zip(*pairs, strict=True))
    return GatewayFigure(what, unit, len(pairs), direct, web, compared(pairs, compare), processor)


def table(document: dict[str, Any]) -> str:
    """The figures as Markdown."""
    head = ["what", "pairs", "gRPC (quartiles)", "gateway (quartiles)", "compared (95 %)", "processor in the gateway"]
    rows = []
    for figure in document["figures"]:
        cells = ["{:.6g} ({:.6g} to {:.6g})".format(*figure[name]) for name in ("grpc", "gateway", "compared")]
        over = "+ {} ms" if figure["unit"] == "ms" else "{} of gRPC"
        each = "a request" if figure["unit"] == "ms" else "a token"
        processor = f"{figure['processor_us']['gateway: gateway']:g} µs {each}"
        what = f"{figure['what']}, {figure['unit']}"
        rows.append([what, figure["pairs"], *cells[:2], over.format(cells[2]), processor])
    return markdown_table(head, rows)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    figures = [await measure_first_token(options)]
    for step_ms in options.steps:
        figures.append(await measure_throughput(options, step_ms))
        sys.stderr.write(f"{figures[-1]}\n")
    return {
        **provenance("serving.gateway", ("uvicorn", "starlette", "httptools", "uvloop")),
        "bars": BARS,
        "figures": [asdict(figure) for figure in figures],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of waves, for the throughput")
    parser.add_argument("--requests", type=int, default=400, help="pairs of requests, for the first token")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of an answer, for the throughput")
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
