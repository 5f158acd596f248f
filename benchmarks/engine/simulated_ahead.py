"""The engine's default path on a GPU, with its policies, on a simulated device of a given speed: recorded texts, and a
head's trees for them, which arrive as late as those of a draft service.

    python -m benchmarks.running_ahead.simulate --folder /tmp/running_ahead
    python -m benchmarks.engine.simulated_ahead --folder /tmp/running_ahead [--pass-ms 60] [--json FILE]

Loop, scheduler, node tables and policies are the engine's own, and the rows of passes are chosen by the reference of
`NodeTable` in PyTorch. Only logits are replaced: the next token is the text's. A pass takes `--pass-ms`, and `--row-ms`
for each row, which should be ten times a GPU's times, since here the host also computes what a device would. A tree's
first levels and the whole tree arrive `--early` and `--whole` passes after the commit that they were drafted for, and
none do in the first `--opening` passes of a sequence. This shows without a GPU what the policies choose for real
texts, but not where the host is too slow. Each answer is decoded plain, with the device's lookup alone, with drafts,
and with worthless drafts, which are those of other texts.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.simulated_device import PAGE_SIZE, DeviceTimes, empty_runner
from benchmarks.running_ahead.drafts import HEAD, Drafts, HeadTreeShape, read_trees
from benchmarks.running_ahead.recording import Recording, read_recordings
from benchmarks.running_ahead.walk import Table
from benchmarks.shared.machine import describe
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from outrider.drafting.events import Connected, DraftEvents, Grown
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import DraftInfo, OpenSequence, SequenceAdvance, SequenceFeatures, SequenceGrowth, TreeLimits
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepStats, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.batch import StepBatch
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import Launched, LaunchedWhole, Ready
from target_service.execution.prompt_scores import ScoredPrompt
from target_service.model.cuda_graphs.sizes import row_sizes
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import SequenceVerifier, Verified

MODES = ("plain", "lookup", "drafted", "worthless")
_DRAFTED = ("drafted", "worthless")
# Tokens of a sequence in the cache.
_LONGEST_TEXT = 1 << 12
# The next token after the end of a text, and after a row that does not agree with it.
_END, _OTHER = 999, 998
_FIRST_TOKEN = 1000
# The trees of a drafter with captured graphs, and their first levels.
_WHOLE, _EARLY = HeadTreeShape(8, 16, 8, 239), HeadTreeShape(4, 16, 8, 239)


class RecordedTexts:
    """Recorded texts in a small vocabulary. The first token of each is its place among them, which no other has."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._ids: dict[int, int] = {}
        self.texts = [[place, *map(self.id_of, one.token_ids)] for place, one in enumerate(recordings)]
        self.prompts = [text[: 1 + one.prompt_length] for text, one in zip(self.texts, recordings, strict=True)]

    def id_of(self, token: int) -> int:
        """The id of a recorded token in the small vocabulary."""
        return self._ids.setdefault(token, _FIRST_TOKEN + len(self._ids))

    @property
    def vocabulary_size(self) -> int:
        return _FIRST_TOKEN + 1 + len(self._ids)

    def after(self, place: int, length: int) -> int:
        """The token that follows the first `length` ones of a text."""
        text = self.texts[place]
        return text[length] if length < len(text) else _END


class TextRunner(ModelRunner):
    """Logits whose likeliest token is the text's after rows that agree with it, and another after all others."""

    texts: RecordedTexts

    def compute_logits(
        self, batch: ForwardInput, token_ids: Tensor, rows: Sequence[int] | None, _recurrent: object = None
    ) -> Tensor:
        attention, tokens = batch.attention, token_ids.tolist()
        logits = torch.zeros(len(tokens), self.vocabulary_size)
        kept = self.cache.tokens
        for b, (first, end) in enumerate(itertools.pairwise(attention.query_starts)):
            prefix, tree = attention.prefix_lengths[b], attention.parents[b]
            if first == end:
                continue
            place = int(kept[attention.pages[b][0] * PAGE_SIZE]) if prefix else tokens[first]
            depths, agrees = [0], [True]
            for row in range(1, end - first):
                parent = row - 1 if tree is None else tree[row]
                depths.append(depths[parent] + 1)
                expected = self.texts.after(place, prefix + depths[row])
                agrees.append(agrees[parent] and tokens[first + row] == expected)
            for row in range(end - first):
                following = self.texts.after(place, prefix + depths[row] + 1) if agrees[row] else _OTHER
                logits[first + row, following] = 1.0
        return logits if rows is None else logits[list(rows)]


