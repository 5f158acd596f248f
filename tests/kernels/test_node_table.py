"""Rows that the device chooses: the rule, what its reference makes of it, and the kernels against that."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_worker import INTERPRETED, work
from preorder_tables import preorder
from random_steps import random_step
from random_tables import (
    CASES,
    LAST_POSITION,
    MAX_SEQUENCES,
    PASSES,
    Case,
    assign_slots,
    given_for,
    random_tree,
    random_verdicts,
    reports_of,
    run_pass,
    shifted_by_accepted,
    table_for,
)

from tree_kernels.node_table import Mailboxes, NodeTable, StepIntegers, layout, longest_run, recycling
from tree_kernels.node_table import torch_backend as _torch_node_table
from tree_kernels.node_table.layout import (
    COST_OF_HALVING,
    KEPT,
    KEYS_PER_COST,
    LONGEST,
    LOOKUP,
    MAX_PATH,
    MOST_COST,
    NO_KEY,
    NODES,
    PROSPECTS,
    REPORT,
    REPORT_TOKENS,
    REUSE_COST,
    SUBSTITUTION_COST,
    TABLE,
    ReportField,
)
from tree_kernels.node_table.torch_backend import (
    LookupChain,
    NodeCandidate,
    Nodes,
    best,
    bound_for,
    candidates,
    donor,
    look_up,
    nodes_of,
    text_of,
    walk,
)
from tree_kernels.verification import RECORD, Verdicts, match_walk
from tree_kernels.verification.records import FIRST_ROW, IS_CHAIN, ROWS

WORKER = "node_table_worker.py"
Path = tuple[int, ...]
SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize(
    ("text", "run", "behind"),
    [
        # The longer of two runs, though it is not the last.
        ([1, 2, 3, 9, 2, 3, 4, 5, 1, 2, 3], 3, [9, 2]),
        # Of equally long ones the last.
        ([7, 1, 8, 1, 9, 1], 1, [9, 1]),
        ([5, 1, 2, 1, 2], 2, [1, 2]),
        ([3, 3], 1, [3]),
        # Nothing stood there before.
        ([1, 2, 3], 0, [3]),
        ([4], 0, [4]),
    ],
)
def test_what_is_looked_up(text: list[int], run: int, behind: list[int]) -> None:
    found = longest_run(text)
    assert found.length == run and text[found.end :][: len(behind)] == behind


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_it_is_a_longest_run(text: list[int]) -> None:
    found = longest_run(text)
    runs = [
        max(run for run in range(LONGEST + 1) if run <= j + 1 and text[j + 1 - run : j + 1] == text[len(text) - run :])
        for j in range(len(text) - 1)
    ]
    assert found.length == max(runs, default=0)
    if found.length:
        assert found.end == max(range(len(runs)), key=lambda j: (runs[j], j)) + 1


def test_a_chain_goes_on_with_itself_and_costs_by_its_run() -> None:
    chain = look_up([5, 1, 2, 1, 2], 5)
    assert chain == LookupChain([1, 2, 1, 2, 1], layout.FIRST_COST[2], layout.NEXT_COST[2])
    assert look_up([1, 2, 3], 5) == look_up([1, 1], 0) == LookupChain([], 0, 0)
    # A cost is of the chance that it is right.
    assert layout.FIRST_COST[2] == round(-COST_OF_HALVING * torch.tensor(layout.RIGHT[2][0]).log2().item())


def test_what_fits() -> None:
    assert NODES + LOOKUP < KEYS_PER_COST and TABLE == 2 + 5 * NODES
    assert REPORT == REPORT_TOKENS + (MAX_PATH + 1) + MAX_PATH and KEPT == 63
    assert ReportField.FIRST_PROSPECT + len(PROSPECTS) <= REPORT_TOKENS and PROSPECTS[-1] <= KEPT
    with pytest.raises(ValueError, match="16"):
        NodeTable(torch.zeros(4).int(), 4, 9, max_sequences=1, max_passes=1, lookup_tokens=16)


def test_a_table_by_hand() -> None:
    """Children keep their order, and each is followed by all that is below it."""
    table = preorder([9, 4, 5, 6, 7], [-1, 0, 0, 1, 2], [0, 10, 20, 15, 50], 33)
    assert table[:2].tolist() == [33, 5]
    assert table[2:].reshape(5, NODES)[:, :5].tolist() == [
        [9, 4, 6, 5, 7], [0, 0, 1, 0, 3], [5, 3, 3, 5, 5], [0, 1, 2, 1, 2], [0, 10, 15, 20, 50],
    ]  # fmt: skip


def paths_of(tokens: list[int], parents: list[int]) -> list[Path]:
    """Of every node the tokens on its way down from the root, without the root's."""
    paths: list[Path] = [()]
    for i in range(1, len(tokens)):
        paths.append((*paths[parents[i]], tokens[i]))
    return paths


