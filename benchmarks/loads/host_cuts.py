"""What the policies of speculation make of trees that the host cuts: the engine's own loop on a simulated executor,
with a clock of its own.

    python -m benchmarks.loads.host_cuts [--drafts good,poor,worthless,slow,trie] [--shapes cpu,avx2,gpu] [--json FILE]

There are no tables from which a device chooses rows, as on a CPU (`cpu`: the host computes the pass itself, and each
row more takes 7 % of one; `avx2`: without AVX-512, where the second one takes most) or with batch-invariant drafts
(`gpu`: passes of an 8B shape on an H100, one launched while another runs). Texts are those of `loads.texts`; a draft's
trees, and what is right in them, are drawn from the text's seed and the place in it, so that two commits meet the same.
Those of `trie` are what the trie drafter makes of the text, of which most places repeat nothing. Streams send the next
prompt when an answer has ended.

`alone`: one load from a cold start, its first quarter left out. `turns`: the draft is good for 30 answers of one
stream, then worthless for as many, and good again.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.engine.simulated_device import empty_runner
from benchmarks.host.simulated_prompts import ANSWER_TOKENS, MOST_ROWS, pass_seconds, prompt_lengths
from benchmarks.loads.texts import VOCABULARY, SimulatedDrafts, SimulatedText, made_up_text
from benchmarks.shared.report import comma_separated, parser_of, provenance, record_table, settings_of, show, write_json
from benchmarks.shared.virtual_clock import VirtualClock
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.session import ProposeSession, SequenceAdmission
from outrider.drafting.events import Connected, DraftEvents, Grown
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import (
    DEFAULT_TENANT,
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    SequenceGrowth,
    TreeLimits,
)
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepStats, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.batch import StepBatch
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import LaunchedWhole, Ready
from target_service.execution.node_tables import NodeTables
from target_service.execution.prompt_scores import ScoredPrompt
from target_service.model.cuda_graphs.sizes import row_sizes
from target_service.sampling.verifier import SequenceVerifier, Verified
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.verification import Walk

_MOST, _PLACES = 32, 1 << 11
# Depth of a drafted tree, which has two nodes a level.
_DEPTH = 6
_COSTED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# How sure a draft is of the first of two nodes, on average.
_SURENESS = 0.7


@dataclass(frozen=True)
class CutShape:
    """Seconds of a pass of one row, what the second one adds beside each row more, and the host's for a launch and a
    commit; whether the host is free while a pass runs."""

    row: float = 0.025
    more: float = 0.00175
    second: float = 0.0
    host: float = 3e-4
    in_background: bool = False

    def seconds(self, rows: int, sequences: int) -> float:
        """Of a pass."""
        if self.in_background:
            return pass_seconds(rows, sequences)
        return self.row + (rows - 1) * self.more + (rows > 1) * self.second

    def cost(self) -> StepCost:
        return StepCost([(rows, self.seconds(rows, 1)) for rows in _COSTED])


@dataclass(frozen=True)
class CutDraft:
    """The chance that a node is right, for each chance that it says; and the time of an answer, in passes of one row,
    and for each sequence."""

    quality: float = 0.9
    answer: float = 0.1
    each: float = 0.02


# `avx2` is SmolLM2-135M in float32 on two such cores, as a target measured its steps.
SHAPES = {
    "cpu": CutShape(),
    "avx2": CutShape(row=0.032, more=0.0016, second=0.023),
    "gpu": CutShape(in_background=True),
}
DRAFTS = {
    "good": CutDraft(),
    "poor": CutDraft(quality=0.5),
    "worthless": CutDraft(quality=0.0),
    "slow": CutDraft(answer=1.5),
    "trie": CutDraft(answer=0.06),
}
TURNS = ("good", "worthless", "good")


@functools.lru_cache(1 << 16)
def drafted_tree(seed: int, place: int, quality: float, following: tuple[int, ...]) -> TokenTree:
    """The tree behind the token at a `place` of a text, that goes on with `following` [_DEPTH]: two nodes a level, the
    next level below the first."""
    dice = random.Random(f"{seed} {place}")
    sureness = min(0.95, max(0.1, dice.gauss(_SURENESS, 0.2)))
    tokens, parents, scores, parent, right = [0], [0], [1.0], 0, True
    for token in following:
        first = min(0.97, max(0.05, dice.gauss(sureness, 0.1)))
        second, drawn = (1 - first) / 2, dice.random()
        wrong = dice.sample(range(VOCABULARY), 2)
        hits = [right and drawn < first * quality, right and first * quality <= drawn < (first + second) * quality]
        for score, hit, other in zip((first, second), hits, wrong, strict=True):
            tokens.append(token if hit else other + (other >= token))
            parents.append(parent)
            scores.append(score)
        parent, right = len(tokens) - 2, hits[0]
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


class _SentTree(NamedTuple):
    sequence_id: int
    step: int
    length: int


class CutDrafter:
    """A `DraftLink` that answers every commit after a while, with trees of the text."""

    def __init__(
        self, events: DraftEvents, clock: VirtualClock, shape: CutShape, texts: dict[int, SimulatedText]
    ) -> None:
        self.kind = DRAFTS["good"]
        self._events, self._clock, self._shape, self._texts = events, clock, shape, texts
        # By open sequence: its length, and the id of the next node.
        self._lengths: dict[int, int] = {}
        self._ids: defaultdict[int, int] = defaultdict(lambda: 1)
        self._free_at = 0.0
        # Trees that it has grown.
        self.growths = 0
        events.receive(Connected(DraftInfo("simulated", 0, "", TreeLimits(), VOCABULARY + 1, "0")))

    def open(self, sequence: OpenSequence) -> None:
        self._lengths[sequence.sequence_id], self._ids[sequence.sequence_id] = len(sequence.token_ids), 1
        self._answer([_SentTree(sequence.sequence_id, sequence.step, len(sequence.token_ids))])

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        newest = dict[int, _SentTree]()
        for one in advances:
            self._lengths[one.sequence_id] += len(one.token_ids)
            newest[one.sequence_id] = _SentTree(one.sequence_id, one.step, self._lengths[one.sequence_id])
        # One tree for each sequence, as a draft service makes.
        self._answer([*newest.values()])

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        raise AssertionError(f"{len(features)} features for a draft that reads none")

    def close(self, sequence_ids: Sequence[int]) -> None:
        for each in sequence_ids:
            self._lengths.pop(each, None)

    def cut_off(self, reason: str) -> None:
        raise AssertionError(reason)

    def _answer(self, sent: Sequence[_SentTree]) -> None:
        self._call_when_done(len(sent), lambda: self._deliver(sent))

    def _call_when_done(self, sequences: int, deliver: Callable[[], None]) -> None:
        # One answer after the other.
        begin = max(self._clock.now, self._free_at)
        self._free_at = begin + self._shape.seconds(1, 1) * (self.kind.answer + self.kind.each * sequences)
        self._clock.call_at(self._free_at, deliver)

    def _deliver(self, sent: Sequence[_SentTree]) -> None:
        growths = []
        for sequence_id, step, length in sent:
            if sequence_id not in self._lengths:
                continue
            self.growths += 1
            text, first = self._texts[sequence_id], self._ids[sequence_id]
            tree = drafted_tree(
                text.seed, length - 1, self.kind.quality, tuple(text.token_ids[length : length + _DEPTH])
            )
            parents = tuple(0 if parent == 0 else first + parent - 1 for parent in tree.parents[1:])
            self._ids[sequence_id] += tree.drafted
            growths.append(
                SequenceGrowth(sequence_id, step, first, parents, tree.token_ids[1:], tree.scores[1:], replaces=True)
            )
        if growths:
            self._events.receive(Grown(growths))


class CutTrie(CutDrafter):
    """The same with trees of the trie drafter, which learns each tenant's texts."""

    def __init__(
        self, events: DraftEvents, clock: VirtualClock, shape: CutShape, texts: dict[int, SimulatedText]
    ) -> None:
        super().__init__(events, clock, shape, texts)
        self._drafter = NgramDrafter(TrieConfig())
        self._session = ProposeSession(self._drafter, SequenceAdmission(2 * _MOST), DEFAULT_TENANT)

    def open(self, sequence: OpenSequence) -> None:
        self._session.open(sequence)
        self._call_when_done(1, self._propose)

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        for one in advances:
            self._session.advance(one)
        self._call_when_done(len({one.sequence_id for one in advances}), self._propose)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._session.close(sequence_ids)

    def _propose(self) -> None:
        if self._session.awaits_growth:
            # What its thread has learnt by now must not depend on the machine.
            self._drafter.flush()
            self._session.grant(1 - self._session.credit)
            grown = self._session.propose_growth()
            self.growths += len(grown)
            self._events.receive(Grown(grown))


