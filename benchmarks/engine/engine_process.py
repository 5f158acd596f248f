"""Delivery of tokens to clients, with the engine in the server's process and in a separate one.

    python -m benchmarks.engine.engine_process [--clients N] [--json FILE]

There is no model: each step sleeps, as one that waits for a GPU does, and computes in the interpreter for 0.3 ms, as a
step's host work does; together that is the step time. Every sequence gets a token per step, through the real server,
over TCP on this machine, to clients in separate processes. Takes a minute at most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from outrider.runtime import prepare_grpc, run

# Before anything imports gRPC, as in the services.
prepare_grpc()

import grpc  # noqa: E402

from benchmarks.shared.processes import process, wait_for  # noqa: E402
from benchmarks.shared.report import parser_of, show, write_json  # noqa: E402
from benchmarks.shared.stepping_engine import SERVED, STATS, SteppingEngine  # noqa: E402
from outrider.ports import free_port  # noqa: E402
from outrider.processes.framing import LENGTH_BYTES  # noqa: E402
from outrider.sampling import SamplingParams, VerificationMode  # noqa: E402
from outrider.v1 import target_pb2, target_pb2_grpc, tree_pb2  # noqa: E402
from target_service.api.admission import ServedModel  # noqa: E402
from target_service.assembly import Assembled  # noqa: E402
from target_service.config import TargetConfig  # noqa: E402
from target_service.core.events import EngineSnapshot, Sequences  # noqa: E402
from target_service.core.sequence import SequenceEvent, SequenceRequest, StepVerdict  # noqa: E402
from target_service.engine_process.client import EngineLink  # noqa: E402
from target_service.engine_process.messages import Report, pack, unpack  # noqa: E402
from target_service.engine_process.server import Reporter, serve_engine  # noqa: E402
from target_service.text.tokenizer import ModelTokenizer  # noqa: E402

STREAMS = (1, 8, 32, 64)
STEP_MS = (1, 2)
# One phase for each number of streams, at the same time in every client.
START, WARM, MEASURED, PAUSE = 2.5, 0.3, 0.9, 0.3
PHASE = WARM + MEASURED + PAUSE
# Arguments of Python for the processes that this script starts.
_SCRIPT = ("-m", "benchmarks.engine.engine_process")


class SharedHost:
    """The engine in the server's process."""

    def __init__(self, engine: SteppingEngine) -> None:
        self._engine = engine

    async def load(self) -> ServedModel:
        return replace(SERVED, tokenizer=model_tokenizer())

    async def engine(self, _observer: Any) -> SteppingEngine:
        return self._engine

    async def start(self, sequences: Sequences) -> None:
        self._engine.start(sequences.deliver)

    async def stop(self) -> None:
        await asyncio.to_thread(self._engine.stop)


def model_tokenizer() -> ModelTokenizer:
    """A tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: 3 + place for place, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={"<a>": 0, "<b>": 1, "<c>": 2} | vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return ModelTokenizer(tokenizer)


def step_seconds(config: TargetConfig) -> float:
    """The step time, which is passed to the engine's process as the model's name."""
    return float(config.served_model_name) / 1e3


def assembled(config: TargetConfig, observer: Reporter) -> Assembled:
    """A `SteppingEngine`, which has all that the engine's process uses."""
    return cast(Assembled, SteppingEngine(step_seconds(config), observer))


def serve(arrangement: str, step_ms: float, port: int) -> int:
    """Serve until SIGTERM."""
    from target_service.lifecycle import serve_engine as serve_target

    config = TargetConfig(
        listen=f"127.0.0.1:{port}", served_model_name=str(step_ms), drain_seconds=1.0, log_level="warning"
    )
    if arrangement == "shared":
        return run(serve_target(config, SharedHost(SteppingEngine(step_seconds(config)))))
    link = EngineLink(config, (sys.executable, *_SCRIPT, "--engine"), model_tokenizer)
    return run(serve_target(config, link))