def tree_of(seed: int) -> tuple[list[int], list[int], list[int]]:
    rng = random.Random(seed)
    tokens, parents, costs = random_tree([0], rng.choice([1, 5, 40, 240]), rng.choice([2, 3, 5]), rng)
    return tokens, parents, costs


@given(SEEDS, st.lists(st.integers(0, 2), max_size=8), st.integers(1, 9))
def test_a_walk_ends_where_the_text_does(seed: int, text: list[int], base: int) -> None:
    tokens, parents, costs = tree_of(seed)
    table = preorder(tokens, parents, costs, base)
    nodes = nodes_of(torch.from_numpy(table))
    costs_by_path = dict(zip(paths_of(tokens, parents), costs, strict=True))
    place = walk(nodes, [1] * base + text, base - 1 + len(text))
    assert (place >= 0) == (tuple(text) in costs_by_path)
    if place >= 0:
        assert nodes.costs[place] == costs_by_path[tuple(text)] and nodes.depths[place] == len(text)
    # Of a text that has not come that far, or is farther than any node.
    assert walk(nodes, [1] * (base - 1), base - 2) == -1
    assert walk(nodes, [0] * 400, base - 1 + NODES) == -1


def wanted_below(seed: int, walked: int, chain: LookupChain) -> tuple[dict[Path, int], list[NodeCandidate], list[Path]]:
    """What may follow a node of a random tree, as costs by paths, and what the reference says, with its paths."""
    tokens, parents, costs = tree_of(seed)
    nodes = nodes_of(torch.from_numpy(preorder(tokens, parents, costs, 1)))
    every = paths_of(nodes.tokens, nodes.parents)
    place = walked % len(every) if walked >= 0 else -1
    wanted: dict[Path, int] = {}
    if place >= 0:
        depth = len(every[place])
        for path, cost in zip(every, nodes.costs, strict=True):
            if path[:depth] == every[place] and depth < len(path) <= depth + MAX_PATH:
                wanted[path[depth:]] = cost - nodes.costs[place]
    spent = above = 0
    for k, token in enumerate(chain.tokens):
        edge = chain.following if k else chain.first
        spent, path = spent + edge, (*chain.tokens[:k], token)
        above = min(wanted[path], spent) if path in wanted else above + edge
        wanted[path] = above
    # What is before it makes no difference.
    found = candidates(nodes, place, chain, nodes.parents[place] if place > 0 else -1)
    return wanted, found, paths_down(found)


def paths_down(found: list[NodeCandidate]) -> list[Path]:
    """Of every candidate the tokens on its way down from the present root."""
    by_number = {one.number: one for one in found}
    assert len(by_number) == len(found)

    def path_of(one: NodeCandidate) -> Path:
        return (*(path_of(by_number[one.parent]) if one.parent >= 0 else ()), one.token)

    return [path_of(one) for one in found]


CHAINS = st.builds(
    LookupChain,
    st.lists(st.integers(0, 2), max_size=LOOKUP),
    st.sampled_from([40, 2000, 9000]),
    st.sampled_from([7, 3000]),
)


@given(SEEDS, st.integers(-1, 240), CHAINS)
def test_candidates_are_what_hangs_below_and_the_chain(seed: int, walked: int, chain: LookupChain) -> None:
    wanted, found, paths = wanted_below(seed, walked, chain)
    assert {path: one.cost for path, one in zip(paths, found, strict=True)} == wanted
    # Paths are told apart, so that siblings' tokens are.
    assert len(wanted) == len(found) and all(one.depth == len(path) for one, path in zip(found, paths, strict=True))


@given(SEEDS, st.integers(-1, 240), CHAINS, st.integers(0, 80))
def test_the_best_are_the_cheapest_and_have_their_parents(
    seed: int, walked: int, chain: LookupChain, limit: int
) -> None:
    _, found, _ = wanted_below(seed, walked, chain)
    check_best(found, limit)


def check_best(found: list[NodeCandidate], limit: int) -> None:
    kept = best(found, limit)
    affordable = [one for one in found if one.cost < MOST_COST]
    assert len(kept) == min(limit, KEPT, len(affordable))
    assert [one.key for one in kept] == sorted(one.key for one in affordable)[: len(kept)]
    numbers = [-1] + [one.number for one in kept]
    assert all(one.parent in numbers[: 1 + rank] for rank, one in enumerate(kept))


