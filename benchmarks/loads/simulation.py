"""What the policies of speculation make of whole answers at several loads: the engine's own loop on a simulated device,
with a clock of its own.

    python -m benchmarks.loads.simulation [--drafts good,worthless,none] [--shapes 8b,small] [--json FILE]

Loop, scheduler and policies are the engine's own. Passes take what those of an 8B shape take on an H100
(`benchmarks.host.simulated_prompts`), 3 % more where a draft reads their states, and wait for what they wait for; the
host's work takes `LoadedShape`'s time. What a pass accepts is drawn from the text's seed (`loads.texts`), so that two
commits meet the same texts and drafts. Streams send the next prompt shortly after an answer has ended: prompts have the
lengths of `benchmarks/prompts.jsonl`, answers 128 tokens.

`alone`: one load from a cold start. `changing`: loads follow each other, none of which the engine has met; then all of
them again with the same texts: the speed of the first eight answers of a load is compared with that of the second time.
`long`: eight streams whose prompts have 6,000 tokens and whose answers 32.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.engine.simulated_device import empty_runner
from benchmarks.host.simulated_prompts import ANSWER_TOKENS, MOST_ROWS, prompt_lengths
from benchmarks.loads.drafts import BehindPasses, SimulatedDraft
from benchmarks.loads.shapes import SHAPES, LoadedShape
from benchmarks.loads.texts import (
    LOOKED_UP,
    VOCABULARY,
    RankedCandidates,
    SimulatedDrafts,
    SimulatedText,
    made_up_text,
    ranked,
)
from benchmarks.shared.report import comma_separated, parser_of, provenance, record_table, settings_of, show, write_json
from benchmarks.shared.virtual_clock import VirtualClock
from outrider.sampling import SamplingParams, VerificationMode
from target_service.config import TargetConfig
from target_service.core.sequence import DevicePass, SequenceFinished, SequenceRequest, StepStats, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.batch import DeviceRows, StepBatch
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import LaunchedWhole, Ready
from target_service.execution.node_tables import NodeTables
from target_service.execution.prompt_scores import ScoredPrompt
from target_service.model.cuda_graphs.sizes import row_sizes
from target_service.sampling.verifier import SequenceVerifier, Verified
from tree_kernels.node_table import Mailboxes
from tree_kernels.verification import Walk

# In this order each load is met for the first time beside ones that are far from it.
CHANGING = (8, 64, 1, 32, 128)
# Sequences that run at most, and places of each in the cache.
_MOST, _PLACES = 128, 1 << 11
# Seconds from an answer's last token to the next request of its stream. Chosen: what a client and two ways over HTTP
# take.
CLIENT_SECONDS = 2.5e-3
# Streams of long prompts, those and their answers in tokens, and answers in all.
_LONG_STREAMS, _LONG_PROMPT, _LONG_ANSWER, _LONG_ANSWERS = 8, 6000, 32, 32
# Answers whose speed is compared.
_FIRST_ANSWERS = 8
# "none" has lookup alone.
DRAFTS: dict[str, SimulatedDrafts | None] = {
    "good": SimulatedDrafts(),
    "late": SimulatedDrafts(late_hits=0.25),
    "poor": SimulatedDrafts(quality=0.6),
    "worthless": SimulatedDrafts(quality=0.0),
    "none": None,
    "plain": None,
}


class _UnreadTables(NodeTables):
    """Tables that no device reads."""

    def publish(self) -> None:
        """See `NodeTables.publish`."""
        for tree in self._trees.values():
            tree.changed = False


class _SimulatedPass(LaunchedWhole):
    """A step under way; see `Launched`."""

    on_device = can_launch_before_results = True
    span: DeviceSpan | None = None

    def __init__(self, clock: VirtualClock, outcomes: list[Verified | None], ends_at: float, commits: float) -> None:
        self._clock, self._outcomes, self._ends_at, self._commits = clock, outcomes, ends_at, commits

    def ended(self) -> bool:
        return self._clock.now >= self._ends_at

    def wait(self) -> None:
        self._clock.pass_by(self._ends_at - self._clock.now)

    def outcomes(self) -> list[Verified | None]:
        self.wait()
        self._clock.pass_by(self._commits)
        return self._outcomes

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`: no request here asks for any."""
        return []


class PassOnTimeline(NamedTuple):
    """Passes launched at once: when they began and ended, sequences that decoded, rows of prompts, and rows in all."""

    begin: float
    end: float
    decoding: int
    read: int
    rows: int


