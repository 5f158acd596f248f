"""The hops of a commit to a draft service and of its growth back, as one request meets them: with idle time between.

    python -m benchmarks.drafters.link_hops [--links process thread] [--early-ms 1 --whole-ms 2] [--json FILE]

One sequence advances by three tokens with the hidden states that a head of 8B size reads (24 KB), once every
`--pace-ms`, as an engine does whose pass takes that long. The draft service is a process of its own; its drafter
(`stamping`) computes nothing, and its trees of 239 nodes carry the times at which it got the commit and had drawn them.
All clocks are the machine's monotonic one. Two times each way:

- sent -> taken in: from the engine's call to the drafter's thread, which has the frame parsed and its features read;
- drawn -> received: from the trees' arrays, packed behind that, to the receiver of growth in the engine's process.

With `--busy` the engine's thread computes in Python meanwhile, and the receiver has to ask it for the interpreter. With
`--early-ms` the first levels are sent before the whole trees. Both processes poll for `--busy-poll-ms`
after each frame; with 0, or fewer than 8 cores, they sleep.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version

from benchmarks.drafters.stamping import NODES, VOCABULARY_SIZE, WIDTH, times_in
from benchmarks.shared.report import parser_of, settings_of, write_json
from outrider.runtime import prepare_grpc, switch_threads_often

# Before anything imports gRPC, as in the services.
prepare_grpc()
switch_threads_often()

from outrider.busy_polling import BUSY_POLL_SECONDS, usable_cores  # noqa: E402
from outrider.drafting.link import GrpcDraftLink, LinkOptions  # noqa: E402
from outrider.drafting.link_process import LinkProcess  # noqa: E402
from outrider.sampling import SamplingParams, VerificationMode  # noqa: E402
from outrider.wire.frames import (  # noqa: E402
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceFailure,
    SequenceFeatures,
    SequenceGrowth,
    StoppableLink,
    TreeLimits,
    Vectors,
)

WARM_UP = 50
PROMPT_TOKENS = 64
TOKENS = 3
PORT = 50_953
LINKS: dict[str, Callable[..., StoppableLink]] = {"thread": GrpcDraftLink, "process": LinkProcess}


@dataclass(frozen=True)
class Hop:
    """Microseconds of one way, over so many commits."""

    link: str
    transport: str
    hop: str
    n: int
    p50: float
    p90: float
    p99: float


class Receiver:
    """Events of a link: each growth of the newest step, and when it came."""

    def __init__(self) -> None:
        self.connected, self.whole = threading.Event(), threading.Event()
        self.growths: list[tuple[int, SequenceGrowth]] = []

    def on_growth(self, growths: Sequence[SequenceGrowth]) -> None:
        now = time.monotonic_ns()
        self.growths.extend((now, growth) for growth in growths)
        if len(growths[-1].token_ids) == NODES:
            self.whole.set()

    def on_failure(self, failure: SequenceFailure) -> None:
        raise SystemExit(f"the draft failed: {failure.message}")

    def on_connected(self, _info: DraftInfo) -> None:
        self.connected.set()

    def on_disconnected(self, reason: str) -> None:
        sys.stderr.write(f"no draft: {reason}\n")

    def on_lost(self, _sequence_ids: Sequence[int]) -> None:
        raise SystemExit("the draft is lost")


@contextmanager
def service(address: str, options: argparse.Namespace) -> Iterator[int]:
    """A draft service of the stamping drafter in a process of its own; its id."""
    command = [sys.executable, "-m", "draft_service", "--listen", address, "--log-level", "warning"]
    drafter = ["--drafter", "benchmarks.drafters.stamping:Stamping"]
    times = ["--early-ms", str(options.early_ms), "--whole-ms", str(options.whole_ms)]
    polling = ["--busy-poll-ms", str(options.busy_poll_ms)]
    process = subprocess.Popen([*command, *drafter, *times, *polling])
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def open_one(link: StoppableLink) -> None:
    token_ids = tuple(i * 7919 % 997 for i in range(PROMPT_TOKENS))
    link.open(
        OpenSequence(
            sequence_id=1,
            token_ids=token_ids,
            prompt_length=PROMPT_TOKENS,
            step=0,
            seed=0,
            mode=VerificationMode.GREEDY,
            sampling=SamplingParams(),
            limits=TreeLimits(),
            vocabulary_size=VOCABULARY_SIZE,
        )
    )
    link.send_features([SequenceFeatures(1, 0, vectors(PROMPT_TOKENS - 1))])


def vectors(count: int) -> Vectors:
    return Vectors("bfloat16", WIDTH, bytes(count * WIDTH * 2))


def measure(link: StoppableLink, receiver: Receiver, options: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of each hop, by its name."""
    hops: dict[str, list[float]] = {}
    open_one(link)
    time.sleep(0.5)
    features = vectors(TOKENS)
    for step in range(1, WARM_UP + options.rounds + 1):
        receiver.growths.clear()
        receiver.whole.clear()
        advance = SequenceAdvance(1, step, tuple(step * each % 997 for each in range(1, TOKENS + 1)), features)
        sent = time.monotonic_ns()
        link.advance([advance])
        while options.busy and not receiver.whole.is_set():
            pass
        if not receiver.whole.wait(10.0):
            raise SystemExit("the draft does not answer")
        if step > WARM_UP:
            taken_in = 0
            for received, growth in receiver.growths:
                taken_in, drawn = times_in(growth.token_ids, 2)
                which = "whole" if len(growth.token_ids) == NODES else "early"
                hops.setdefault(f"{which}: drawn -> received", []).append((received - drawn) / 1e3)
                hops.setdefault(f"{which}: sent -> received", []).append((received - sent) / 1e3)
            hops.setdefault("sent -> taken in", []).append((taken_in - sent) / 1e3)
        time.sleep(max(0.0, options.pace_ms / 1e3 - (time.monotonic_ns() - sent) / 1e9))
    link.close([1])
    return hops


def run_one(name: str, transport: str, address: str, options: argparse.Namespace) -> list[Hop]:
    receiver = Receiver()
    with service(address, options):
        link = LINKS[name](
            address, receiver, VOCABULARY_SIZE, "", LinkOptions(busy_poll_seconds=options.busy_poll_ms / 1e3)
        )
        try:
            if not receiver.connected.wait(60.0):
                raise SystemExit("no draft service")
            hops = measure(link, receiver, options)
        finally:
            link.stop()
    return [Hop(name, transport, hop, len(times), *quantiles(times)) for hop, times in sorted(hops.items())]


def quantiles(times: Sequence[float]) -> list[float]:
    ordered = sorted(times)
    return [round(ordered[int(share * len(ordered))], 1) for share in (0.5, 0.9, 0.99)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--transports", nargs="+", choices=["tcp", "unix"], default=["tcp"])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--pace-ms", type=float, default=6.0)
    parser.add_argument("--early-ms", type=float, default=0.0)
    parser.add_argument("--whole-ms", type=float, default=0.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--busy-poll-ms", type=float, default=BUSY_POLL_SECONDS * 1e3)
    options = parser.parse_args()
    rows: list[Hop] = []
    with tempfile.TemporaryDirectory() as folder:
        addresses = {"tcp": f"127.0.0.1:{PORT}", "unix": f"unix:{folder}/draft.sock"}
        for transport in options.transports:
            for name in options.links:
                for row in run_one(name, transport, addresses[transport], options):
                    rows.append(row)
                    sys.stdout.write(f"{row}\n")
    machine = {"cores": usable_cores(), "python": platform.python_version(), "grpcio": version("grpcio")}
    write_json(options.json, {**machine, "settings": settings_of(options), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
