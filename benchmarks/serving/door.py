"""What a streamed token costs between the engine and its reader, over gRPC and over each HTTP endpoint.

    python -m benchmarks.serving.door [--streams 128] [--steps 20,8] [--doors grpc,completions] [--workers 1,2]
        [--json FILE]

There is no model: an engine in a process of its own makes a token for every stream in each step of a given time. Target
and gateway are the real services in processes of their own, so the figures are of everything between the engine's
report and the reader's socket. HTTP is read by a loop over sockets that only counts events; gRPC by the Python client.

- processor: time that all threads of a service's processes were running for each token, by the kernel's scheduler,
  while all streams ran: between `BEGUN` and `NEARLY` of all tokens. Waiting for a core is not in it, so that other load
  on the machine changes it little. What a request takes before its first token and behind its last is apart.
- tokens a second: from the first request to the last token. Where a service cannot follow the engine it joins steps, so
  `tokens an event` above 1 says that it is behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.runtime import prepare_grpc, prepare_service, run

# Before anything imports gRPC, as in the services.
prepare_grpc()

from benchmarks.shared.processes import processor_seconds, wait_for  # noqa: E402
from benchmarks.shared.report import comma_separated, markdown_table, parser_of, provenance, write_json  # noqa: E402
from outrider.ports import free_port  # noqa: E402

MODEL = "steps"
_SCRIPT = (sys.executable, "-m", "benchmarks.serving.door")
# Has the tokenizer of single bytes, with a chat template.
_SCRIPTED = Path(__file__).parents[2] / "tests"
_GATEWAY_CALLS = 1024
# Parts of all events between which processor time is of streaming alone.
BEGUN, NEARLY = 0.3, 0.9
# Of processor time in a round, where no events are joined.
_READINGS = 100
_CHAT = {"messages": [{"role": "user", "content": "a"}]}
# By door: the path, what is asked, the name of its bound on tokens, and what one event of text holds.
_HTTP: Mapping[str, tuple[str, dict[str, Any], str, bytes]] = {
    "completions": ("/v1/completions", {"prompt": "a", "ignore_eos": True}, "max_tokens", b'"text":"'),
    "chat": ("/v1/chat/completions", {**_CHAT, "ignore_eos": True}, "max_tokens", b'"delta":{"content":"'),
    "responses": ("/v1/responses", {"input": "a"}, "max_output_tokens", b'"response.output_text.delta","'),
    "messages": ("/v1/messages", _CHAT, "max_tokens", b'"text_delta"'),
    "page": (
        "/v1/chat/completions",
        {**_CHAT, "ignore_eos": True, "outrider": {"drafts": True}},
        "max_tokens",
        b'"pieces":',
    ),
}


@dataclass(frozen=True)
class DoorFigure:
    """One door at one step time. `processor_us` is by service, for each token; `request_us` for each request beside its
    tokens. Medians of the rounds."""

    door: str
    workers: int
    step_ms: float
    offered_tokens_per_second: float
    tokens_per_second: float
    tokens_per_event: float
    processor_us: dict[str, float]
    request_us: dict[str, float]


class Meter:
    """Reads the processor time of each service again and again during a round."""

    def __init__(self, processes: Mapping[str, list[int]], tokens: int) -> None:
        self._processes, self.tokens = processes, tokens
        self.events = 0
        self._every = tokens // _READINGS
        self._readings = [self._read()]

    def add(self, events: int) -> None:
        """Note events that were read."""
        self.events += events
        if self.events >= self._readings[-1][1] + self._every:
            self._readings.append(self._read())

    def _read(self) -> tuple[float, int, dict[str, float]]:
        used = {name: sum(map(processor_seconds, pids)) for name, pids in self._processes.items()}
        return time.perf_counter(), self.events, used

    def end(self, streams: int) -> tuple[float, float, dict[str, float], dict[str, float]]:
        """Tokens a second, tokens an event, and microseconds a token and a request."""
        self._readings.append(self._read())
        first, last = self._readings[0], self._readings[-1]
        begun, nearly = (
            next(one for one in self._readings if one[1] >= part * self.events) for part in (BEGUN, NEARLY)
        )
        joined = self.tokens / self.events
        streamed = (nearly[1] - begun[1]) * joined
        token = {name: (nearly[2][name] - begun[2][name]) / streamed * 1e6 for name in self._processes}
        whole = {name: (last[2][name] - first[2][name]) * 1e6 for name in self._processes}
        request = {name: (whole[name] - token[name] * self.tokens) / streams for name in self._processes}
        return self.tokens / (last[0] - first[0]), joined, token, request


def serve_target(step_ms: float, port: int) -> int:
    """The target's process: serves until SIGTERM."""
    prepare_service()
    from scripted_service import model_tokenizer

    from target_service.config import TargetConfig
    from target_service.engine_process.client import EngineLink
    from target_service.lifecycle import serve_engine

    config = TargetConfig(
        listen=f"127.0.0.1:{port}",
        served_model_name=str(step_ms),
        max_running=_GATEWAY_CALLS,
        drain_seconds=1.0,
        log_level="warning",
    )
    link = EngineLink(config, (*_SCRIPT, "--engine"), model_tokenizer)
    return run(serve_engine(config, link))