class LoadedDevice:
    """`Steps` whose passes accept what their texts and drafts have, one after the other."""

    in_background = True

    def __init__(self, clock: VirtualClock, shape: LoadedShape, *, looks_up: bool) -> None:
        self.tables = _UnreadTables(_MOST, Mailboxes(_MOST, torch.device("cpu")))
        self.draft: SimulatedDraft | BehindPasses | None = None
        self.texts: dict[int, SimulatedText] = {}
        self._clock, self._shape, self._looks_up = clock, shape, looks_up
        self.timeline: list[PassOnTimeline] = []
        self._free_at = 0.0
        # By sequence: its tokens on the device, and the steps that made them.
        self._lengths: dict[int, int] = {}
        self.steps: defaultdict[int, int] = defaultdict(int)

    def use_pause(self) -> bool:
        """See `Steps.use_pause`."""
        return False

    def launch(
        self, batch: StepBatch, _verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready
    ) -> _SimulatedPass:
        """See `Steps.launch`."""
        shape, count = self._shape, len(batch.items)
        followed = self.draft is not None and self.draft.is_followed
        host = shape.host + count * (shape.host_each + shape.host_drafted * (batch.device_rows is not None))
        self._clock.pass_by(host)
        ready()
        needed = batch.device_rows.rows if batch.device_rows is not None else len(batch.input.token_ids)
        rows = next(size for size in row_sizes(MOST_ROWS) if size >= needed)
        seconds = shape.of_step(batch, rows, followed=followed)
        begin = max(self._free_at, self._clock.now)
        made = [self._run(batch, begin + number * seconds) for number in range(passes)]
        self._free_at = begin + passes * seconds
        read = sum([item.known for item in batch.items if item.known > 1])
        self.timeline.append(
            PassOnTimeline(begin, self._free_at, sum([item.known == 1 for item in batch.items]), read, rows)
        )
        outcomes = [
            None if item.tree is None else _joined(each) for item, *each in zip(batch.items, *made, strict=True)
        ]
        return _SimulatedPass(self._clock, outcomes, self._free_at, host + count * shape.host_drafted * followed)

    def _run(self, batch: StepBatch, begin: float) -> list[Verified]:
        """One pass."""
        rows = batch.device_rows
        chosen = [None] * len(batch.items) if rows is None else self._chosen(batch, rows, begin)
        outcomes = []
        for item, one in zip(batch.items, chosen, strict=True):
            number = item.sequence.sequence_id
            if item.tree is None:
                outcomes.append(Verified(Walk((), 0), ()))
                continue
            text, length = self.texts[number], self._lengths.setdefault(number, self.texts[number].prompt_tokens)
            count = 1 + (one.accepted if one is not None else 0)
            tokens = text.token_ids[length : length + count]
            self._lengths[number] += count
            self.steps[number] += 1
            outcomes.append(Verified(Walk((), tokens[0]), (), tuple(tokens[1:]), () if one is None else (one,)))
        return outcomes

    def _chosen(self, batch: StepBatch, rows: DeviceRows, begin: float) -> list[DevicePass | None]:
        """What the device reports of each sequence whose rows it chooses: the best of all sequences' candidates."""
        items = batch.items[rows.laid_out :]
        candidates = [self._ranked(item.sequence.sequence_id, begin) for item in items]
        limits = rows.limits[rows.laid_out :]
        counts = [min(most, len(one.chances)) for one, most in zip(candidates, limits, strict=True)]
        owners = np.repeat(np.arange(len(items)), counts)
        chances = np.concatenate([one.chances[:most] for one, most in zip(candidates, limits, strict=True)])
        room = max(0, rows.rows - rows.laid_out_rows - len(items))
        best = np.argsort(-chances, kind="stable")[:room]
        taken = np.bincount(owners[best], minlength=len(items))
        reports: list[DevicePass | None] = [None] * rows.laid_out
        for one, count, limit in zip(candidates, taken.tolist(), limits, strict=True):
            accepted, drafted = one.accepted(count)
            reports.append(
                DevicePass(
                    drafted=count,
                    drafted_from_table=int(one.drafted[:count].sum()),
                    accepted=accepted,
                    accepted_from_table=drafted,
                    expected=float(one.chances[:count].sum()),
                    expected_from_table=float(one.chances[:count][one.drafted[:count]].sum()),
                    prospects=one.prospects(limit),
                    root_row=0,
                    path=(),
                )
            )
        return reports

    def _ranked(self, number: int, begin: float) -> RankedCandidates:
        text = self.texts[number]
        answered = self.draft.answered(number, begin) if self.draft is not None else None
        lag = None if answered is None else max(0, self.steps[number] - answered)
        root = self._lengths.get(number, text.prompt_tokens) - 1
        return ranked(*text.candidates(root, lag, self._looks_up), self.tables.trust)


