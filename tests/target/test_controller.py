"""How many rows the device chooses: what that loses to the best that could be done."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import numpy as np
import pytest
from engine_harness import make_runner, request
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from target_service.core.schedule import Schedule, SequenceChunk
from target_service.core.sequence import DevicePass, SequenceRequest
from target_service.execution.batch import DeviceRows
from target_service.model.cuda_graphs.sizes import row_sizes
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.controller import SpeculationController
from target_service.speculation.policy.estimates import POOLED, PassTimes, pooled
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.node_table.layout import KEPT, PROSPECTS
from tree_kernels.verification import Walk

pytestmark = pytest.mark.values

MAX_ROWS = 256
# No node is surer on the device.
SUREST = 0.98
# What a distribution of drafts is about: texts that are drafted well or badly.
CONTEXTS, NODES, LOOKED_UP = 6, 90, 15


class Device(NamedTuple):
    """Seconds: of a pass with as many rows as cost nothing, and of each further one; and how much longer a pass takes
    whose states a draft reads."""

    one_pass: float
    free_rows: int
    row: float
    following: float = 0.03

    def seconds(self, sequences: int, rows: int, *, followed: bool) -> float:
        more = max(0, max(sequences, rows) - self.free_rows)
        return (self.one_pass + self.row * more) * (1 + self.following * followed)

    @property
    def cost(self) -> StepCost:
        return StepCost([(rows, self.seconds(1, rows, followed=False)) for rows in (1, 4, 16, 64, 256)])


DEVICES = {
    # An 8B model.
    "large": Device(6e-3, 32, 4e-5),
    "small": Device(8e-4, 16, 1e-5),
    # Rows take time from the first on, as without tensor cores.
    "by the row": Device(6e-3, 1, 3e-4),
    "free": Device(6e-3, 300, 0.0),
}


class Node(NamedTuple):
    """What may follow a root: the chance that the device takes its path for, and the true one."""

    parent: int
    expected: float
    true: float
    of_table: bool


class Ranked(NamedTuple):
    """The root and what may follow it, the best of these, what each of the best promises, negated, what the first n of
    them promise and make, the root's own included, and of those of a table how many they are and what they promise; and
    which of the best, by their places, follow each node."""

    nodes: list[Node]
    best: list[int]
    costs: list[float]
    expected: list[float]
    makes: list[float]
    of_table: list[int]
    expected_of_table: list[float]
    below: dict[int, list[int]]


@dataclass
class Drafts:
    """A distribution of drafts: trees whose nodes are as likely as they say, times `quality` for each; `lookups` of the
    texts
    repeat themselves, for which each of the tokens looked up is right with the chance `repeats`."""

    sureness: float = 0.7
    quality: float = 0.9
    lookups: float = 0.0
    repeats: float = 0.8
    seed: int = 0
    texts: list[tuple[list[int], list[float], bool]] = field(default_factory=list)
    _known: dict[tuple[int, float, bool], Ranked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        for _ in range(CONTEXTS):
            sureness = min(0.95, max(0.05, dice.gauss(self.sureness, 0.2)))
            parents, scores = grown(dice, sureness if self.sureness else 0.0)
            self.texts.append((parents, scores, dice.random() < self.lookups))

    def ranked(self, text: int, trust: float, *, followed: bool) -> Ranked:
        """What may follow a root."""
        key = text, round(trust, 2), followed
        if key not in self._known:
            nodes = self._nodes(*key)
            best = sorted(range(1, len(nodes)), key=lambda node: (-nodes[node].expected, node))[:KEPT]
            expected, true = (
                [0.0, *itertools.accumulate(chances)]
                for chances in ([nodes[node].expected for node in best], [nodes[node].true for node in best])
            )
            costs = [before - after for before, after in itertools.pairwise(expected)]
            of_table = [0, *itertools.accumulate(int(nodes[node].of_table) for node in best)]
            promised = (nodes[node].expected * nodes[node].of_table for node in best)
            below = dict[int, list[int]]()
            for place, node in enumerate(best):
                below.setdefault(nodes[node].parent, []).append(place)
            expected_of_table = [0.0, *itertools.accumulate(promised)]
            makes = [1 + tokens for tokens in true]
            self._known[key] = Ranked(nodes, best, costs, expected, makes, of_table, expected_of_table, below)
        return self._known[key]

    def _nodes(self, text: int, trust: float, followed: bool) -> list[Node]:
        parents, scores, repeats = self.texts[text]
        nodes = [Node(-1, 1.0, 1.0, True)]
        for parent, score in zip(parents, scores, strict=True) if followed else ():
            above = nodes[parent]
            chances = above.expected * min(SUREST, score * trust), above.true * score * self.quality
            nodes.append(Node(parent, *chances, True))
        parent, left = 0, 1 - sum(node.true for node in nodes[1:] if not node.parent)
        for place in range(LOOKED_UP if repeats else 0):
            above = nodes[parent]
            chance = self.repeats * (1.0 if place else left)
            nodes.append(Node(parent, above.expected * self.repeats, above.true * chance, False))
            parent = len(nodes) - 1
        return nodes


def grown(dice: random.Random, sureness: float) -> tuple[list[int], list[float]]:
    """Parents and scores of a tree whose likeliest children take about so much of what is left of their parents."""
    parents: list[int] = []
    scores: list[float] = []
    left, path = [1.0], [1.0]
    for _ in range(NODES if sureness else 0):
        parent = max(range(len(path)), key=lambda node: path[node] * left[node] * dice.uniform(0.3, 1))
        score = left[parent] * min(0.97, max(0.02, dice.gauss(sureness, 0.15)))
        left[parent] -= score
        parents.append(parent)
        scores.append(score)
        left.append(1.0)
        path.append(path[parent] * score)
    return parents, scores


def mode_of(*, followed: bool) -> LaunchMode | None:
    return LaunchMode.RUN_AHEAD if followed else None


def best_first(ranked: Sequence[Ranked], most: Sequence[int]) -> list[int]:
    """The root that each row goes to, the best row of all first."""
    gains = [(gain, place) for place, one in enumerate(ranked) for gain in one.costs[: most[place]]]
    return [place for _, place in sorted(gains)]


def given_out(order: Sequence[int], sizes: Sequence[int], roots: int) -> dict[int, list[int]]:
    """How many of so many rows each root gets, for sizes that grow."""
    counts, given, found = [0] * roots, 0, {}
    for rows in sizes:
        for place in order[given : max(given, rows)]:
            counts[place] += 1
        given, found[rows] = max(given, rows), counts.copy()
    return found


class Launch(NamedTuple):
    """One launch: what it had, what it was expected to make, and what each size would have been."""

    rows: int
    followed: bool
    tokens: float
    could: dict[int, float]


class Engine:
    """Sequences with such drafts, on such a device. What a pass was is known when the next has been chosen."""

    def __init__(self, runner: ModelRunner, device: Device, drafts: Drafts, sequences: int = 1, seed: int = 0) -> None:
        self.live: dict[int, LiveSequence] = {}
        self.policy = SpeculationController(KEPT, device.cost, self.live)
        self.launches: list[Launch] = []
        self.drafts = drafts
        # Whether a draft is there.
        self.drafted = True
        self._device = device
        self._sequences = sequences
        self._dice = random.Random(seed)
        self._schedule = schedule(runner, self.live, *[request([5, 7], 1 << 30)] * sequences)
        self._sizes = (0, *(size for size in row_sizes(MAX_ROWS) if size > sequences))
        self._last: tuple[list[Verified | None], DeviceRows | None, float, bool] | None = None

    def run(self, passes: int) -> None:
        for _ in range(passes):
            followed = self.drafted
            rows = self.policy.choose(self._schedule, MAX_ROWS, mode_of(followed=followed))
            self._learn()
            self._launch(rows, followed=followed)

    def seconds(self, rows: int, *, followed: bool) -> float:
        return self._device.seconds(self._sequences, rows, followed=followed)

    def _learn(self) -> None:
        if self._last is not None:
            outcomes, rows, took, followed = self._last
            self.policy.observe_passes(outcomes, mode_of(followed=followed), [True] * len(outcomes))
            self.policy.observe_time(self._sequences, rows.rows if rows else 0, took, mode_of(followed=followed))

    def _launch(self, rows: DeviceRows | None, *, followed: bool) -> None:
        size = rows.rows if rows is not None else 0
        assert size in self._sizes
        texts = [self._dice.randrange(CONTEXTS) for _ in range(self._sequences)]
        all_ranked = [self.drafts.ranked(text, self.policy.trust, followed=followed) for text in texts]
        most = rows.limits if rows is not None else (KEPT,) * self._sequences
        order = best_first(all_ranked, most)
        given = given_out(order, [each - self._sequences for each in self._sizes], self._sequences)
        shares = {each: given[each - self._sequences] for each in self._sizes}
        makes = [ranked.makes for ranked in all_ranked]
        could = {each: sum(map(operator.getitem, makes, own)) for each, own in shares.items()}
        outcomes = []
        for place, ranked in enumerate(all_ranked):
            said = self._pass(ranked, shares[size][place], rows.limits[place]) if rows is not None else None
            outcomes.append(said or Verified(Walk((), 3), ()))
        took = self.seconds(size, followed=followed) * self._dice.lognormvariate(0, 0.03)
        self.launches.append(Launch(size, followed, could[size], could))
        self._last = outcomes, rows, took, followed

    def _pass(self, ranked: Ranked, taken: int, limit: int) -> Verified:
        """Of which so many rows are `taken`, and as many ranked as the `limit` allows."""
        nodes, best, expected = ranked.nodes, ranked.best, ranked.expected
        taken, limit = min(taken, len(best)), min(limit, len(best))
        path: list[int] = []
        at = 0
        while at >= 0:
            below = [best[place] for place in ranked.below.get(at, ()) if place < taken]
            drawn, upto = self._dice.random() * nodes[at].true, itertools.accumulate(nodes[node].true for node in below)
            at = next((node for node, end in zip(below, upto, strict=True) if drawn < end), -1)
            path += [at] if at >= 0 else []
        one = DevicePass(
            drafted=taken,
            drafted_from_table=ranked.of_table[taken],
            accepted=len(path),
            accepted_from_table=sum(nodes[node].of_table for node in path),
            expected=expected[taken],
            expected_from_table=ranked.expected_of_table[taken],
            prospects=tuple(expected[min(count, limit)] for count in PROSPECTS),
            root_row=0,
            path=(),
        )
        return Verified(Walk((), 3), (), (3,) * len(path), (one,))

    def makes(self, rows: int) -> float:
        """Tokens of a pass with so many rows of these sequences, on average."""
        seen = self.launches[-200:]
        dice, found = random.Random(1), 0.0
        for _ in seen:
            texts = [dice.randrange(CONTEXTS) for _ in range(self._sequences)]
            ranked = [self.drafts.ranked(text, self.policy.trust, followed=self.drafted) for text in texts]
            order = best_first(ranked, (KEPT,) * self._sequences)
            (counts,) = given_out(order, [rows - self._sequences], self._sequences).values()
            found += sum(one.makes[count] for one, count in zip(ranked, counts, strict=True))
        return found / len(seen)

    def lost(self, launches: list[Launch]) -> float:
        """The share of the tokens a second that the best size would have made, always."""

        def rate(of: Callable[[Launch], tuple[float, int]]) -> float:
            seconds = sum(self.seconds(of(one)[1], followed=one.followed) for one in launches)
            return sum(of(one)[0] for one in launches) / seconds

        best = max(rate(lambda one, size=size: (one.could[size], size)) for size in self._sizes)  # type: ignore[misc]
        return 1 - rate(lambda one: (one.tokens, one.rows)) / best

    def in_rows(self, launches: list[Launch]) -> float:
        """The share of the time that rows took."""
        whole = sum(self.seconds(one.rows, followed=one.followed) for one in launches)
        return 1 - sum(self.seconds(0, followed=one.followed) for one in launches) / whole


def schedule(runner: ModelRunner, live: dict[int, LiveSequence], *requests: SequenceRequest) -> Schedule:
    """All of them decode."""
    live.clear()
    for number, one in enumerate(requests):
        live[number] = LiveSequence.of(number, one, runner)
        live[number].sequence.kv_length = len(one.token_ids) - 1
    return Schedule(tuple(SequenceChunk(one.sequence, 1) for one in live.values()))


@pytest.fixture
def runner(tiny_model: PreTrainedModel) -> ModelRunner:
    return make_runner(tiny_model)


GOOD = Drafts()
DISTRIBUTIONS = {
    "good": {},
    "good, and repeats": {"lookups": 0.5},
    "poor": {"sureness": 0.4, "quality": 0.6},
    "promises too much": {"sureness": 0.8, "quality": 0.4},
    "repeats alone": {"sureness": 0.0, "lookups": 0.5},
    "nothing": {"sureness": 0.0},
}


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_chosen_makes_nearly_what_the_best_size_makes(
    runner: ModelRunner, device: str, distribution: str, sequences: int
) -> None:
    engine = Engine(runner, DEVICES[device], Drafts(**DISTRIBUTIONS[distribution]), sequences)  # type: ignore[arg-type]
    engine.drafted = bool(engine.drafts.sureness)
    # What is not worth it is tried after pauses that double up to 1,024 launches: the last of them ends near 2,000.
    engine.run(2200 if device == "large" else 1200)
    assert engine.lost(engine.launches[:400]) < 0.1
    assert engine.lost(engine.launches[200:]) < 0.03


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("device", ["large", "by the row", "free"])
@pytest.mark.parametrize("lookups", [0.0, 0.5])
def test_a_worthless_draft_gets_few_rows(runner: ModelRunner, device: str, sequences: int, lookups: float) -> None:
    """Followed or not is not decided here."""
    engine = Engine(runner, DEVICES[device], Drafts(quality=0.0, lookups=lookups), sequences)
    engine.run(320)
    assert engine.policy.trust < 0.97
    if not lookups:
        engine.run(2700)
        assert engine.in_rows(engine.launches[320:]) < 0.02


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("device", ["large", "by the row"])
def test_a_good_draft_gets_rows_soon_after_it_is_followed(runner: ModelRunner, device: str, sequences: int) -> None:
    """One that was not followed meanwhile, since the last was worthless."""
    engine = Engine(runner, DEVICES[device], Drafts(quality=0.0), sequences)
    engine.run(300)
    engine.drafted = False
    engine.run(300)
    engine.drafted, engine.drafts = True, Drafts(seed=2)
    engine.run(500)
    assert engine.lost(engine.launches[-200:]) < 0.1


def test_trust_finds_what_scores_are_worth(runner: ModelRunner) -> None:
    """And comes back with them."""
    engine = Engine(runner, DEVICES["free"], Drafts(quality=0.6))
    engine.run(2000)
    low = engine.policy.trust
    engine.drafts = Drafts(quality=1.0)
    engine.run(2000)
    assert 0.45 < low < 0.75 and 0.85 < engine.policy.trust < 1.15


@pytest.mark.parametrize(("known", "sequences"), [(1, 8), (8, 1), (8, 64)])
def test_the_first_answers_at_a_load_lose_little(runner: ModelRunner, known: int, sequences: int) -> None:
    """The first eight, of some sixty passes, where another load is known: a tenth at most."""
    before = Engine(runner, DEVICES["large"], GOOD, known)
    before.run(400)
    engine = Engine(runner, DEVICES["large"], GOOD, sequences, seed=1)
    engine.policy, before.policy._live = before.policy, engine.live
    engine.run(60)
    assert engine.lost(engine.launches) < 0.1


def test_a_load_whose_rows_are_dear_does_not_judge_another(runner: ModelRunner) -> None:
    """Times are told apart by the load."""
    live: dict[int, LiveSequence] = {}
    policy = SpeculationController(KEPT, DEVICES["large"].cost, live)
    steps = {count: schedule(runner, live, *[request([5, 7], 99)] * count) for count in (1, 8)}
    chosen: dict[int, list[int]] = {1: [], 8: []}
    for turn in range(800):
        count = (1, 8)[turn // 100 % 2]
        schedule(runner, live, *[request([5, 7], 99)] * count)
        rows = policy.choose(steps[count], MAX_ROWS, None)
        size = rows.rows if rows is not None else 0
        policy.observe_time(count, size, 1.0 + size * (count == 8), None)
        chosen[count].append(size)
    assert chosen[1][100:].count(0) < 30 and chosen[8][100:].count(0) > 250


def test_forms_whose_rows_are_dear_judge_no_other_texts(runner: ModelRunner) -> None:
    """At one load, and the other way round: with forms rows take masks, and bring what is forced."""
    form = SamplingParams(structured_output=StructuredOutput(json_object=True))
    for dear in (False, True):
        live: dict[int, LiveSequence] = {}
        policy = SpeculationController(KEPT, DEVICES["large"].cost, live)
        chosen: dict[bool, list[int]] = {False: [], True: []}
        for turn in range(800):
            forms = turn // 100 % 2 == 1
            step = schedule(runner, live, *[request([5, 7], 99, sampling=form if forms else SamplingParams())] * 8)
            rows = policy.choose(step, MAX_ROWS, None)
            size = rows.rows if rows is not None else 0
            policy.observe_time(8, size, 1.0 + size * (forms is dear), None, forms=forms)
            chosen[forms].append(size)
        assert chosen[dear][100:].count(0) > 250 and chosen[not dear][100:].count(0) < 30


def test_what_a_pass_takes_is_known_from_other_loads_modes_and_sizes() -> None:
    times, ahead = PassTimes(StepCost([(1, 1.0), (64, 2.0), (256, 4.0)])), LaunchMode.RUN_AHEAD
    assert times.expected((0, 64), 1, ahead) == pytest.approx({0: 1.0, 64: 2.0})
    for _ in range(20):
        # Half as long again as such passes of one sequence.
        times.observe_pass(1, 64, 3.0, ahead)
    assert times.measured(1, ahead) == pytest.approx({64: 3.0})
    assert times.expected((0, 64, 256), 1, ahead) == pytest.approx({0: 1.5, 64: 3.0, 256: 6.0})
    assert times.expected((0, 64), 1, None) == pytest.approx({0: 1.5, 64: 3.0})
    assert times.measured(64, ahead) == {}
    times.forget((64,), 1, ahead)
    assert times.measured(1, ahead) == {}


@pytest.mark.parametrize("load", [32, pytest.param(64, marks=pytest.mark.full), 128])
def test_rows_beside_prompts_that_are_left_unread_bring_more_than_rows_of_prompts(
    runner: ModelRunner, load: int
) -> None:
    """They are no wider than in passes without prompts, where a row takes less time."""
    engine = Engine(runner, Device(6.5e-3, 32, 1.4e-5), GOOD, sequences=load)
    engine.run(100)
    seconds, rate = engine.policy.times, engine.launches[-50:]
    assert seconds is not None
    per_second = sum(one.tokens for one in rate) / sum(engine.seconds(one.rows, followed=True) for one in rate)
    drafted = engine.policy.beside_prompts(load, 768)

    def lost(count: int) -> float:
        """Tokens for each row of a prompt."""
        return (per_second * seconds.cost(768) - engine.makes(load + count)) / (768 - load - count)

    assert 0 <= drafted <= 384 and drafted + load < 768
    assert lost(drafted) < 1.05 * min(lost(int(each * load)) for each in (0, 0.25, 0.5, 1, 3))
    # There is no room beside so few.
    assert engine.policy.beside_prompts(load, 2 * load) == 0


@pytest.mark.parametrize("load", [1, 8])
def test_few_sequences_leave_prompts_nearly_all_rows(runner: ModelRunner, load: int) -> None:
    """Who waits for a first token waits for theirs as well."""
    engine = Engine(runner, Device(6.5e-3, 32, 1.4e-5), GOOD, sequences=load)
    engine.run(100)
    usual = engine.launches[-1].rows - load
    assert engine.policy.beside_prompts(load, 768) <= min(4 * load, usual // 2)


@pytest.mark.parametrize(("unread", "rows"), [(0, 192), (1, None)])
def test_a_pass_is_made_larger_for_drafts_unless_prompts_wait(
    runner: ModelRunner, unread: int, rows: int | None
) -> None:
    engine = Engine(runner, DEVICES["small"], GOOD, sequences=4)
    engine.run(200)
    step = replace(beside_a_prompt(engine, 124, runner), unread=unread)
    chosen = engine.policy.choose(step, MAX_ROWS, mode_of(followed=True))
    assert (chosen.rows if chosen is not None else None) == rows


class Policies:
    """Policies over sequences that begin."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.live: dict[int, LiveSequence] = {}

    def rows(
        self, policy: SpeculationController, *requests: SequenceRequest, max_rows: int = MAX_ROWS
    ) -> DeviceRows | None:
        return policy.choose(schedule(self._runner, self.live, *requests), max_rows, None)


