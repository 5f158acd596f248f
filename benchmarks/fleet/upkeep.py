"""What parts of a fleet cost each other while no request runs: a gateway that looks at a target's health, and the links
between targets and drafts.

    python -m benchmarks.fleet.upkeep [--targets 16] [--links 64] [--json FILE]

Processor time is that of all threads of a process. Target and draft are real services in processes of their own.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.shared.processes import process, processor_seconds, wait_for
from benchmarks.shared.report import parser_of, provenance, show, write_json
from outrider.runtime import prepare_grpc, run

prepare_grpc()

from benchmarks.drafters.link_events import VOCABULARY_SIZE, LinkEvents  # noqa: E402
from outrider.drafting.link import connect_draft  # noqa: E402
from outrider_client.client import Client  # noqa: E402
from outrider_gateway.targets import Target  # noqa: E402

_KEEP_ALIVE_SECONDS = 10.0


@dataclass(frozen=True)
class Checks:
    """Of one look at a target: whether it serves, and what. Microseconds of processor time, here and there."""

    gateway_us: float
    target_us: float


@dataclass(frozen=True)
class Links:
    """Of one link from a target to a draft, and of its stream at the draft: memory, and processor time of an idle one
    for each second, keep-alive included."""

    target_kib: float
    target_threads: float
    target_us_per_second: float
    draft_kib: float
    draft_us_per_second: float


class _Connected(LinkEvents):
    def grow(self, growths: object) -> None:
        raise SystemExit(f"growth without a sequence: {growths}")


async def checks(address: str, service: int, targets: int, rounds: int) -> Checks:
    """All targets are looked at together, as often as a gateway would, but without the pauses."""
    watched = [Target(Client.connect(address)) for _ in range(targets)]
    await asyncio.gather(*(target.check_health() for target in watched))
    own, others = time.process_time(), processor_seconds(service)
    for _ in range(rounds):
        await asyncio.gather(*(target.check_health() for target in watched))
    count = rounds * targets
    own, others = time.process_time() - own, processor_seconds(service) - others
    if not all(target.healthy for target in watched):
        raise SystemExit("the target is not healthy")
    for target in watched:
        await target.client.close()
    return Checks(round(own / count * 1e6, 1), round(others / count * 1e6, 1))


def links(address: str, draft: int, count: int) -> Links:
    """Connect so many links of this process to one draft service, and let them be."""
    here, there = psutil.Process(), psutil.Process(draft)
    events = [_Connected() for _ in range(count + 1)]
    first = connect_draft(address, events[0], VOCABULARY_SIZE, "")
    events[0].wait_for_draft()
    before, threads = (here.memory_info().rss, there.memory_info().rss), threading.active_count()
    made = [connect_draft(address, each, VOCABULARY_SIZE, "") for each in events[1:]]
    for each in events[1:]:
        each.wait_for_draft()
    time.sleep(1.0)
    after = here.memory_info().rss, there.memory_info().rss
    threads = threading.active_count() - threads
    own, others, began = time.process_time(), processor_seconds(draft), time.perf_counter()
    time.sleep(2 * _KEEP_ALIVE_SECONDS)
    seconds = count * (time.perf_counter() - began)
    own, others = time.process_time() - own, processor_seconds(draft) - others
    for link in (first, *made):
        link.stop()
    kib = [round((late - early) / 1024 / count, 1) for early, late in zip(before, after, strict=True)]
    rates = [round(each / seconds * 1e6, 2) for each in (own, others)]
    return Links(kib[0], round(threads / count, 2), rates[0], kib[1], rates[1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="which is not run")
    parser.add_argument("--targets", type=int, default=16, help="that one gateway looks at")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--links", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = (f"unix:{Path(folder) / name}.sock" for name in ("target", "draft"))
        flags = ("--log-level", "warning", "--listen")
        with (
            process("-m", "target_service", "--model", options.model, "--threads", "1", *flags, target) as served,
            process("-m", "draft_service", *flags, draft) as drafting,
        ):
            wait_for(target, served)
            wait_for(draft, drafting)
            looked = [run(checks(target, served.pid, options.targets, options.rounds)) for _ in range(options.repeats)]
            linked = [links(draft, drafting.pid, options.links)]
    for found in (*looked, *linked):
        show(f"{found}")
    middle = Checks(*(median(getattr(each, name) for each in looked) for name in ("gateway_us", "target_us")))
    figures = {"checks": list(map(asdict, looked)), "median": asdict(middle), "links": list(map(asdict, linked))}
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {**provenance("fleet.upkeep", ["grpcio"]), "settings": settings, **figures})


if __name__ == "__main__":
    main()