@given(SEEDS, st.integers(0, 240), CHAINS, st.integers(0, 80))
def test_a_tree_is_realigned(seed: int, walked: int, chain: LookupChain, limit: int) -> None:
    """Behind a token that is no child of a node: what its likeliest child has below it, and the chain."""
    nodes = nodes_of(torch.from_numpy(preorder(*tree_of(seed), 1)))
    every = paths_of(nodes.tokens, nodes.parents)
    costs = dict(zip(every, nodes.costs, strict=True))
    before = every[walked % len(every)]
    children = [path for path in every if path[:-1] == before and path]
    # By paths in the table.
    wanted: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
    if children:
        # Of equally likely ones the first.
        likeliest = min(children, key=lambda path: costs[path])
        depth = len(likeliest)
        for path in every:
            if path[:depth] == likeliest and depth < len(path) <= depth + MAX_PATH:
                wanted[path] = path[depth:], costs[path] - costs[likeliest] + SUBSTITUTION_COST
    found = candidates(nodes, -1, chain, walked % len(every))
    paths = paths_down(found)
    realigned = {
        every[one.number]: (path, one.cost) for one, path in zip(found, paths, strict=True) if one.number < NODES
    }
    assert realigned == wanted
    chained = [(path, one.cost) for one, path in zip(found, paths, strict=True) if one.number >= NODES]
    assert chained == [
        (tuple(chain.tokens[: k + 1]), chain.first + k * chain.following) for k in range(len(chain.tokens))
    ]
    assert all(one.depth == len(path) for one, path in zip(found, paths, strict=True))
    check_best(found, limit)


@given(SEEDS, st.integers(-1, 240), st.integers(0, 9), CHAINS, st.integers(0, 80))
def test_a_tree_reuses_what_is_below_another_node(
    seed: int, walked: int, token: int, chain: LookupChain, limit: int
) -> None:
    """What is below the likeliest node of a token hangs below the root, and in no other way; the rest is as it was."""
    nodes = nodes_of(torch.from_numpy(preorder(*tree_of(seed), 1)))
    before = walked % len(nodes.tokens) if walked >= 0 else -1
    reused = donor(nodes, token)
    having = [
        place for place in range(1, len(nodes.tokens)) if nodes.tokens[place] == token and place in nodes.parents[1:]
    ]
    assert reused == min(having, key=lambda place: nodes.costs[place], default=-1)
    found = candidates(nodes, -1, chain, before, reused)
    again = range(reused + 1, nodes.ends[reused]) if reused >= 0 else range(0)
    others = [one for one in candidates(nodes, -1, chain, before) if one.number not in again]
    assert [one for one in found if one.number not in again] == others
    for one in (one for one in found if one.number in again):
        assert one.parent == (-1 if nodes.parents[one.number] == reused else nodes.parents[one.number])
        assert one.depth == nodes.depths[one.number] - nodes.depths[reused]
        assert one.cost == nodes.costs[one.number] - nodes.costs[reused] + REUSE_COST
    deep = [place for place in again if nodes.depths[place] - nodes.depths[reused] <= MAX_PATH]
    assert sorted(one.number for one in found if one.number in again) == deep
    check_best(found, limit)


def test_costs_of_realigning() -> None:
    assert round(-COST_OF_HALVING * torch.tensor(0.3).double().log2().item()) == SUBSTITUTION_COST == REUSE_COST


@given(SEEDS, st.integers(0, 240), CHAINS)
def test_a_walk_tolerates_siblings_that_say_the_same(seed: int, walked: int, chain: LookupChain) -> None:
    nodes = nodes_of(torch.from_numpy(preorder(*tree_of(seed), 1)))
    kept = best(candidates(nodes, -1, chain, walked % len(nodes.tokens)), KEPT)
    rows = {-1: 0} | {one.number: 1 + rank for rank, one in enumerate(kept)}
    tokens, parents = [9, *(one.token for one in kept)], [0, *(rows[one.parent] for one in kept)]
    rng = random.Random(seed)
    choices = [rng.randrange(3) for _ in tokens]
    found = match_walk(parents, tokens, lambda _, depth: choices[depth])
    accepted = len(found.accepted_rows)
    assert [tokens[row] for row in found.accepted_rows] == choices[:accepted] and found.next_token == choices[accepted]
    assert [parents[row] for row in found.accepted_rows] == [0, *found.accepted_rows][:accepted]
    # The first of them, and so the likeliest.
    assert all(
        row == min(i for i in range(1, len(tokens)) if (parents[i], tokens[i]) == (parents[row], tokens[row]))
        for row in found.accepted_rows
    )


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(0, 40))
def test_a_bound_is_the_largest_with_room(keys: list[int], room: int) -> None:
    bound = bound_for(keys, room)
    assert sum(key < bound for key in keys) <= room
    assert bound == NO_KEY or sum(key <= bound for key in keys) > room