def _joined(passes: Sequence[Verified]) -> Verified:
    """The outcome of passes that were launched at once."""
    tokens = [token for one in passes for token in (one.walk.next_token, *one.following)]
    reports = tuple(report for one in passes for report in one.device_passes)
    return Verified(Walk((), tokens[0]), (), tuple(tokens[1:]), reports)


@dataclass
class PassCounts:
    """An `EngineObserver` that adds up rows and passes."""

    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def on_step(self, stats: StepStats) -> None:
        """See `EngineObserver.on_step`."""
        self.totals["passes"] += stats.passes
        self.totals["rows"] += stats.chosen_rows
        self.totals["sequence passes"] += (stats.chosen_rows > 0) * stats.sequences * stats.passes
        self.totals["accepted"] += stats.chosen_accepted
        self.totals["with prompts"] += stats.prefill_rows > 0
        self.totals["rows beside prompts"] += stats.chosen_rows * (stats.prefill_rows > 0)
        self.totals["followed"] += stats.passes * (stats.hits + stats.misses > 0)

    def on_finished(self, *_: object) -> None:
        """Not counted."""

    def on_speculation(self, active: bool) -> None:
        """Not counted."""


@dataclass
class AnsweredRequest:
    """A request: when it arrived and when the engine got it, and when so many of its tokens came."""

    arrived: float
    asked: float
    tokens: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.tokens[0][0] - self.arrived


