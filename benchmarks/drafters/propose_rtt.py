"""Round trip of one engine step through the draft link: advance out, growth back, as the engine sees it.

    python -m benchmarks.drafters.propose_rtt [--drafter NAME] [--sequences 1 8] [--rounds 3000] [--json FILE]

The draft service runs in a separate process; the link runs in a thread of this one, as in a target. Between two
steps the caller sleeps for `--step-ms`, as long as an engine would be busy, so that caches and cores are not hot.
With `--busy-ms` it computes in Python for that time after sending a step, as an engine does that delivers tokens while
the draft works: link and engine share an interpreter. CPU time is that of all threads of a process; of the
draft's, those that have not ended.
`GRPC_EXPERIMENTS= python -m benchmarks.drafters.propose_rtt` measures gRPC with the poller that our entry points turn
off.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version

from benchmarks.shared.processes import process, processor_seconds
from benchmarks.shared.report import parser_of, percentile, show, write_json
from outrider.runtime import prepare_grpc, switch_threads_often

# Before anything imports gRPC, as in the services.
prepare_grpc()
switch_threads_often()

from benchmarks.drafters.link_events import VOCABULARY_SIZE, LinkEvents, open_sequence  # noqa: E402
from outrider.drafting.link import connect_draft  # noqa: E402
from outrider.ports import free_port  # noqa: E402
from outrider.wire.frames import SequenceAdvance, SequenceGrowth, StoppableLink  # noqa: E402

PROMPT_TOKENS = 256
WARM_UP = 200


@dataclass(frozen=True)
class Row:
    """Microseconds from the engine's call to the delivery of the last growth of a step.

    `target_cpu` and `draft_cpu` are microseconds of processor time for each step, of this process (link and caller) and
    of the draft service; the draft's is 0 where it runs in this process.
    """

    transport: str
    sequences: int
    rounds: int
    nodes: float
    p50: float
    p90: float
    p99: float
    target_cpu: float
    draft_cpu: float


class Waiter(LinkEvents):
    """Counts growth, and waits for the growths of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = 0
        self._answered = threading.Semaphore(0)

    def grow(self, growths: Sequence[SequenceGrowth]) -> None:
        self.nodes += sum(len(growth.token_ids) for growth in growths)
        self._answered.release(len(growths))

    def wait(self, answers: int) -> None:
        for _ in range(answers):
            if not self._answered.acquire(timeout=10):
                self.give_up()


def draft_seconds(pid: int | None) -> float:
    return processor_seconds(pid) if pid is not None else 0.0


def measure(
    link: StoppableLink,
    waiter: Waiter,
    transport: str,
    sequences: int,
    draft: int | None,
    options: argparse.Namespace,
) -> Row:
    """Time `options.rounds` steps of `sequences` sequences; `draft` is the id of the service's process."""
    ids, rounds = range(1, sequences + 1), options.rounds
    for sequence_id in ids:
        open_sequence(link, sequence_id, PROMPT_TOKENS)
    waiter.wait(sequences)
    waiter.nodes = 0
    times: list[float] = []
    for step in range(1, WARM_UP + rounds + 1):
        if step == WARM_UP + 1:
            own, drafts = time.process_time(), draft_seconds(draft)
        advances = [SequenceAdvance(each, step, (step % 997, step * 7919 % 997)) for each in ids]
        begin = time.perf_counter()
        link.advance(advances)
        while time.perf_counter() - begin < options.busy_ms / 1000:
            pass
        waiter.wait(sequences)
        times.append(time.perf_counter() - begin)
        time.sleep(options.step_ms / 1000)
    target_cpu, draft_cpu = time.process_time() - own, draft_seconds(draft) - drafts
    link.close(list(ids))
    p50, p90, p99 = (round(percentile(times[WARM_UP:], share) * 1e6, 1) for share in (0.5, 0.9, 0.99))
    nodes = round(waiter.nodes / (WARM_UP + rounds) / sequences, 1)
    per_step = [round(seconds / rounds * 1e6, 1) for seconds in (target_cpu, draft_cpu)]
    return Row(transport, sequences, rounds, nodes, p50, p90, p99, *per_step)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--drafter", default="trie")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--transports", nargs="+", default=["unix", "tcp", "inprocess"])
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--busy-ms", type=float, default=0.0)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        transports = {
            "unix": f"unix:{folder}/draft.sock",
            "tcp": f"127.0.0.1:{free_port()}",
            "inprocess": f"inprocess:{options.drafter}",
        }
        for transport in options.transports:
            address = transports[transport]
            for sequences in options.sequences:
                rows.append(run_one(transport, address, sequences, options))
                show(f"{rows[-1]}")
    result = {"grpcio": version("grpcio"), "drafter": options.drafter, "rows": [asdict(row) for row in rows]}
    write_json(options.json, result)


def run_one(transport: str, address: str, sequences: int, options: argparse.Namespace) -> Row:
    waiter = Waiter()
    arguments = ["-m", "draft_service", "--listen", address, "--drafter", options.drafter, "--log-level", "warning"]
    with nullcontext() if transport == "inprocess" else process(*arguments) as draft:
        link = connect_draft(address, waiter, VOCABULARY_SIZE, "")
        waiter.wait_for_draft()
        row = measure(link, waiter, transport, sequences, draft.pid if draft else None, options)
        link.stop()
    return row


if __name__ == "__main__":
    main()