@pytest.fixture
def policies(runner: ModelRunner) -> Iterator[Policies]:
    yield Policies(runner)


PLAIN = request([5, 7], 99)


def test_without_costs_as_many_as_are_allowed(policies: Policies) -> None:
    policy = SpeculationController(KEPT, None, policies.live)
    assert policies.rows(policy, PLAIN) == DeviceRows(64, (63,))
    assert policies.rows(policy, PLAIN, PLAIN) == DeviceRows(128, (63, 63))
    assert policies.rows(policy, *[PLAIN] * 8) == DeviceRows(256, (63,) * 8)
    # The smallest size that holds all that are allowed.
    assert policies.rows(SpeculationController(3, None, policies.live), PLAIN) == DeviceRows(4, (3,))
    assert policies.rows(SpeculationController(5, None, policies.live), PLAIN, PLAIN) == DeviceRows(16, (5, 5))
    assert policies.rows(SpeculationController(1000, None, policies.live), PLAIN) == DeviceRows(64, (63,))
    none = SpeculationController(0, None, policies.live)
    assert not none.on and policies.rows(none, PLAIN) is None


@pytest.mark.parametrize("max_rows", [4, 6, 16, 32, 63, 64, 200])
@pytest.mark.parametrize("costed", [True, False])
def test_steps_have_only_so_many_rows(policies: Policies, max_rows: int, costed: bool) -> None:
    policy = SpeculationController(KEPT, DEVICES["free"].cost if costed else None, policies.live)
    sizes = set()
    for turn in range(60):
        rows = policies.rows(policy, *[PLAIN] * 4, max_rows=max_rows)
        sizes.add(rows.rows if rows is not None else 0)
        if rows is not None:
            assert rows.rows <= max_rows and all(most <= rows.rows - 4 for most in rows.most)
        policy.observe_time(4, rows.rows if rows else 0, 1e-3 * (1 + turn % 3), None)
    assert sizes <= {0, *(size for size in row_sizes(max_rows) if size > 4)}
    assert (sizes == {0}) is (max_rows == 4)


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, (63, 63)),
        ({"max_draft_nodes": 5}, (63, 5)),
        ({"max_draft_nodes": 0}, (63, 0)),
        ({"speculate": False}, (63, 0)),
        ({"max_tokens": 9}, (63, 63)),
        ({"max_tokens": 4}, (63, 24)),
        ({"max_tokens": 1}, (63, 0)),
        ({"external": True}, (0, 63)),
        ({"mode": VerificationMode.REJECTION}, (0, 63)),
        ({"sampling": SamplingParams(structured_output=StructuredOutput(regex="a+"))}, (63, 63)),
        ({"sampling": SamplingParams(repetition_penalty=1.2, logprobs=3)}, (63, 63)),
    ],
)
def test_those_get_them_who_want_them(policies: Policies, changes: dict[str, object], limits: tuple[int, ...]) -> None:
    """A sequence for which the device cannot choose any stands first, and takes none of the others'."""
    policy = SpeculationController(KEPT, None, policies.live)
    rows = policies.rows(policy, PLAIN, replace(PLAIN, **changes))  # type: ignore[arg-type]
    assert rows is not None and rows.limits == limits
    assert rows.laid_out == rows.laid_out_rows == int(limits[0] == 0)