class SimulatedEngine:
    """One engine, which keeps what its policies learnt from load to load."""

    def __init__(self, shape: LoadedShape, draft: str, *, behind_passes: bool = False, shares: bool = False) -> None:
        """`draft`: one of `DRAFTS`, which drafts `behind_passes` or is sent commits. `shares`: prompts share pages."""
        drafter, plain = DRAFTS[draft], draft == "plain"
        self._clock = VirtualClock()
        self._drafter = drafter or SimulatedDrafts()
        settings: dict[str, Any] = {"draft": "inprocess:none"} if drafter is not None else {}
        if plain:
            settings = {"speculation": False, "lookup_tokens": 0, "max_draft_nodes": 0}
        config = TargetConfig(
            model="none", device="cuda", max_running=_MOST, speculative_disable_queue_size=2 * _MOST,
            prefix_cache=shares, **settings,
        )  # fmt: skip
        runner: Any = empty_runner(VOCABULARY, _MOST * _PLACES)
        runner.pass_sizes = lambda _: row_sizes(MOST_ROWS)
        looked_up = 0 if plain else LOOKED_UP
        runner.enable_device_row_selection(_MOST, looked_up, "torch", recycles=False)
        with self._clock.installed():
            self.device = LoadedDevice(self._clock, shape, looks_up=looked_up > 0)
            self.counts = PassCounts()
            self.loop = EngineLoop(runner, config, steps=self.device, step_cost=shape.cost(), observer=self.counts)
            if drafter is not None and behind_passes:
                self.device.draft = BehindPasses(self.loop.drafting, self.device.steps)
            elif drafter is not None:
                self.device.draft = SimulatedDraft(self.loop.drafting, self._clock, shape)
                self.loop.drafting.attach(self.device.draft)
                self.loop.drafting.listen()
        self._number = 0

    @property
    def now(self) -> float:
        """Seconds by its clock."""
        return self._clock.now

    def load(
        self,
        streams: int,
        answers: int,
        seed: int,
        lengths: Iterator[int] | None = None,
        answer_tokens: int = ANSWER_TOKENS,
    ) -> dict[str, Any]:
        """Closed loops of so many streams until `answers` have ended, by default with prompts of the usual `lengths`.
        Returns tokens a second while all of them ran, and the seconds until the first eight answers had ended."""
        lengths, begin = lengths or prompt_lengths(seed), self._clock.now
        texts = [
            made_up_text(1000 * seed + answers - number, next(lengths), answer_tokens, self._drafter)
            for number in range(answers)
        ]
        served = self.answer(texts, [begin] * min(streams, answers), closed=True)
        made = sorted(one for each in served for one in each.tokens)
        times, counts = [at for at, _ in made], [0, *itertools.accumulate(count for _, count in made)]
        # When each answer was asked for, and the tokens until then.
        asked = [(one.asked, counts[bisect_right(times, one.asked)]) for one in served]
        first_ended = sorted(one.tokens[-1][0] for one in served)[:_FIRST_ANSWERS][-1] - begin
        totals = self.counts.totals
        return {
            "streams": streams,
            "tokens_per_second": _rate(asked[0], asked[-1]),
            # Once half of them have been asked for.
            "settled": _rate(asked[len(asked) // 2], asked[-1]),
            "first_eight_seconds": round(first_ended, 4),
            "first_token_ms": round(1e3 * median(one.first for one in served), 2),
            "rows_per_pass": round(totals["rows"] / totals["passes"], 1),
            "accepted_per_row": round(totals["accepted"] / max(1, totals["rows"]), 3),
            "followed": round(totals["followed"] / totals["passes"], 2),
        }

    def answer(
        self, texts: Sequence[SimulatedText], arrivals: Iterable[float], *, closed: bool
    ) -> list[AnsweredRequest]:
        """Answer all texts, in order. Requests come at the times of `arrivals`, which rise, and where the load is
        `closed` once more shortly after each answer."""
        coming, served = deque(arrivals), dict[int, AnsweredRequest]()
        left = iter(texts)

        def arrive() -> None:
            while coming and coming[0] <= self._clock.now and (text := next(left, None)) is not None:
                self._ask(text)
                served[self._number] = AnsweredRequest(coming.popleft(), self._clock.now)

        self.loop.take_arrivals = arrive
        self.counts.totals.clear()
        with self._clock.installed():
            while len(served) < len(texts) or self.loop.live:
                arrive()
                events = self.loop.step()
                if events is None and coming:
                    self._clock.pass_by(coming[0] - self._clock.now)
                for event in events or ():
                    if isinstance(event, StepVerdict):
                        served[event.sequence_id].tokens.append((self._clock.now, len(event.token_ids)))
                    elif not isinstance(event, SequenceFinished):
                        raise SystemExit(f"a sequence failed: {event}")
                    elif closed:
                        coming.append(self._clock.now + CLIENT_SECONDS)
        return list(served.values())

    def _ask(self, text: SimulatedText) -> None:
        self._number += 1
        self.device.texts[self._number] = text
        sampling = SamplingParams(ignore_eos=True, max_tokens=text.answer_tokens)
        prompt = tuple(text.token_ids[: text.prompt_tokens])
        request = SequenceRequest(prompt, sampling, VerificationMode.GREEDY, 0, text.answer_tokens)
        self.loop.add(self.loop.make(self._number, request))


def _rate(begin: tuple[float, int], end: tuple[float, int]) -> float:
    """Tokens a second between two points of (time, tokens until then); 0 where they are one."""
    return round((end[1] - begin[1]) / (end[0] - begin[0]), 1) if end[0] > begin[0] else 0.0


def answers_of(streams: int) -> int:
    """Answers of a load."""
    return max(16, 2 * streams)


def alone(shape: LoadedShape, draft: str, streams: int, seed: int) -> dict[str, Any]:
    """One load from a cold start."""
    return SimulatedEngine(shape, draft).load(streams, 3 * answers_of(streams), seed)


def long_prompts(shape: LoadedShape, draft: str, seed: int) -> dict[str, Any]:
    """Eight streams of long prompts from a cold start."""
    lengths = itertools.repeat(_LONG_PROMPT)
    return SimulatedEngine(shape, draft).load(_LONG_STREAMS, _LONG_ANSWERS, seed, lengths, _LONG_ANSWER)


def changing(shape: LoadedShape, draft: str, loads: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """Loads one behind the other, and all of them again."""
    engine = SimulatedEngine(shape, draft)
    laps = [[engine.load(streams, answers_of(streams), seed) for streams in loads] for _ in range(2)]
    for met, again in zip(*laps, strict=True):
        first = again["first_eight_seconds"] / met["first_eight_seconds"]
        yield {
            "streams": met["streams"],
            "met": met["tokens_per_second"],
            "again": again["tokens_per_second"],
            "first_eight": round(first, 3),
        }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--drafts", default="good,late,poor,worthless,none", type=comma_separated(str))
    parser.add_argument("--shapes", default="8b,small", type=comma_separated(str))
    parser.add_argument("--streams", default="1,8,32,64,128", type=comma_separated(int))
    parser.add_argument("--parts", default="alone,changing,long", type=comma_separated(str))
    parser.add_argument("--seeds", default="1,2,3", type=comma_separated(int))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {"alone": [], "changing": [], "long": []}
    for shape, draft, seed in itertools.product(options.shapes, options.drafts, options.seeds):
        of = {"shape": shape, "draft": draft, "seed": seed}
        if "alone" in options.parts:
            results["alone"] += [of | alone(SHAPES[shape], draft, one, seed) for one in options.streams]
        if "long" in options.parts:
            results["long"].append(of | long_prompts(SHAPES[shape], draft, seed))
        if "changing" in options.parts:
            results["changing"] += [of | one for one in changing(SHAPES[shape], draft, CHANGING, seed)]
    for name in options.parts:
        show(f"{name}\n{record_table(results[name])}")
    write_json(options.json, {**provenance("loads.simulation"), "settings": settings_of(options), "results": results})


if __name__ == "__main__":
    main()