class _CutPass(LaunchedWhole):
    """A step under way; see `Launched`."""

    span: DeviceSpan | None = None

    def __init__(self, clock: VirtualClock, outcomes: list[Verified | None], ends_at: float, shape: CutShape) -> None:
        self._clock, self._outcomes, self._ends_at, self._shape = clock, outcomes, ends_at, shape
        self.on_device = self.can_launch_before_results = shape.in_background

    def ended(self) -> bool:
        return self._clock.now >= self._ends_at

    def wait(self) -> None:
        self._clock.pass_by(self._ends_at - self._clock.now)

    def outcomes(self) -> list[Verified | None]:
        self.wait()
        self._clock.pass_by(self._shape.host)
        return self._outcomes

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`: no request here asks for any."""
        return []


class CutSteps:
    """`Steps` whose passes accept what their trees hold of the texts, one after the other."""

    tables: NodeTables | None = None

    def __init__(self, clock: VirtualClock, shape: CutShape) -> None:
        self.in_background = shape.in_background
        self.texts: dict[int, SimulatedText] = {}
        self.rows = self.drafted_passes = self.passes = 0
        self._clock, self._shape, self._free_at = clock, shape, 0.0
        self._lengths: dict[int, int] = {}

    def use_pause(self) -> bool:
        """See `Steps.use_pause`."""
        return False

    def launch(self, batch: StepBatch, _verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready) -> _CutPass:
        """See `Steps.launch`."""
        self._clock.pass_by(self._shape.host)
        ready()
        rows = len(batch.input.token_ids)
        if self.in_background:
            rows = next(size for size in row_sizes(MOST_ROWS) if size >= rows)
        begin = max(self._free_at, self._clock.now)
        self._free_at = begin + passes * self._shape.seconds(rows, len(batch.items))
        self.passes += passes
        self.drafted_passes += batch.drafted
        self.rows += sum(item.tree.drafted for item in batch.items if item.tree is not None)
        outcomes = [self._outcome(item.sequence.sequence_id, item.tree, passes) for item in batch.items]
        launched = _CutPass(self._clock, outcomes, self._free_at, self._shape)
        if not self.in_background:
            launched.wait()
        return launched

    def _outcome(self, sequence_id: int, tree: TokenTree | None, passes: int) -> Verified | None:
        if tree is None:
            return None
        text = self.texts[sequence_id]
        length = self._lengths.setdefault(sequence_id, text.prompt_tokens)
        path, row = list[int](), 0
        while True:
            token = text.token_ids[length + len(path)]
            following = [child for child in tree.children[row] if tree.token_ids[child] == token]
            if not following:
                break
            row = following[0]
            path.append(row)
        behind = text.token_ids[length + len(path) : length + len(path) + passes]
        self._lengths[sequence_id] += len(path) + passes
        return Verified(Walk(tuple(path), behind[0]), (), tuple(behind[1:]))


class _Unread:
    """An `EngineObserver` that counts nothing."""

    def on_step(self, stats: StepStats) -> None:
        """Not counted."""

    def on_finished(self, *_: object) -> None:
        """Not counted."""

    def on_speculation(self, active: bool) -> None:
        """Not counted."""


class CutEngine:
    """One engine, which keeps what its policies learnt from load to load."""

    def __init__(self, shape: CutShape, *, drafts: type[CutDrafter] | None = CutDrafter) -> None:
        self._clock = VirtualClock()
        settings: dict[str, Any] = {"draft": "inprocess:none"} if drafts else {"speculation": False}
        config = TargetConfig(
            model="none", max_running=_MOST, speculative_disable_queue_size=2 * _MOST, prefix_cache=False,
            max_draft_nodes=31 if drafts is CutTrie else 2 * _DEPTH, lookup_tokens=0, **settings,
        )  # fmt: skip
        runner: Any = empty_runner(VOCABULARY + 1, _MOST * _PLACES)
        with self._clock.installed():
            self.steps = CutSteps(self._clock, shape)
            self.loop = EngineLoop(runner, config, steps=self.steps, step_cost=shape.cost(), observer=_Unread())
            self.drafter: CutDrafter | None = None
            if drafts is not None:
                self.drafter = drafts(self.loop.drafting, self._clock, shape, self.steps.texts)
                self.loop.drafting.attach(self.drafter)
                self.loop.drafting.listen()
        self._number = 0

    def load(self, streams: int, answers: int, seed: int, draft: str = "good") -> dict[str, Any]:
        """Closed loops of so many streams until `answers` have ended. Returns tokens a second from the end of the first
        quarter until the last was asked for."""
        if self.drafter is not None:
            self.drafter.kind, self.drafter.growths = DRAFTS[draft], 0
        lengths, left, steps = prompt_lengths(seed), answers, self.steps
        asked: list[tuple[float, int]] = []
        tokens, steps.passes, steps.drafted_passes, steps.rows = 0, 0, 0, 0
        with self._clock.installed():
            while left or self.loop.live:
                while left and len(self.loop.live) < streams:
                    self._ask(next(lengths), 1000 * seed + left)
                    left -= 1
                    asked.append((self._clock.now, tokens))
                for event in self.loop.step() or ():
                    if isinstance(event, StepVerdict):
                        tokens += len(event.token_ids)
                    elif not isinstance(event, SequenceFinished):
                        raise SystemExit(f"a sequence failed: {event}")
        (began, before), (ended, until) = asked[len(asked) // 4], asked[-1]
        return {
            "streams": streams,
            "tokens_per_second": round((until - before) / (ended - began), 1),
            "drafted": round(steps.drafted_passes / steps.passes, 3),
            "rows_per_pass": round(steps.rows / steps.passes, 2),
            "growths_per_token": round(self.drafter.growths / tokens, 3) if self.drafter is not None else 0.0,
        }

    def _ask(self, prompt_tokens: int, seed: int) -> None:
        self._number += 1
        text = self.steps.texts[self._number] = made_up_text(seed, prompt_tokens, ANSWER_TOKENS, SimulatedDrafts())
        sampling = SamplingParams(ignore_eos=True, max_tokens=ANSWER_TOKENS)
        prompt = tuple(text.token_ids[:prompt_tokens])
        request = SequenceRequest(prompt, sampling, VerificationMode.GREEDY, 0, ANSWER_TOKENS)
        self.loop.add(self.loop.make(self._number, request))


def alone(shape: CutShape, draft: str, streams: int, seed: int) -> dict[str, Any]:
    """One load from a cold start. A draft of "none" is not there."""
    drafts = {"none": None, "trie": CutTrie}.get(draft, CutDrafter)
    return CutEngine(shape, drafts=drafts).load(streams, max(24, 4 * streams), seed, draft)


def turns(shape: CutShape, seed: int) -> list[dict[str, Any]]:
    """One stream, with drafts that become worthless and good again."""
    engine = CutEngine(shape)
    return [{"draft": draft} | engine.load(1, 30, seed, draft) for draft in TURNS]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--drafts", default="good,poor,worthless,slow,trie,none", type=comma_separated(str))
    parser.add_argument("--shapes", default="cpu,avx2,gpu", type=comma_separated(str))
    parser.add_argument("--streams", default="1,4,16", type=comma_separated(int))
    parser.add_argument("--parts", default="alone,turns", type=comma_separated(str))
    parser.add_argument("--seeds", default="1,2", type=comma_separated(int))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {"alone": [], "turns": []}
    for shape, seed in itertools.product(options.shapes, options.seeds):
        of = {"shape": shape, "seed": seed}
        if "alone" in options.parts:
            for draft, streams in itertools.product(options.drafts, options.streams):
                results["alone"].append(of | {"draft": draft} | alone(SHAPES[shape], draft, streams, seed))
        if "turns" in options.parts:
            results["turns"] += [of | one for one in turns(SHAPES[shape], seed)]
    for name in options.parts:
        show(f"{name}\n{record_table(results[name])}")
    write_json(options.json, {**provenance("loads.host_cuts"), "settings": settings_of(options), "results": results})


if __name__ == "__main__":
    main()
