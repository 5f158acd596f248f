"""The engine thread's time to keep hidden states and send them to a draft in another process. Needs no GPU.

    python -m benchmarks.engine.hidden_states [--steps N] [--sequences 1,8,32] [--json FILE]

States are 4,096 numbers wide in bfloat16, 8 KB each, as at 8B size, in the buffers used in turn that a GPU would write.
Two parts are timed, as the engine's loop calls them behind every pass: `collect` copies the states of committed rows,
`send_commits` sends them with the commits. Once the pass reads a prompt, else each sequence commits two tokens. The
other end is a process that reads and drops, as fast as it can. Takes half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from typing import cast

import torch

from benchmarks.drafters.link_events import LinkEvents
from benchmarks.shared.report import (
    comma_separated,
    median_and_spread,
    parser_of,
    provenance,
    record_table,
    settings_of,
    show,
    write_json,
)
from outrider.drafting import link_messages as messages
from outrider.drafting.events import Connected
from outrider.drafting.link_process import LinkProcess
from outrider.drafting.link_worker import ALIVE_SECONDS
from outrider.runtime import switch_threads_often
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo, FeatureRequest, SequenceGrowth, TreeLimits
from target_service.config import TargetConfig
from target_service.core.sequence import Sequence, SequenceRequest, SequenceTotals
from target_service.execution.batch import StepItem
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import Verified
from target_service.speculation.drafts import DraftTrees
from target_service.speculation.hidden_states.encoding import AHEAD_ROWS, StepFeatures
from target_service.speculation.hidden_states.sending import Features
from tree_kernels.verification import Walk

WIDTH = 4096
ROW_BYTES = 2 * WIDTH
VOCABULARY_SIZE = 128_256
# As many as the default of `--feature-window`.
KEEP = 512
# That passes are copied to in turn, as in `FeatureEncoder`.
BUFFERS = 3
# Tokens of each sequence before its first timed step: with as many states as are kept, no memory is new.
TEXT = 600
# Sequences whose prompts were read last and whose states are kept.
TOGETHER = 8
WARM_UP = 20
REQUEST = FeatureRequest((31,), WIDTH)
INFO = DraftInfo("eagle", VOCABULARY_SIZE, "", TreeLimits(), 1 << 20, "0", REQUEST)


@dataclass(frozen=True)
class HiddenStateFigure:
    """Microseconds of the engine's thread for one kind of step, over `n` of them: medians, distances between quartiles,
    and the longest. `send_commits` includes no wait for the reader."""

    step: str
    rows: int
    n: int
    collect_us: float
    collect_spread: float
    collect_max: float
    advance_us: float
    advance_spread: float
    advance_max: float


class Done:
    """The event of a copy that has ended."""

    def record(self) -> None:
        """Nothing: the copy has no stream."""

    def synchronize(self) -> None:
        """Return at once."""


class RunnerWithoutModel:
    """What hidden states need of a model's runner."""

    hidden_size = WIDTH
    device = torch.device("cpu")
    draft_head = None
    hooks = object()

    def hook(self, layers: tuple[int, ...]) -> None:
        """Nothing: the states are made up."""


class FeatureReceiver(LinkEvents):
    """Receives the events of a link whose draft sends no growth."""

    def grow(self, growths: SequenceOf[SequenceGrowth]) -> None:
        raise AssertionError(f"the reader only reads, and {len(growths)} growths came")