def test_nothing_is_drafted_past_the_last_token(runner: ModelRunner) -> None:
    live: dict[int, LiveSequence] = {}
    policy = SpeculationController(KEPT, None, live)
    steps = schedule(runner, live, replace(PLAIN, max_tokens=20))
    sequence = live[0].sequence
    sequence.totals.completion_tokens, sequence.pending_tokens = 12, 4
    sequence.kv_length += 4
    # Several guesses for each of the three tokens before it.
    assert policy.choose(steps, MAX_ROWS, None) == DeviceRows(32, (24,))
    sequence.totals.completion_tokens = 15
    assert policy.choose(steps, MAX_ROWS, None) is None


def test_those_who_want_none_alone_get_none(policies: Policies) -> None:
    policy = SpeculationController(KEPT, None, policies.live)
    assert policies.rows(policy, *[replace(PLAIN, speculate=False)] * 2) is None


def beside_a_prompt(engine: Engine, rows: int, runner: ModelRunner, **changes: object) -> Schedule:
    """The engine's sequences behind one that reads so many rows of its prompt."""
    prompt = replace(request([1] * (rows + 9), 9), **changes)  # type: ignore[arg-type]
    reader = LiveSequence.of(999, prompt, runner)
    engine.live[999] = reader
    return Schedule((SequenceChunk(reader.sequence, rows), *engine._schedule.chunks))


