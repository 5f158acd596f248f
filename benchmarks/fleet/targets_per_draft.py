"""How many targets a draft service serves: simulated targets commit real text at a model's pace, and count the answers
that come too late for their next pass.

    python -m benchmarks.fleet.targets_per_draft [--targets 1,2,4,8] [--loads 1:4.52,8:5.2,32:6.7] [--json FILE]

The draft service is real and runs in its own process, on one core; the targets share this process, on another core. A
target has one stream and some sequences, commits at every step of the given length whether or not the draft keeps up,
as an engine that runs ahead does, and ends each answer after some hundred tokens for another with a prompt of its own.
An answer is in time if it arrives within the time of a step behind its commit. `--answer-ms` puts a drafter in place
of the trie that takes so long for so many sequences of one call, without using a core: a head on a GPU, by measured
times.

A late answer costs the drafted tokens of one pass, so the share of answers that are late beside other targets, and
would not be for one target alone, bounds from above what sharing the draft costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from benchmarks.drafters.trie import corpus
from benchmarks.shared.processes import process, processor_seconds, wait_for
from benchmarks.shared.report import comma_separated, parser_of, percentile, provenance, show, write_json
from outrider.runtime import prepare_grpc, run

prepare_grpc()

import grpc  # noqa: E402

from outrider.drafting.events import DraftEvent, Grown, Opened  # noqa: E402
from outrider.drafting.stream import DraftConversation  # noqa: E402
from outrider.sampling import SamplingParams, VerificationMode  # noqa: E402
from outrider.v1 import draft_pb2_grpc  # noqa: E402
from outrider.wire.frames import OpenSequence, SequenceAdvance, TreeLimits  # noqa: E402

VOCABULARY_SIZE = 49_152
PROMPT_TOKENS, ANSWER_TOKENS = 256, 512
# Tokens of a step: 2.4 on average, as the yardstick's head and trie bring at 8B cost.
STEP_TOKENS = (1, 1, 2, 2, 3, 3, 3, 4)
_WARM_SECONDS = 2.0


@dataclass
class CommitOutcomes:
    """What became of the commits of one run."""

    expected: int = 0
    milliseconds: list[float] = field(default_factory=list)
    # How much later than its time a step began: the simulator's own fault.
    lags: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SharedDraftRun:
    """One run. Latencies are from a commit to its answer; `draft_cpu_us` is the draft's processor time for each answer,
    and `draft_share` of one core; `simulator_share` is this process's."""

    targets: int
    sequences: int
    step_ms: float
    seconds: float
    answers: int
    late_share: float
    p50_ms: float
    p99_ms: float
    draft_cpu_us: float
    draft_share: float
    simulator_share: float
    lag_p99_ms: float
    load_average: float