def run_engine(descriptor: int) -> int:
    """The engine's process, beside the target's."""
    from benchmarks.shared.stepping_engine import AnsweringEngine
    from target_service.config import TargetConfig
    from target_service.engine_process.server import Reporter, serve_engine

    def build(config: TargetConfig, reporter: Reporter) -> Any:
        return AnsweringEngine(float(config.served_model_name) / 1e3, reporter)

    return serve_engine(descriptor, build)


@contextlib.contextmanager
def services(step_ms: float, workers: int = 1) -> Iterator[tuple[str, str, dict[str, int]]]:
    """A target and a gateway: the addresses of both, and the process that each began with."""
    port, web_port = free_port(), free_port()
    path = os.pathsep.join([str(_SCRIPTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    with contextlib.ExitStack() as leave:

        def start(*command: str) -> subprocess.Popen[bytes]:
            running = subprocess.Popen(command, env=environment)
            leave.callback(running.wait)
            leave.callback(running.terminate)
            return running

        target = start(*_SCRIPT, "--serve", str(port), "--steps", str(step_ms))
        wait_for(f"127.0.0.1:{port}", target)
        listen = f"127.0.0.1:{web_port}"
        limit = ("--max-running", str(_GATEWAY_CALLS), "--log-level", "warning", "--workers", str(workers))
        gateway = start(
            sys.executable, "-m", "outrider_gateway", "--listen", listen, "--target", f"127.0.0.1:{port}", *limit
        )
        _wait_ready(web_port, gateway)
        yield f"127.0.0.1:{port}", listen, {"target": target.pid, "gateway": gateway.pid}


def _wait_ready(port: int, running: subprocess.Popen[bytes]) -> None:
    while running.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as probe:
            probe.sendall(b"GET /health/ready HTTP/1.0\r\n\r\n")
            if b" 200 " in probe.recv(64):
                return
        time.sleep(0.1)
    raise SystemExit("the gateway did not start")


def family(pid: int) -> list[int]:
    """A process and those that it started and that serve, without the engine's, which stands for a device."""
    found = [pid]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes()
            if int(stat[1]) == pid and b"--engine" not in command and b"text.worker" not in command:
                found.append(int(process.name))
    return found


class HttpStreams:
    """Kept connections to the gateway, one for each stream."""

    def __init__(self, address: str, count: int) -> None:
        host, _, port = address.rpartition(":")
        self._sockets = [socket.create_connection((host, int(port))) for _ in range(count)]
        self._selector = selectors.DefaultSelector()
        for place, connection in enumerate(self._sockets):
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, place)

    def read(self, door: str, tokens: int, meter: Meter) -> None:
        """Read an answer of so many tokens on each connection, all at once."""
        path, asked, bound, mark = _HTTP[door]
        body = json.dumps({"model": MODEL, "temperature": 0, "stream": True, bound: tokens, **asked}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
        for connection in self._sockets:
            connection.sendall(head.encode() + b"%d\r\n\r\n%s" % (len(body), body))
        ends, left = [b""] * len(self._sockets), len(self._sockets)
        while left:
            for key, _ in self._selector.select():
                data = self._sockets[key.data].recv(1 << 18)
                if not data or data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                    raise SystemExit(f"the gateway answered {data[:500]!r}")
                meter.add(data.count(mark))
                ends[key.data] = (ends[key.data] + data)[-7:]
                left -= ends[key.data] == b"\r\n0\r\n\r\n"

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._selector.close()


async def read_grpc(address: str, streams: int, tokens: int, meter: Meter) -> None:
    """Read as many answers over gRPC, all at once."""
    from outrider.sampling import SamplingParams
    from outrider_client.client import Client

    async with Client.connect(address) as client:

        async def one() -> None:
            async for chunk in client.generate(text="a", sampling=SamplingParams(max_tokens=tokens, ignore_eos=True)):
                meter.add(bool(chunk.token_ids))

        await asyncio.gather(*(one() for _ in range(streams)))


def measure_door(door: str, workers: int, step_ms: float, options: argparse.Namespace) -> DoorFigure:
    """The figure of one door of so many gateway processes."""
    rounds = []
    with services(step_ms, workers) as (target, gateway, started):
        streams = None if door == "grpc" else HttpStreams(gateway, options.streams)
        processes = {name: family(pid) for name, pid in started.items()}
        # The first round is not counted.
        for _ in range(1 + options.rounds):
            meter = Meter(processes, options.streams * options.tokens)
            if streams is None:
                run(read_grpc(target, options.streams, options.tokens, meter))
            else:
                streams.read(door, options.tokens, meter)
            rounds.append(meter.end(options.streams))
        if streams is not None:
            streams.close()
    del rounds[0]
    rates, joined, tokens, requests = zip(*rounds, strict=True)
    return DoorFigure(
        door,
        workers,
        step_ms,
        round(options.streams / step_ms * 1e3),
        round(statistics.median(rates)),
        round(statistics.median(joined), 2),
        _medians(tokens),
        _medians(requests),
    )


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each service, and their sum."""
    medians = {name: round(statistics.median(one[name] for one in rounds), 1) for name in rounds[0]}
    return {**medians, "both": round(sum(medians.values()), 1)}


def table(figures: list[DoorFigure]) -> str:
    """The figures as Markdown."""
    head = [
        "door",
        "workers",
        "step, ms",
        "offered, tokens/s",
        "made, tokens/s",
        "tokens an event",
        "target, µs a token",
    ]
    rows = [
        [
            one.door,
            one.workers,
            f"{one.step_ms:g}",
            f"{one.offered_tokens_per_second:.0f}",
            f"{one.tokens_per_second:.0f}",
            f"{one.tokens_per_event:g}",
            *(f"{one.processor_us[name]:g}" for name in ("target", "gateway", "both")),
            f"{one.request_us['both']:.0f}",
        ]
        for one in figures
    ]
    return markdown_table([*head, "gateway", "both", "both, µs a request"], rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken")
    parser.add_argument("--steps", type=comma_separated(float), default=[20.0, 2.1], help="step times in milliseconds")
    parser.add_argument("--doors", type=comma_separated(str), default=["grpc", *_HTTP])
    parser.add_argument("--workers", type=comma_separated(int), default=[1], help="processes of the gateway")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        sys.exit(run_engine(options.engine))
    if options.serve is not None:
        sys.exit(serve_target(options.steps[0], options.serve))
    figures = []
    for step_ms, door in itertools.product(options.steps, options.doors):
        # Those of the gateway, which has no part in gRPC.
        for workers in options.workers[:1] if door == "grpc" else options.workers:
            figures.append(measure_door(door, workers, step_ms, options))
            sys.stderr.write(f"{figures[-1]}\n")
    document = {
        **provenance("serving.door", ("uvicorn", "uvloop", "grpcio", "protobuf")),
        "streams": options.streams,
        "tokens": options.tokens,
        "figures": [asdict(one) for one in figures],
    }
    write_json(options.json, document)
    if options.table:
        options.table.write_text(table(figures))
    sys.stdout.write(table(figures))


if __name__ == "__main__":
    main()