class EngineWithoutModel:
    """What an engine's loop has of sequences, drafts and hidden states, without a model."""

    def __init__(self, link: LinkProcess, drafting: DraftTrees) -> None:
        """Connect `link` to `drafting`."""
        self._drafting, self._last_id, self._turn = drafting, 0, 0
        self._hosts = [torch.zeros(AHEAD_ROWS, ROW_BYTES, dtype=torch.uint8) for _ in range(BUFFERS)]
        drafting.attach(link)
        drafting.receive(Connected(INFO))
        drafting.listen()

    def add(self, tokens: int) -> Sequence:
        """A sequence with a prompt of so many tokens, open at the draft."""
        self._last_id += 1
        prompt = tuple(range(5, 5 + tokens))
        request = SequenceRequest(prompt, SamplingParams(), VerificationMode.GREEDY, 0, 10**6)
        sequence = Sequence(self._last_id, request, list(prompt), SequenceTotals())
        self._drafting.add(sequence)
        self._drafting.open_added()
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Drop the sequence, here and at the draft."""
        self._drafting.remove(sequence.sequence_id)

    def step(self, sequences: Iterable[Sequence], known: int, accepted: int) -> tuple[float, float]:
        """Read `known` tokens of each sequence and accept so many drafted rows. Returns the microseconds of `collect`
        and `send_commits`."""
        items, outcomes, commits, row = [], [], [], 0
        tree = TokenTree((0, *range(accepted)), (0, *range(accepted)), (1.0,) * (accepted + 1), {})
        for sequence in sequences:
            start = len(sequence.token_ids) - known
            items.append(StepItem(sequence, start, known, tree, row + known - 1, 0, 0))
            outcomes.append(Verified(Walk(tuple(range(1, accepted + 1)), 7), ()))
            sequence.token_ids += [7] * (accepted + 1)
            sequence.step += 1
            commits.append((sequence, accepted + 1))
            row += known + accepted
        self._turn = (self._turn + 1) % BUFFERS
        host = self._hosts[self._turn]
        host[:row].copy_(torch.full_like(host[:row], self._turn))
        states = StepFeatures(None, "bfloat16", None, host[:row].numpy(), cast(torch.cuda.Event, Done()))
        begin = time.perf_counter_ns()
        self._drafting.collect(items, states, outcomes)
        between = time.perf_counter_ns()
        self._drafting.send_commits(commits)
        return (between - begin) / 1e3, (time.perf_counter_ns() - between) / 1e3


def figure(step: str, rows: int, times: list[tuple[float, float]]) -> HiddenStateFigure:
    """The figure of the times of both parts behind the warm-up."""
    parts = []
    for part in zip(*times[WARM_UP:], strict=True):
        parts += [*(round(value, 1) for value in median_and_spread(part)), round(max(part), 1)]
    return HiddenStateFigure(step, rows, len(times) - WARM_UP, *parts)


def prompts(engine: EngineWithoutModel, tokens: int, count: int, pause: float) -> HiddenStateFigure:
    """Steps that read one prompt each, of which the link's process has read everything before the next."""
    times: list[tuple[float, float]] = []
    going: deque[Sequence] = deque()
    for _ in range(WARM_UP + count):
        going.append(engine.add(tokens))
        times.append(engine.step([going[-1]], tokens, 0))
        # Memory of ended sequences is used again, as in an engine with many.
        if len(going) > TOGETHER:
            engine.remove(going.popleft())
        wait(pause)
    for sequence in going:
        engine.remove(sequence)
    return figure("prompt", tokens, times)


def steps(engine: EngineWithoutModel, sequences: int, count: int, pause: float) -> HiddenStateFigure:
    """Steps of so many sequences, each of which commits two tokens."""
    going = [engine.add(TEXT) for _ in range(sequences)]
    for sequence in going:
        engine.step([sequence], TEXT, 0)
    times = []
    for _ in range(WARM_UP + count):
        wait(pause)
        times.append(engine.step(going, 1, 1))
    for sequence in going:
        engine.remove(sequence)
    return figure(f"{sequences} sequences", 2 * sequences, times)


def wait(seconds: float) -> None:
    """Poll, as a thread that waits for a device does: behind a sleep, all code takes about twice as long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0)


def drain(descriptor: int) -> None:
    """Be a link's process whose draft is connected at once: read and drop until the socket closes."""
    connection, buffer, alive = socket.socket(fileno=descriptor), bytearray(1 << 18), time.monotonic()
    connection.sendall(b"".join(messages.pack(Connected(INFO))))
    while True:
        if time.monotonic() > alive + ALIVE_SECONDS:
            alive = time.monotonic()
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"".join(messages.pack(messages.Alive())))
        if select.select([connection], [], [], ALIVE_SECONDS)[0] and not connection.recv_into(buffer):
            return


def measure(options: argparse.Namespace) -> list[HiddenStateFigure]:
    """All figures, over one link."""
    features = Features(cast(ModelRunner, RunnerWithoutModel()), KEEP)
    config = TargetConfig(
        draft="the link", speculative_disable_queue_size=10**6, draft_wait_ms=0.0, draft_failures_to_open=1
    )
    drafting = DraftTrees(config, VOCABULARY_SIZE, features)
    receiver = FeatureReceiver()
    command = (sys.executable, "-m", "benchmarks.engine.hidden_states", "--drain")
    link = LinkProcess("", receiver, VOCABULARY_SIZE, "", command=command)
    try:
        receiver.wait_for_draft()
        engine = EngineWithoutModel(link, drafting)
        figures = [prompts(engine, options.prompt, options.prompts, options.prompt_pause_ms / 1e3)]
        figures += [steps(engine, each, options.steps, options.pause_ms / 1e3) for each in options.sequences]
    finally:
        link.stop()
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompt", type=int, default=674, help="rows of the steps that read a prompt")
    parser.add_argument("--prompts", type=int, default=200, help="steps that read a prompt")
    parser.add_argument("--sequences", type=comma_separated(int), default=[1, 8, 32], help="one kind of step for each")
    parser.add_argument("--steps", type=int, default=600, help="steps of each number of sequences")
    parser.add_argument("--pause-ms", type=float, default=6.0, help="between two steps, as a pass on a device takes")
    parser.add_argument("--prompt-pause-ms", type=float, default=25.0, help="between two prompts")
    parser.add_argument("--drain", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drain is not None:
        drain(options.drain)
        return
    # As in the engine's process.
    switch_threads_often()
    figures = [asdict(one) for one in measure(options)]
    show(record_table(figures))
    write_json(
        options.json,
        {**provenance("engine.hidden_states"), "settings": settings_of(options, ("drain",)), "figures": figures},
    )


if __name__ == "__main__":
    main()