class SimulatedTarget:
    """A target without a model."""

    def __init__(self, number: int, sequences: int, text: np.ndarray, answers: CommitOutcomes) -> None:
        self._number, self._text, self._answers = number, text, answers
        self._coins = random.Random(number)
        self._conversation = DraftConversation(self, VOCABULARY_SIZE)
        self._ids = list(range(sequences))
        # By sequence: place in the text, tokens of the answer so far, step, and when unanswered commits were sent.
        self._places = [0] * sequences
        self._written = [0] * sequences
        self._steps = [0] * sequences
        self._sent: list[dict[int, float]] = [{} for _ in self._ids]
        self.measures = False

    def receive(self, event: DraftEvent) -> None:
        if isinstance(event, Opened):
            return
        if not isinstance(event, Grown):
            raise SystemExit(f"the draft refused a sequence: {event}")
        now = time.perf_counter()
        for growth in event.growths:
            # A tree for a later step stands for those of the steps before, which come no more.
            sent = self._sent[growth.sequence_id]
            for step in [step for step in sent if step <= growth.base_step]:
                at = sent.pop(step)
                if step == growth.base_step:
                    self._answers.milliseconds.append((now - at) * 1e3)

    async def commit(self, stub: Any, step: float, until: float) -> None:
        """Commit every `step` seconds until `until`, on the clock of `perf_counter`."""
        call = stub.Propose()
        reading = asyncio.create_task(self._read(call))
        # Targets are not in step with each other.
        due = time.perf_counter() + self._coins.random() * step
        try:
            for each in self._ids:
                self._open(each)
                # CommitOutcomes end at different times.
                self._written[each] = self._coins.randrange(ANSWER_TOKENS)
            await self._write(call)
            while due < until:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                now = time.perf_counter()
                if self.measures:
                    self._answers.lags.append((now - due) * 1e3)
                due += step
                self._step(now)
                await self._write(call)
        finally:
            reading.cancel()
            call.cancel()

    async def _read(self, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._conversation.receive(frame)

    async def _write(self, call: Any) -> None:
        while self._conversation.outgoing:
            await call.write(self._conversation.outgoing.popleft())

    def _step(self, now: float) -> None:
        """Count what has arrived for the last step, and commit another."""
        advances = []
        for each in self._ids:
            if self._written[each] >= ANSWER_TOKENS:
                self._conversation.close([each])
                self._open(each)
                continue
            count = self._coins.choice(STEP_TOKENS)
            self._steps[each] += 1
            advances.append(SequenceAdvance(each, self._steps[each], self._next(each, count)))
            self._written[each] += count
            if self.measures:
                self._answers.expected += 1
                self._sent[each][self._steps[each]] = now
        self._conversation.advance(advances)

    def _next(self, each: int, count: int) -> tuple[int, ...]:
        begin = self._places[each]
        self._places[each] += count
        return tuple(self._text[begin : begin + count].tolist())

    def _open(self, each: int) -> None:
        self._places[each] = self._coins.randrange(len(self._text) - PROMPT_TOKENS - 2 * ANSWER_TOKENS)
        self._written[each] = self._steps[each] = 0
        # A target that ends an answer does not wait for its last tree.
        self._answers.expected -= len(self._sent[each])
        self._sent[each].clear()
        self._conversation.open(
            OpenSequence(
                sequence_id=each,
                token_ids=self._next(each, PROMPT_TOKENS),
                prompt_length=PROMPT_TOKENS,
                step=0,
                seed=each,
                mode=VerificationMode.GREEDY,
                sampling=SamplingParams(),
                limits=TreeLimits(),
                vocabulary_size=VOCABULARY_SIZE,
                tenant=f"target-{self._number}",
            )
        )


async def simulate(
    address: str, draft: int, targets: int, sequences: int, step_ms: float, seconds: float, text: np.ndarray
) -> SharedDraftRun:
    """One run against the draft service of process `draft`."""
    answers, step = CommitOutcomes(), step_ms / 1e3
    simulated = [SimulatedTarget(number, sequences, text, answers) for number in range(targets)]
    until = time.perf_counter() + _WARM_SECONDS + seconds
    channels = [grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in simulated]
    pairs = zip(simulated, channels, strict=True)
    tasks = [
        asyncio.create_task(each.commit(draft_pb2_grpc.DraftServiceStub(channel), step, until))
        for each, channel in pairs
    ]
    await asyncio.sleep(_WARM_SECONDS)
    began, own, others = time.perf_counter(), time.process_time(), processor_seconds(draft)
    for each in simulated:
        each.measures = True
    await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    own, others = time.process_time() - own, processor_seconds(draft) - others
    for channel in channels:
        await channel.close()
    count = len(answers.milliseconds)
    if not count:
        raise SystemExit("the draft answered nothing")
    in_time = sum(each <= step_ms for each in answers.milliseconds)
    return SharedDraftRun(
        targets=targets,
        sequences=sequences,
        step_ms=step_ms,
        seconds=round(took, 2),
        answers=count,
        late_share=round(1.0 - in_time / answers.expected, 4),
        p50_ms=round(percentile(answers.milliseconds, 0.5), 2),
        p99_ms=round(percentile(answers.milliseconds, 0.99), 2),
        draft_cpu_us=round(others / count * 1e6, 1),
        draft_share=round(others / took, 3),
        simulator_share=round(own / took, 3),
        lag_p99_ms=round(percentile(answers.lags or [0.0], 0.99), 2),
        load_average=round(os.getloadavg()[0], 2),
    )


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run the block, and the processes that it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def loads(text: str) -> dict[int, float]:
    """A table of numbers by sequences: SEQUENCES:NUMBER, with commas between."""
    pairs = (part.partition(":") for part in text.split(","))
    return {int(sequences): float(number) for sequences, _, number in pairs}


def summary(rows: Sequence[SharedDraftRun], most_lost: float) -> list[str]:
    """A table: the runs of each load and number of targets, and the most targets that lose little by sharing."""
    titles = ("sequences", "step ms", "targets", "late", "p50 ms", "p99 ms", "draft us/answer", "of a core")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    groups: dict[tuple[int, float, int], list[SharedDraftRun]] = {}
    for row in rows:
        groups.setdefault((row.sequences, row.step_ms, row.targets), []).append(row)
    best: dict[int, int] = {}
    alone: dict[int, float] = {}
    for (sequences, step_ms, targets), runs in groups.items():
        late = median(run.late_share for run in runs)
        if late - alone.setdefault(sequences, late) <= most_lost:
            best[sequences] = max(best.get(sequences, 0), targets)
        middle = [median(getattr(run, name) for run in runs) for name in ("p50_ms", "p99_ms", "draft_cpu_us")]
        share = median(run.draft_share for run in runs)
        lines.append(
            f"| {sequences} | {step_ms} | {targets} | {late:.1%} "
            f"({min(run.late_share for run in runs):.1%} to {max(run.late_share for run in runs):.1%}) | "
            + " | ".join(f"{value:.2f}" for value in middle)
            + f" | {share:.2f} |"
        )
    return [
        *lines,
        *(f"{sequences} sequences: at most {targets} targets, of those tried" for sequences, targets in best.items()),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--targets", type=comma_separated(int), default=[1, 2, 4, 8, 16])
    parser.add_argument("--loads", type=loads, default={1: 4.52, 8: 5.2, 32: 6.7}, help="SEQUENCES:STEP_MS,...")
    parser.add_argument("--answer-ms", default="", help="SEQUENCES:MS,... of a drafter on a device; a trie when empty")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-lost", type=float, default=0.05, help="share of answers that sharing may make late")
    options = parser.parse_args()
    text = corpus(200_000)
    rows: list[SharedDraftRun] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            for sequences, step_ms in options.loads.items():
                for targets in options.targets:
                    row = _one(folder, targets, sequences, step_ms, text, options)
                    rows.append(row)
                    show(f"{row}")
                    if row.late_share > 0.5:
                        # More are later still.
                        break
    for line in summary(rows, options.most_lost):
        show(line)
    settings = {"answer_ms": options.answer_ms, "step_tokens": STEP_TOKENS, "answer_tokens": ANSWER_TOKENS}
    write_json(
        options.json,
        {**provenance("fleet.targets_per_draft", ["grpcio", "numba"]), **settings, "rows": list(map(asdict, rows))},
    )


def _one(
    folder: str, targets: int, sequences: int, step_ms: float, text: np.ndarray, options: argparse.Namespace
) -> SharedDraftRun:
    """A run with a draft service of its own: a trie that has read nothing."""
    address = f"unix:{folder}/draft.sock"
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    drafter = "benchmarks.fleet.timed_drafter:TimedDrafter" if options.answer_ms else "trie"
    flags = ["--listen", address, "--drafter", drafter, "--log-level", "warning", "--max-sequences", "16384"]
    environment = {"OUTRIDER_TIMED_ANSWER_MS": options.answer_ms}
    with on_core(last), process("-m", "draft_service", *flags, environment=environment) as draft:
        os.sched_setaffinity(0, {first})
        wait_for(address, draft)
        return run(simulate(address, draft.pid, targets, sequences, step_ms, options.seconds, text))


if __name__ == "__main__":
    main()