@examples(40)
@given(SEEDS, st.sampled_from(CASES))
def test_steps_are_laid_out_as_trees(seed: int, case: Case) -> None:
    case = case._replace(longest=min(case.longest, 300))
    given = given_for(case, seed)
    step, table = given.step, table_for(case, given.tokens, "torch")
    table.accepted.zero_()
    assign_slots(table, given.table_slots, given.tables)
    prefilling = len(case.prefilling)
    before = prefill_rows(step, case)
    table.choose_rows(step, given.pending, given.moves, prefilling)
    assert prefill_rows(step, case) == before
    rng = random.Random(seed)
    for turn in range(case.passes):
        check_layout(step, table, case)
        verdicts = random_verdicts(step, case.vocabulary, rng, prefilling)
        run_pass(table, step, verdicts)
        for b in range(prefilling):
            assert reports_of(table, b, turn)[0] == 0
            assert reports_of(table, b, turn)[REPORT_TOKENS] == int(verdicts.next_tokens[b])
    check_layout(step, table, case)
    assert prefill_rows(step, case) == before


def prefill_rows(step: StepIntegers, case: Case) -> list[object]:
    """All that a step says of the sequences that read."""
    rows, prefilling = sum(case.prefilling), len(case.prefilling)
    assert step.parents is not None and step.causal is not None
    each = (step.token_ids, step.positions, step.slots, step.owners, step.parents)
    records = step.parameters[: RECORD * prefilling]
    sequences = (
        step.prefix_lengths[:prefilling],
        step.query_starts[: prefilling + 1],
        step.causal[:prefilling],
        records,
    )
    return [[one[:rows].tolist() for one in each], [one.tolist() for one in sequences]]


def holds_text(table: NodeTable, step: StepIntegers, b: int, root: int) -> bool:
    """Whether a sequence's table has the path that its text has taken since, so that it is not realigned."""
    slot, prefix = int(table.table_slots[b]), int(step.prefix_lengths[b])
    text = text_of(table, step, b, root)
    return slot >= 0 and walk(nodes_of(table.tables[slot]), text, prefix) >= 0