async def read(port: int, shares: list[int], start: float) -> list[list[float]]:
    """Tokens and chunks a second in each phase, over this client's share of the streams."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        found = []
        for place, share in enumerate(shares):
            begin = start + place * PHASE
            await asyncio.sleep(begin - time.monotonic())
            counts = [0, 0]
            window = (begin + WARM, begin + WARM + MEASURED)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(window[1] - time.monotonic()):
                    await asyncio.gather(*(follow(stub, counts, window[0]) for _ in range(share)))
            found.append([count / MEASURED for count in counts])
        return found


async def follow(stub: Any, counts: list[int], begin: float) -> None:
    """Read one stream until cancelled. Add tokens and chunks that arrive after `begin` to `counts`."""
    request = target_pb2.GenerateRequest(
        tokens=target_pb2.TokenInput(token_ids=[5]),
        sampling=tree_pb2.SamplingParameters(max_tokens=10**6, ignore_eos=True),
    )
    call = stub.Generate(request)
    try:
        async for response in call:
            if time.monotonic() >= begin:
                counts[0] += len(response.chunk.token_ids)
                counts[1] += 1
    finally:
        call.cancel()


def measure(arrangement: str, step_ms: float, clients: int) -> list[dict[str, Any]]:
    """Start a server and its clients, and sum what the clients received."""
    port = free_port()
    with process(*_SCRIPT, "--serve", arrangement, str(step_ms), str(port)) as server:
        wait_for(f"127.0.0.1:{port}", server)
        command = [sys.executable, *_SCRIPT, "--read", str(port), str(time.monotonic() + START)]
        readers = [
            subprocess.Popen(
                [*command, *(str((n + place) // clients) for n in STREAMS)],
                stdout=subprocess.PIPE,
            )
            for place in range(clients)
        ]
        found = [json.loads(reader.communicate()[0]) for reader in readers]
    rows = []
    for place, streams in enumerate(STREAMS):
        tokens, chunks = (sum(one[place][kind] for one in found) for kind in (0, 1))
        row = {"engine": arrangement, "step_ms": step_ms, "streams": streams, "tokens_per_s": round(tokens)}
        rows.append(row | {"steps_per_s": round(tokens / streams), "chunks_per_s": round(chunks)})
        show("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    return rows


def alone(step_ms: float) -> float:
    """Steps a second of an engine without a server, which the others are compared with."""
    engine = SteppingEngine(step_ms / 1e3)
    for _ in range(64):
        engine.submit(SequenceRequest((5,), SamplingParams(), VerificationMode.GREEDY, 0, 1))
    engine.start(lambda _: None)
    time.sleep(1.0)
    engine.stop()
    return engine.steps / 1.0


def report_us() -> dict[str, float]:
    """Microseconds to encode and to decode the report of a step of 64 sequences."""
    verdicts: list[SequenceEvent] = [
        StepVerdict(1000 + i, 57, (), (31000 + i,), 0, (), None, 0, 10**6) for i in range(64)
    ]
    snapshot = EngineSnapshot(64, 0, 64, 9, 99, False, False)
    report = Report(verdicts, [STATS], [], [], [], snapshot, time.monotonic_ns())
    body = pack(report)[LENGTH_BYTES:]

    def least(work: Callable[[], object]) -> float:
        return round(min(timeit.repeat(work, number=200, repeat=7)) / 200 * 1e6, 1)

    return {"bytes": len(body), "write": least(lambda: pack(report)), "read": least(lambda: unpack(body))}


def main() -> int:
    parser = parser_of(__doc__)
    cores = os.cpu_count() or 1
    parser.add_argument("--clients", type=int, default=max(1, min(4, cores // 4)), help="client processes")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if options.engine is not None:
        return serve_engine(options.engine, assembled)
    if options.serve:
        return serve(options.serve[0], float(options.serve[1]), int(options.serve[2]))
    if options.read:
        port, start, *shares = options.read
        sys.stdout.write(json.dumps(run(read(int(port), list(map(int, shares)), float(start)))))
        return 0
    result = {
        "cores": cores,
        "clients": options.clients,
        "report_of_64_us": report_us(),
        "alone_steps_per_s": {str(step_ms): alone(step_ms) for step_ms in STEP_MS},
    }
    show(json.dumps(result))
    rows = [row for step in STEP_MS for kind in ("shared", "own") for row in measure(kind, step, options.clients)]
    write_json(options.json, result | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
