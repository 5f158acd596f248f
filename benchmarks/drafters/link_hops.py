"""Times of a commit's hops to a draft service and of the growth's back, for one request with idle time in between.

    python -m benchmarks.drafters.link_hops [--links process thread] [--early-ms 1 --whole-ms 2] [--json FILE]

One sequence advances by three tokens with the hidden states that a head of 8B size reads (24 KB), once every
`--pace-ms`, as an engine does whose pass takes that long. The draft service has its own process; its drafter
(`stamping`) computes nothing, and its trees of 239 nodes contain the times at which it got the commit and drew them.
All clocks are the machine's monotonic one. Two times each way:

- sent -> taken in: from the engine's call to the drafter's thread, which has parsed the frame and read its features;
- drawn -> received: from the trees' arrays, which are packed next, to the receiver of growth in the engine's process.

With `--busy` the engine's thread computes in Python meanwhile, and the receiver has to wait for the interpreter. With
`--early-ms` the first levels are sent before the whole trees. Both processes poll for `--busy-poll-ms` after each
frame; with 0, or fewer than 8 cores, they sleep.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from benchmarks.drafters.stamping import NODES, WIDTH, times_in
from benchmarks.shared.processes import process
from benchmarks.shared.report import parser_of, percentile, settings_of, show, write_json
from outrider.runtime import prepare_grpc, switch_threads_often

# Before anything imports gRPC, as in the services.
prepare_grpc()
switch_threads_often()

from benchmarks.drafters.link_events import VOCABULARY_SIZE, LinkEvents, open_sequence  # noqa: E402
from outrider.busy_polling import BUSY_POLL_SECONDS, usable_cores  # noqa: E402
from outrider.drafting.link import GrpcDraftLink, LinkOptions  # noqa: E402
from outrider.drafting.link_process import LinkProcess  # noqa: E402
from outrider.ports import free_port  # noqa: E402
from outrider.wire.frames import (  # noqa: E402
    SequenceAdvance,
    SequenceFeatures,
    SequenceGrowth,
    StoppableLink,
    Vectors,
)

WARM_UP = 50
PROMPT_TOKENS = 64
TOKENS = 3
LINKS: dict[str, Callable[..., StoppableLink]] = {"thread": GrpcDraftLink, "process": LinkProcess}


@dataclass(frozen=True)
class Hop:
    """Microseconds of one hop, over `n` commits."""

    link: str
    transport: str
    hop: str
    n: int
    p50: float
    p90: float
    p99: float


class HopReceiver(LinkEvents):
    """Receives each growth of the newest step, with its time."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = threading.Event()
        self.growths: list[tuple[int, SequenceGrowth]] = []

    def grow(self, growths: Sequence[SequenceGrowth]) -> None:
        now = time.monotonic_ns()
        self.growths.extend((now, growth) for growth in growths)
        if len(growths[-1].token_ids) == NODES:
            self.whole.set()


def vectors(count: int) -> Vectors:
    return Vectors("bfloat16", WIDTH, bytes(count * WIDTH * 2))


def measure(link: StoppableLink, receiver: HopReceiver, options: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of each hop, by its name."""
    hops: dict[str, list[float]] = {}
    open_sequence(link, 1, PROMPT_TOKENS)
    link.send_features([SequenceFeatures(1, 0, vectors(PROMPT_TOKENS - 1))])
    time.sleep(0.5)
    features = vectors(TOKENS)
    for step in range(1, WARM_UP + options.rounds + 1):
        receiver.growths.clear()
        receiver.whole.clear()
        advance = SequenceAdvance(1, step, tuple(step * each % 997 for each in range(1, TOKENS + 1)), features)
        sent = time.monotonic_ns()
        link.advance([advance])
        while options.busy and not receiver.whole.is_set() and time.monotonic_ns() - sent < 10e9:
            pass
        if not receiver.whole.wait(10.0):
            receiver.give_up()
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
    receiver = HopReceiver()
    service = ["-m", "draft_service", "--listen", address, "--log-level", "warning"]
    service += ["--drafter", "benchmarks.drafters.stamping:Stamping", "--busy-poll-ms", str(options.busy_poll_ms)]
    times = ["--early-ms", str(options.early_ms), "--whole-ms", str(options.whole_ms)]
    with process(*service, *times):
        link = LINKS[name](
            address, receiver, VOCABULARY_SIZE, "", LinkOptions(busy_poll_seconds=options.busy_poll_ms / 1e3)
        )
        try:
            receiver.wait_for_draft()
            hops = measure(link, receiver, options)
        finally:
            link.stop()
    rows = []
    for hop, microseconds in sorted(hops.items()):
        quantiles = (round(percentile(microseconds, share), 1) for share in (0.5, 0.9, 0.99))
        rows.append(Hop(name, transport, hop, len(microseconds), *quantiles))
    return rows


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
        addresses = {"tcp": f"127.0.0.1:{free_port()}", "unix": f"unix:{folder}/draft.sock"}
        for transport in options.transports:
            for name in options.links:
                for row in run_one(name, transport, addresses[transport], options):
                    rows.append(row)
                    show(f"{row}")
    machine = {"cores": usable_cores(), "python": platform.python_version(), "grpcio": version("grpcio")}
    write_json(options.json, {**machine, "settings": settings_of(options), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