def check_layout(step: StepIntegers, table: NodeTable, case: Case) -> None:
    """Every sequence's rows are a tree, within what it may get, and its keys follow its prefix."""
    assert step.parents is not None and step.causal is not None
    assert step.causal.tolist() == [int(b < len(case.prefilling)) for b in range(len(step.causal))]
    starts = step.query_starts.tolist()
    assert starts[-1] <= case.rows_in_all
    dearest, given_up = [-1], [NO_KEY]
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        if b < len(case.prefilling):
            assert end - first == case.prefilling[b]
            continue
        assert (end > first) == (case.rows[b] > 0)
        if end == first:
            continue
        assert end - first <= min(case.rows[b], KEPT + 1)
        parents, tokens = step.parents[first:end].tolist(), step.token_ids[first:end].tolist()
        paths = paths_of(tokens, parents)
        # Of a tree that is realigned siblings may say the same, and beside a chain of one that is reused.
        links = table.ranked[b, 1, : end - first - 1].tolist()
        own = [path for path, link in zip(paths[1:], links, strict=True) if link >> 16]
        assert len(set(own)) == len(own) or not holds_text(table, step, b, tokens[0])
        assert all(parent < i for i, parent in enumerate(parents) if i)
        prefix = int(step.prefix_lengths[b])
        assert step.positions[first:end].tolist() == [min(prefix + len(path), LAST_POSITION) for path in paths]
        assert max(map(len, paths)) <= MAX_PATH
        keys = torch.arange(prefix, prefix + end - first)
        pages = step.page_table[int(step.page_starts[b]) :][keys // case.page_size]
        assert step.slots[first:end].tolist() == (pages * case.page_size + keys % case.page_size).tolist()
        assert set(step.owners[first:end].tolist()) == {b}
        record = step.parameters[b * RECORD : (b + 1) * RECORD].tolist()
        assert (record[FIRST_ROW], record[ROWS], record[IS_CHAIN]) == (first, end - first, 0)
        taken = end - first - 1
        dearest += table.keys[b, :taken].tolist()
        given_up += table.keys[b, taken:].tolist()
    # No row was given up for a dearer one.
    assert max(dearest) < min(given_up)
    free = slice(starts[-1], None)
    assert not step.token_ids[free].any() and not step.positions[free].any() and not step.parents[free].any()
    assert set(step.slots[free].tolist()) | set(step.owners[free].tolist()) <= {-1}


def one_sequence(rows: int, prefix: int) -> tuple[StepIntegers, torch.Tensor]:
    """A step of one root behind so many keys, and its text, in which no token comes twice."""
    generator = torch.Generator().manual_seed(1)
    step = random_step([1], 4, generator, longest=prefix + 1, room=260, rows_in_all=rows)
    step.prefix_lengths[0] = prefix
    step.parameters[ROWS] = rows
    step.parameters[2] = 0
    step.token_ids[0] = 500
    pages = int(step.page_table.max()) + 1
    return step, torch.arange(1000, 1000 + 4 * pages).int()


@examples(40)
@given(SEEDS)
def test_a_tree_keeps_what_hangs_below_what_was_said(seed: int) -> None:
    rng = random.Random(seed)
    tokens, parents, costs = random_tree([500], 150, 4, rng)
    by_path = dict(zip(paths_of(tokens, parents), costs, strict=True))
    # Its vocabulary is not the text's, so that nothing is looked up at first.
    step, text = one_sequence(64, 20)
    case = Case(4, [64], 64, 20, 4, 0)
    table = table_for(case, text, "torch")
    graft(table, (tokens, parents, costs, 21))
    table.choose_rows(step, torch.zeros(1).int(), torch.zeros(1).int())
    committed: Path = ()
    for turn in range(PASSES):
        below = {
            path[len(committed) :]: cost - by_path[committed]
            for path, cost in by_path.items()
            if path[: len(committed)] == committed
        }
        assert step.parents is not None
        rows = int(step.query_starts[1])
        laid_out = paths_of(step.token_ids[:rows].tolist(), step.parents[:rows].tolist())
        assert {*laid_out} <= {*below}
        affordable = sorted(cost for path, cost in below.items() if cost < MOST_COST and len(path) <= MAX_PATH)
        assert sorted(below[path] for path in laid_out) == affordable[:64]
        verdicts = random_verdicts(step, 4, rng)
        count = int(verdicts.accepted_counts[0])
        path = verdicts.accepted_rows[:count].tolist()
        token = int(verdicts.next_tokens[0])
        # The promise is of all rows' chances.
        chances = [2 ** (-below[each] / COST_OF_HALVING) * 1024 for each in laid_out[1:]]
        run_pass(table, step, verdicts)
        figures = table.reports[0, turn, :REPORT_TOKENS].tolist()
        assert figures[:3] == [count, rows - 1, rows - 1] and figures[4:6] == [0, count]
        assert figures[6] == figures[3] and figures[7 + len(PROSPECTS) :] == [0, 0]
        for expected, best_rows in zip(figures[6 : 7 + len(PROSPECTS)], (KEPT, *PROSPECTS), strict=True):
            wanted = sum(chances[:best_rows])
            assert wanted * 0.999 - 1 <= expected <= wanted * 1.011 + 1
        deepest = laid_out[path[-1]] if path else ()
        assert reports_of(table, 0, turn)[REPORT_TOKENS:] == [*deepest, token, *path]
        committed = (*committed, *deepest, token)
        # Below a leaf, or where the tree is left, others are reused.
        if not any(len(path) > len(committed) and path[: len(committed)] == committed for path in by_path):
            break
    assert int(table.passes[0]) == turn + 1 and int(table.accepted[0]) <= len(committed)


@pytest.mark.parametrize(
    ("fed", "realigned", "rows"),
    [
        # (parent, token) of the rows behind the root. The table holds 6.
        (6, False, [(0, 7), (0, 8)]),
        # In place of 6, the likeliest.
        (4, True, [(0, 7), (0, 8)]),
    ],
)
def test_realigning_by_hand(fed: int, realigned: bool, rows: list[tuple[int, int]]) -> None:
    step, text = one_sequence(64, 20)
    step.token_ids[0] = fed
    # The token before the root.
    text[int(step.page_table[int(step.page_starts[0]) + 19 // 4]) * 4 + 19 % 4] = 500
    table = table_for(Case(4, [64], 64, 20, 4, 0), text, "torch")
    tokens, parents = [500, 5, 6, 7, 7, 8, 1], [-1, 0, 0, 0, 2, 2, 1]
    graft(table, (tokens, parents, [0, 300, 200, 400, 300, 350, 900], 20))
    table.choose_rows(step, torch.zeros(1).int(), torch.zeros(1).int())
    assert step.parents is not None
    end = int(step.query_starts[1])
    found = list(zip(step.parents[1:end].tolist(), step.token_ids[1:end].tolist(), strict=True))
    assert found == rows and holds_text(table, step, 0, fed) != realigned
    costs = [100, 150]
    if realigned:
        costs = [SUBSTITUTION_COST + cost for cost in costs]
    assert (table.keys[0, : end - 1] // KEYS_PER_COST).tolist() == costs
    verdicts = Verdicts.over(torch.zeros(2 * MAX_SEQUENCES + 64).int(), MAX_SEQUENCES)
    run_pass(table, step, verdicts)
    assert table.reports[0, 0, [1, 2]].tolist() == [len(rows), len(rows)]
    # Of two tokens that were not foreseen nothing is left.
    if realigned:
        assert int(step.query_starts[1]) == 1


@pytest.mark.parametrize(
    ("base", "fed", "held", "rows", "costs"),
    [
        # A leaf is held, and 9 stands elsewhere too, with 7 and 8 below it.
        (20, 9, True, [(0, 7), (1, 8)], [REUSE_COST + cost for cost in (50, 90)]),
        # Of a token that is not held too. In its place stands a leaf.
        (20, 3, False, [(0, 6)], [REUSE_COST + 10]),
        # The tree was left two tokens ago.
        (19, 3, False, [(0, 6)], [REUSE_COST + 10]),
        # The table is not of this text: its base lies ahead.
        (40, 3, False, [], []),
    ],
)
def test_reusing_by_hand(base: int, fed: int, held: bool, rows: list[tuple[int, int]], costs: list[int]) -> None:
    step, text = one_sequence(64, 20)
    step.token_ids[0] = fed
    # The token before the root, and where the base is that, the one before which nothing is known.
    text[int(step.page_table[int(step.page_starts[0]) + 19 // 4]) * 4 + 19 % 4] = 500
    table = table_for(Case(4, [64], 64, 20, 4, 0), text, "torch")
    #         0    1: leaf 9, 2: 5 > 3: 9 > 4: 7 > 5: 8, 6: 5's 3 > 7: 6
    tokens, parents = [500, 9, 5, 9, 7, 8, 3, 6], [-1, 0, 0, 2, 3, 4, 2, 6]
    graft(table, (tokens, parents, [0, 100, 200, 300, 350, 390, 900, 910], base))
    table.choose_rows(step, torch.zeros(1).int(), torch.zeros(1).int())
    assert step.parents is not None
    end = int(step.query_starts[1])
    found = list(zip(step.parents[1:end].tolist(), step.token_ids[1:end].tolist(), strict=True))
    assert found == rows and holds_text(table, step, 0, fed) == held
    assert (table.keys[0, : end - 1] // KEYS_PER_COST).tolist() == costs


def graft(table: NodeTable, *trees: tuple[list[int], list[int], list[int], int]) -> None:
    """Give the step's sequences these tables, in slots of the same order."""
    table_slots = torch.tensor([b if b < len(trees) else -1 for b in range(MAX_SEQUENCES)]).int()
    assign_slots(table, table_slots, {b: preorder(*tree).tolist() for b, tree in enumerate(trees)})


@pytest.mark.parametrize(
    ("edges", "lengths", "rows_in_all", "laid_out"),
    [
        # Costs 100 to 500 of the one, 300 of the other.
        ((100, 300), (5, 5), 8, (6, 2)),
        ((300, 100), (5, 5), 8, (2, 6)),
        ((100, 300), (5, 5), 12, (6, 6)),
        ((100, 100), (5, 1), 8, (6, 2)),
        # Of equally likely rows both or none.
        ((100, 100), (5, 5), 7, (3, 3)),
        ((100, 100), (1, 1), 3, (1, 1)),
        ((100, 100), (5, 5), 2, (1, 1)),
    ],
)
def test_the_likelier_rows_of_all_sequences(
    edges: tuple[int, int], lengths: tuple[int, int], rows_in_all: int, laid_out: tuple[int, int]
) -> None:
    step = random_step([1, 1], 4, torch.Generator().manual_seed(3), longest=9, room=260, rows_in_all=rows_in_all)
    step.parameters.view(-1, RECORD)[:, ROWS] = 64
    step.token_ids[:2] = torch.tensor([50, 60])
    text = torch.arange(1000, 1000 + 4 * (int(step.page_table.max()) + 1)).int()
    table = table_for(Case(4, [64, 64], rows_in_all, 9, 4, 0), text, "torch")
    bases = (step.prefix_lengths + 1).tolist()
    every = [list(range(1 + length)) for length in lengths]
    graft(
        table,
        *(
            (chain, [i - 1 for i in chain], [edge * i for i in chain], base)
            for chain, edge, base in zip(every, edges, bases, strict=True)
        ),
    )
    table.choose_rows(step, torch.zeros(1).int(), torch.zeros(1).int())
    assert step.query_starts.tolist() == [0, laid_out[0], sum(laid_out)]


def test_limits() -> None:
    """A sequence that may have its root alone gets no more, and none gets more than 64 rows."""
    for rows, laid_out in ((1, 1), (2, 2), (64, 64), (200, 64)):
        step, text = one_sequence(100, 20)
        step.parameters[ROWS] = rows
        table = table_for(Case(4, [rows], 100, 20, 4), text, "torch")
        graft(table, (list(range(90)), [-1] + [0] * 89, [0] + [500] * 89, 21))
        table.choose_rows(step, torch.zeros(1).int(), torch.zeros(1).int())
        assert int(table.limits[0]) == rows - 1 and step.query_starts.tolist() == [0, laid_out]


def test_deep_rows_are_left_out() -> None:
    step, text = one_sequence(100, 20)
    step.parameters[ROWS] = 100
    table = table_for(Case(4, [100], 100, 20, 4), text, "torch")
    deep = range(60)
    graft(table, ([i % 7 for i in deep], [i - 1 for i in deep], list(deep), 21))
    table.choose_rows(step, torch.zeros(1).int(), torch.zeros(1).int())
    assert step.query_starts.tolist() == [0, 1 + MAX_PATH]


def test_what_is_refused() -> None:
    _, text = one_sequence(8, 20)
    table = table_for(Case(4, [8], 8, 20, 4), text, "torch")
    with pytest.raises(ValueError, match=f"{MAX_SEQUENCES} boxes, got {MAX_SEQUENCES - 1}"):
        table.copy_tables(Mailboxes(MAX_SEQUENCES - 1, torch.device("cpu")))


def test_getting_ready_leaves_what_is_there() -> None:
    step, text = one_sequence(8, 20)
    step.query_starts.zero_()
    table = table_for(Case(4, [8], 8, 20, 4), text, "torch")
    before = [each.clone() for each in (table.reports, table.tables, table.passes, table.table_slots)]
    table.warm_up(step)
    assert all(map(torch.equal, before, (table.reports, table.tables, table.passes, table.table_slots)))


def test_random_cases_are_what_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks go on, tables are left and realigned, and nodes are laid out beside chains and accepted."""
    realigned: list[tuple[int, int, int, bool]] = []
    # Whether the last token, or the one before, has a place, and whether another lends.
    again: set[tuple[bool, bool, bool]] = set()

    # The same of those that have a recycled tree, and of those that have none since their table is large.
    beside_recycled: set[tuple[bool, bool, bool]] = set()
    too_large = 0
    # How deep the last token stands in its table, -1 for nowhere; and of such, what was accepted of the table.
    held: list[int] = []
    lost: dict[int, bool] = {}
    accepted_of_lost = 0

    def watched(
        nodes: Nodes, root: int, chain: LookupChain, before: int, reused: int, recycled: Nodes | None
    ) -> list[NodeCandidate]:
        nonlocal too_large
        found = candidates(nodes, root, chain, before)
        again.add((root >= 0, before >= 0, reused >= 0))
        held.append(nodes.depths[root] if root >= 0 else -1)
        if recycled:
            beside_recycled.add((root >= 0, before >= 0, reused >= 0))
        too_large += root < 0 and len(nodes.tokens) > recycling.FIRST
        if before >= 0:
            own = [one for one in best(found, KEPT) if one.number < NODES]
            beside = any(one.number >= NODES for one in found)
            realigned.append((nodes.depths[before], len(own), max((one.depth for one in own), default=0), beside))
        return candidates(nodes, root, chain, before, reused, recycled)

    monkeypatch.setattr(_torch_node_table, "candidates", watched)
    find = _torch_node_table._find

    def watched_find(table: NodeTable, step: StepIntegers, b: int, root: int, moves: int) -> None:
        nonlocal accepted_of_lost
        passes = int(table.passes[b])
        if passes and lost[b]:
            accepted_of_lost += int(table.reports[b, passes - 1, ReportField.ACCEPTED_FROM_TABLE])
        find(table, step, b, root, moves)
        lost[b] = held[-1] < 0

    monkeypatch.setattr(_torch_node_table, "_find", watched_find)
    reports: list[list[int]] = []
    filled: list[int] = []

    recycled_tree = recycling.recycled_tree

    def watched_tree(entries: torch.Tensor, owner: int, root: int) -> tuple[list[int], list[int]]:
        tokens, costs = recycled_tree(entries, owner, root)
        filled.append(sum(token >= 0 for token in tokens[1:]))
        return tokens, costs

    monkeypatch.setattr(recycling, "recycled_tree", watched_tree)
    for place, case in enumerate(CASES):
        for passes in shifted_by_accepted(case, place, "torch")[1 + case.passes + len(case.prefilling) : -4]:
            assert isinstance(passes, list)
            reports += passes
    assert max(held) > 5 and min(held) < 0
    assert any(0 < one[2] < one[1] for one in reports) and any(one[5] > 0 for one in reports)
    assert accepted_of_lost > 0
    # The token before stands at the table's root or far below it, and is a leaf or not; with a chain or none.
    for deep, leaf, chained in itertools.product((False, True), repeat=3):
        assert any((d > 5, not rows, beside) == (deep, leaf, chained) for d, rows, _, beside in realigned)
    assert any(d == 0 and rows > 5 for d, rows, *_ in realigned) and any(depth > 3 for _, _, depth, _ in realigned)
    # Many nodes, some, and none.
    assert min(filled) == 0 and max(filled) > 40 and len({*filled}) > 5 and too_large > 3
    ways = {(here, before, True) for here, before in ((True, False), (False, True), (False, False))}
    assert ways <= again and ways | {(False, False, False), (False, True, False)} <= beside_recycled


def check(found: list[object]) -> None:
    for place, (case, one) in enumerate(zip(CASES, found, strict=True)):
        assert one == shifted_by_accepted(case, place, "torch")


def test_the_kernels_choose_the_same() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


def test_the_kernels_compile_for_a_gpu() -> None:
    """With what steps of one and of 256 sequences are launched with; a program has 227 KB of shared memory."""
    pytest.importorskip("triton")
    found = work("node_table_compiling_worker.py", forked=True, TRITON_INTERPRET="0")
    needed = found["needed"]
    assert len(needed) > 12 and max(needed.values()) < 227 << 10
    # Nothing is left for the first pass but what keeps its tokens and what follows them, which is captured with it.
    assert {name.partition(",")[0] for name in found["late"]} == {"keep_kernel", "likeliest_kernel", "enter_kernel"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_choose_the_same_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))


def gpu_table() -> tuple[NodeTable, Mailboxes]:
    """On a GPU, its kernel compiled."""
    table = NodeTable(
        torch.zeros(64, dtype=torch.int32, device="cuda"), 4, LAST_POSITION, max_sequences=MAX_SEQUENCES, max_passes=1
    )
    mail = Mailboxes(MAX_SEQUENCES, torch.device("cuda"))
    table.copy_tables(mail)
    torch.cuda.synchronize()
    return table, mail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_put_after_a_launch_is_taken_when_the_device_comes_to_it() -> None:
    table, mail = gpu_table()
    # Some 0.1 s of a device at work.
    torch.cuda._sleep(200_000_000)
    before = torch.cuda.Event()
    before.record()
    table.copy_tables(mail)
    mail.next_table(3)[:] = range(TABLE)
    mail.put(3)
    mail.send()
    assert not before.query(), "the device came to it before the host was ready"
    torch.cuda.synchronize()
    assert table.taken.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert table.tables[3].tolist() == list(range(TABLE)) and not table.tables[2].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_table_is_taken_whole_while_others_are_written() -> None:
    """As fast as a host can send them, which is faster than any draft does."""
    table, mail = gpu_table()
    seen: set[int] = set()
    for turn in range(200):
        for _ in range(20):
            table.copy_tables(mail)
        for number in range(40):
            mail.next_table(5)[:] = 1 + 40 * turn + number
            mail.put(5)
            mail.send()
        torch.cuda.synchronize()
        taken = table.tables[5].tolist()
        # One that was written over while it was read holds no tree.
        values = {taken[0], *taken[2:]}
        assert taken[1] == 0 or values == {taken[1]}, f"turn {turn}"
        seen.add(taken[1])
    assert len(seen) > 100