@pytest.mark.parametrize(("read", "rows"), [(5, 64), (27, 64), (33, 128), (100, 192), (240, 256)])
def test_drafted_rows_stand_behind_those_that_are_read(runner: ModelRunner, read: int, rows: int) -> None:
    engine = Engine(runner, DEVICES["free"], GOOD, sequences=4)
    engine.policy = SpeculationController(7, None, engine.live)
    found = engine.policy.choose(beside_a_prompt(engine, read, runner), MAX_ROWS, None)
    # Room for all that may be drafted, or as much as a step has.
    assert found == DeviceRows(rows, (0, *[7] * 4), 1, read)
    assert found.most == (0, *[min(7, rows - read - 4)] * 4)


def test_a_prompt_may_leave_no_room(runner: ModelRunner) -> None:
    engine = Engine(runner, DEVICES["free"], GOOD, sequences=4)
    assert engine.policy.choose(beside_a_prompt(engine, MAX_ROWS, runner), MAX_ROWS, None) is None


def test_where_all_read_there_are_none(runner: ModelRunner) -> None:
    engine = Engine(runner, DEVICES["free"], GOOD)
    alone = Schedule(beside_a_prompt(engine, 20, runner).chunks[:1])
    assert engine.policy.choose(alone, MAX_ROWS, None) is None