class _SimulatedStep(LaunchedWhole):
    """A step, which begins when those before it have ended; see `Launched`."""

    on_device = can_launch_before_results = True
    span: DeviceSpan | None = None

    def __init__(self, device: SimulatedDevice, batch: StepBatch, verifiers: Sequence[SequenceVerifier], passes: int):
        self._device, self.batch, self.verifiers, self.passes = device, batch, verifiers, passes
        self.launched: Launched | None = None
        self.ends_at = 0.0

    def ended(self) -> bool:
        """See `Launched.ended`."""
        return self.launched is not None and time.perf_counter() >= self.ends_at

    def wait(self) -> None:
        """See `Launched.wait`."""
        self._device.finish(self)

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        assert self.launched is not None, "it has run"
        return self.launched.outcomes()

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`."""
        assert self.launched is not None, "it has run"
        return self.launched.prompt_logprobs()


class SimulatedDevice:
    """`Steps` whose passes run one after the other, each with the drafts that are in the mailboxes when it begins."""

    in_background = True

    def __init__(self, runner: ModelRunner, times: DeviceTimes, most: int, max_rows: int) -> None:
        self._steps = DeviceSteps(runner, max_sequences=most, max_rows=max_rows, backend="torch")
        self.tables = self._steps.tables
        self._times, self._max_rows = times, max_rows
        self._queue: deque[_SimulatedStep] = deque()
        self._free_at = 0.0

    def use_pause(self) -> bool:
        """See `Steps.use_pause`."""
        return False

    def launch(
        self, batch: StepBatch, verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready
    ) -> _SimulatedStep:
        """See `Steps.launch`."""
        ready()
        one = _SimulatedStep(self, batch, verifiers, passes)
        self._queue.append(one)
        if len(self._queue) == 1:
            self._begin()
        return one

    def finish(self, one: _SimulatedStep) -> None:
        """Wait for the end of a pass, and begin the next."""
        while self._queue and one in self._queue:
            under_way = self._queue[0]
            time.sleep(max(0.0, under_way.ends_at - time.perf_counter()))
            self._free_at = under_way.ends_at
            self._queue.popleft()
            if self._queue:
                self._begin()

    def _begin(self) -> None:
        one = self._queue[0]
        begin = max(self._free_at, time.perf_counter())
        needed = one.batch.device_rows.rows if one.batch.device_rows is not None else len(one.batch.input.token_ids)
        # Steps run in the sizes that are captured.
        rows = next(size for size in row_sizes(self._max_rows) if size >= needed)
        one.ends_at = begin + self._times.of_step(max(rows, len(one.batch.items)), len(one.batch.items), one.passes)
        one.launched = self._steps.launch(one.batch, one.verifiers, one.passes, lambda: None)


@dataclass(order=True)
class _Due:
    at: float
    number: int
    sequence_id: int = field(compare=False)
    step: int = field(compare=False)
    # Parent, token and score of each node.
    nodes: Sequence[tuple[int, int, float]] = field(compare=False)


class RecordedDraft:
    """A `DraftLink` with recorded trees, which arrive as late as those of a service."""

    def __init__(
        self, events: DraftEvents, tables: Sequence[Mapping[str, Mapping[int, Table]]], texts: RecordedTexts,
        one_pass: float, early: float, whole: float, opening: int,
    ) -> None:  # fmt: skip
        """`tables[place]` has the early and the whole trees of a text by root; `early` and `whole` are in passes."""
        self._events, self._tables, self._texts = events, tables, texts
        self._delays = {"early": early * one_pass, "whole": whole * one_pass}
        self._opening = opening
        self._tokens: dict[int, list[int]] = {}
        self._first_steps: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._due: list[_Due] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._start()
        events.receive(Connected(DraftInfo("recorded", 0, "", TreeLimits(), 1 << 20, "0")))

    def open(self, sequence: OpenSequence) -> None:
        self._tokens[sequence.sequence_id] = list(sequence.token_ids)
        self._first_steps[sequence.sequence_id] = sequence.step
        self._ids[sequence.sequence_id] = 1
        self._plan(sequence.sequence_id, sequence.step, ("whole",))

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        for one in advances:
            if one.sequence_id in self._tokens:
                self._tokens[one.sequence_id].extend(one.token_ids)
                self._plan(one.sequence_id, one.step, ("early", "whole"))

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        raise AssertionError(f"{len(features)} features for a draft that reads none")

    def close(self, sequence_ids: Sequence[int]) -> None:
        for each in sequence_ids:
            self._tokens.pop(each, None)

    def cut_off(self, reason: str) -> None:
        raise AssertionError(reason)

    def _plan(self, sequence_id: int, step: int, parts: Sequence[str]) -> None:
        tokens, first = self._tokens[sequence_id], self._first_steps[sequence_id]
        # In the recording: without the first token, which is the text's place.
        root = len(tokens) - 2
        for part in parts:
            table = self._tables[tokens[0]][part].get(root) if step - first >= self._opening else None
            nodes = _nodes_of(table) if table is not None else []
            with self._wake:
                due = time.perf_counter() + self._delays[part]
                heapq.heappush(self._due, _Due(due, next(self._count), sequence_id, step, nodes))
                self._wake.notify()

    def _start(self) -> None:
        threading.Thread(target=self._deliver, daemon=True).start()

    def _deliver(self) -> None:
        while True:
            with self._wake:
                while not self._due or self._due[0].at > time.perf_counter():
                    self._wake.wait(max(0.0, self._due[0].at - time.perf_counter()) if self._due else None)
            self.deliver_due()

    def deliver_due(self) -> None:
        """Send all trees whose time has come."""
        while True:
            with self._wake:
                if not self._due or self._due[0].at > time.perf_counter():
                    return
                due = heapq.heappop(self._due)
            if due.sequence_id in self._tokens:
                self._events.receive(Grown([self._growth(due)]))

    def _growth(self, due: _Due) -> SequenceGrowth:
        """Node ids follow those of the growth sent last, which may be of an earlier step."""
        start = self._ids[due.sequence_id]
        self._ids[due.sequence_id] += len(due.nodes)
        parents = tuple(start + parent - 1 if parent else 0 for parent, _, _ in due.nodes)
        return SequenceGrowth(
            due.sequence_id, due.step, start, parents, tuple(self._texts.id_of(token) for _, token, _ in due.nodes),
            tuple(score for _, _, score in due.nodes), replaces=True,
        )  # fmt: skip


def _nodes_of(table: Table) -> list[tuple[int, int, float]]:
    """Parent, token and score of every node but the root, parents first."""
    found: list[tuple[int, int, float]] = [(0, 0, 0.0)] * (len(table.children) - 1)
    for node, below in enumerate(table.children):
        for token, (child, score) in below.items():
            found[child - 1] = node, token, score
    return found


@dataclass
class DecodeSteps:
    """An `EngineObserver` that sums the steps without prompt rows."""

    passes: int = 0
    rows: int = 0
    hits: int = 0
    followed: int = 0

    def on_step(self, stats: StepStats) -> None:
        if not stats.prefill_rows:
            self.passes += stats.passes
            self.rows += stats.chosen_rows
            self.hits += stats.hits
            self.followed += stats.hits + stats.misses > 0

    def on_finished(self, *_: object) -> None:
        """Not counted."""

    def on_speculation(self, active: bool) -> None:
        """Not counted."""


def _loop_for(mode: str, texts: RecordedTexts, times: DeviceTimes, most: int, steps: DecodeSteps) -> EngineLoop:
    """The engine's loop for up to `most` sequences, on a simulated device with these texts."""
    settings: dict[str, Any] = {"draft": "inprocess:none"} if mode in _DRAFTED else {"speculation": False}
    config = TargetConfig(model="none", max_running=most, speculative_disable_queue_size=most, **settings)
    runner: Any = empty_runner(texts.vocabulary_size, most * _LONGEST_TEXT)
    runner.__class__ = TextRunner
    runner.texts = texts
    runner.enable_device_row_selection(most, 0 if mode == "plain" else 15, "torch")
    device = SimulatedDevice(runner, times, most, config.step_rows)
    return EngineLoop(runner, config, steps=device, step_cost=times.cost(), observer=steps)


def run_mode(
    mode: str, texts: RecordedTexts, tables: Sequence[Mapping[str, Mapping[int, Table]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Decode all texts with one engine, `concurrency` at a time."""
    most = options.concurrency
    times = DeviceTimes(options.pass_ms * 1e-3, options.row_ms * 1e-3, 0.0)
    steps = DecodeSteps()
    loop = _loop_for(mode, texts, times, most, steps)
    if mode in _DRAFTED:
        if mode == "worthless":
            tables = [*tables[1:], tables[0]]
        loop.drafting.attach(
            RecordedDraft(loop.drafting, tables, texts, times.one_pass, options.early, options.whole, options.opening)
        )
        loop.drafting.listen()
    waiting, number, tokens = list(range(len(texts.texts))) * options.laps, 0, 0
    answers: dict[int, list[int]] = {}
    begin = time.perf_counter()
    while waiting or loop.live:
        while waiting and len(loop.live) < most:
            place, number = waiting.pop(0), number + 1
            length = len(texts.texts[place]) - len(texts.prompts[place])
            request = SequenceRequest(
                tuple(texts.prompts[place]), SamplingParams(ignore_eos=True, max_tokens=length),
                VerificationMode.GREEDY, 0, length,
            )  # fmt: skip
            loop.add(loop.make(number, replace(request, speculate=mode != "plain")))
            answers[number] = list(texts.prompts[place])
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                tokens += len(event.token_ids)
                answers[event.sequence_id] += event.token_ids
            elif not isinstance(event, SequenceFinished):
                raise SystemExit(f"a sequence failed: {event}")
    seconds = time.perf_counter() - begin
    if any(answer != texts.texts[answer[0]] for answer in answers.values()):
        raise SystemExit(f"{mode}: an answer differs from its text")
    return {
        "mode": mode,
        "concurrency": most,
        "tokens_per_pass": round(tokens / max(1, steps.passes) / most, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "rows": round(steps.rows / max(1, steps.passes), 1),
        "followed_share": round(steps.followed / max(1, steps.passes), 3),
        "hit_share": round(steps.hits / max(1, steps.passes) / most, 3),
        "passes": steps.passes,
        "tokens": tokens,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of recordings, by `running_ahead.simulate`")
    parser.add_argument("--modes", default=",".join(MODES), type=comma_separated(str))
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--laps", type=int, default=1, help="how often all texts are decoded")
    parser.add_argument("--pass-ms", type=float, default=60.0)
    parser.add_argument("--row-ms", type=float, default=0.12)
    parser.add_argument("--early", type=float, default=0.62, help="passes until a tree's first levels arrive")
    parser.add_argument("--whole", type=float, default=0.85, help="passes until the whole tree arrives")
    parser.add_argument("--opening", type=int, default=2, help="passes of a sequence before its first tree")
    options = parser.parse_args()
    torch.set_num_threads(1)
    everything = enumerate(read_recordings(options.folder / "recordings.safetensors"))
    recordings = {place: one for place, one in everything if one.states is not None}
    texts, tables = RecordedTexts(list(recordings.values())), []
    for place, one in recordings.items():
        drafts = Drafts(one, read_trees(options.folder / f"head_{place}.safetensors"), {}, {})
        tables.append({"early": drafts.tables(HEAD, _EARLY), "whole": drafts.tables(HEAD, _WHOLE)})
    # Every token of a tree needs an id before a runner is made.
    for table in (table for both in tables for trees in both.values() for table in trees.values()):
        for below in table.children:
            for token in below:
                texts.id_of(token)
    rows = []
    for mode in options.modes:
        rows.append(run_mode(mode, texts, tables, options))
        rows[-1]["ratio"] = round(rows[-1]["tokens_per_second"] / rows[0]["tokens_per_second"], 3)
        show(" ".join(f"{name} {value}" for name, value in rows[-1].items()))
    settings = settings_of(options, ["folder"])
    write_json(options.json, {"machine": describe(), "settings": settings, "results": rows})


if __name__ == "__main__":
    main()