@pytest.mark.parametrize("device", ["large", "by the row"])
@pytest.mark.parametrize("distribution", ["good", "nothing"])
@pytest.mark.parametrize("read", [9, 40, 100, 130])
def test_rows_beside_prompts_are_worth_their_time(
    runner: ModelRunner, device: str, distribution: str, read: int
) -> None:
    """A step with a prompt and those of the same time without one make nearly what the best size of it would."""
    drafts = Drafts(**DISTRIBUTIONS[distribution])  # type: ignore[arg-type]
    engine = Engine(runner, DEVICES[device], drafts, sequences=8)
    engine.run(400)
    chosen = engine.policy.choose(beside_a_prompt(engine, read, runner), MAX_ROWS, mode_of(followed=True))
    without = engine.launches[-200:]
    rate = sum(one.tokens for one in without) / sum(engine.seconds(one.rows, followed=True) for one in without)
    held = next(size for size in row_sizes(MAX_ROWS) if size >= read + 8)
    sizes = [size for size in row_sizes(MAX_ROWS) if size >= held]
    said = {size: engine.makes(size - read) for size in sizes}
    # A step of prompts and roots alone is as large as the smallest size that holds it.
    worth = {size: said[size] - rate * engine.seconds(size, followed=True) for size in sizes}
    worth[0] = 8 - rate * engine.seconds(held, followed=True)
    best = max(worth.values())
    mine = worth[chosen.rows if chosen is not None else 0]
    assert best - mine < 0.05 * rate * engine.seconds(held, followed=True)
    if distribution == "good" and read == 100:
        assert chosen is not None and chosen.laid_out_rows == 100


def test_many_sequences_are_drafted_for_where_some_are_sure(runner: ModelRunner) -> None:
    """A pass of 192 rows has half a row for each of 128 sequences, and it goes to the surest. Times are those of an 8B
    shape on an H100, with up to 256 rows."""
    engine = Engine(runner, Device(6.5e-3, 32, 1.4e-5), Drafts(), sequences=128)
    engine.run(150)
    last = engine.launches[-50:]
    plain = sum(one.could[0] / engine.seconds(0, followed=True) for one in last)
    assert sum(one.tokens / engine.seconds(one.rows, followed=True) for one in last) > 1.3 * plain
    assert engine.lost(last) < 0.05


def test_a_full_pass_of_prompts_is_not_made_larger_for_drafts(runner: ModelRunner) -> None:
    engine = Engine(runner, DEVICES["by the row"], GOOD, sequences=4)
    engine.run(200)
    assert engine.policy.choose(beside_a_prompt(engine, 124, runner), MAX_ROWS, mode_of(followed=True)) is None
    assert engine.policy.choose(beside_a_prompt(engine, 100, runner), MAX_ROWS, mode_of(followed=True)) is not None


def test_a_draft_is_worth_more_rows_of_a_prompt_with_fewer_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    # A pass takes 5 ms, and 0.02 ms more for each row beyond the first.
    controller = SpeculationController(16, StepCost([(1, 5e-3), (1001, 25e-3)]), {})
    assert controller.rows_worth_a_draft(1, 100) == inf
    gain = {1: 1.5, 32: 1.1, 128: 1.0}
    monkeypatch.setattr(controller.draft_gate, "gain", gain.get)
    # One alone takes 100 passes of 5 ms with it, and half as many more without.
    assert controller.rows_worth_a_draft(1, 100) == pytest.approx(100 * 5e-3 * 0.5 / 2e-5)
    # Of 32, each takes a part of passes of 5.62 ms.
    assert controller.rows_worth_a_draft(32, 100) == pytest.approx(100 * 5.62e-3 / 32 * 0.1 / 2e-5)
    assert controller.rows_worth_a_draft(128, 100) == 0


def test_above_a_load_there_are_none(policies: Policies) -> None:
    policy = SpeculationController(KEPT, None, policies.live, disable_above=3)
    assert policies.rows(policy, *[PLAIN] * 3) is not None
    assert policies.rows(policy, *[PLAIN] * 4) is None


def test_tokens_of_a_pass_are_followed(runner: ModelRunner) -> None:
    engine = Engine(runner, DEVICES["free"], GOOD)
    assert engine.policy.tokens_each.value == 1.0
    engine.run(1000)
    each = sum(one.tokens for one in engine.launches[-300:]) / 300
    assert engine.policy.tokens_each.value == pytest.approx(each, rel=0.2)
    # And forgotten with passes that have none.
    for _ in range(300):
        engine.policy.observe_passes([Verified(Walk((), 3), ()), None], None, [False, False])
    assert engine.policy.tokens_each.value == pytest.approx(1.0, rel=0.01)


def shared_out(prospects: Sequence[Sequence[float]]) -> list[float]:
    """The definition of `pooled`: all sequences' ranges of rows in order of their tokens a row."""
    steps, gains = np.diff(PROSPECTS, prepend=0), np.diff(np.array(prospects), prepend=0.0)
    order = np.argsort(-(gains / steps).ravel(), kind="stable")
    rows = np.cumsum(np.broadcast_to(steps, gains.shape).ravel()[order])
    expected = np.append(0.0, np.cumsum(gains.ravel()[order]))
    return list(np.interp(np.array(POOLED) * len(gains), np.append(0, rows), expected) / len(gains))


@pytest.mark.parametrize("sequences", [1, 2, 3, 32, 64])
def test_rows_of_all_sequences_are_pooled(sequences: int) -> None:
    dice = random.Random(sequences)
    for _ in range(20):
        # Some are alike, and some bring nothing.
        a_row = [sorted((dice.choice([0.0, 0.25, dice.random()]) for _ in PROSPECTS), reverse=True)] * sequences
        a_row = [[dice.choice([1.0, 0.5]) * chance for chance in one] for one in a_row]
        counts = np.diff(PROSPECTS, prepend=0)
        prospects = [tuple(np.cumsum(counts * sorted(one, reverse=True)).tolist()) for one in a_row]
        assert pooled(prospects) == pytest.approx(shared_out(prospects), abs=1e-9)
