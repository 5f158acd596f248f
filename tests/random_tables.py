"""Steps of random sequences with random tables of drafted nodes, and what moving them on makes of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from preorder_tables import preorder
from random_steps import DEVICE, integers, random_step

from tree_kernels.node_table import Mailboxes, NodeTable, StepIntegers, recycling
from tree_kernels.node_table.layout import LOOKUP, NODES, REPORT_ROWS, REPORT_TOKENS
from tree_kernels.verification import RECORD, Mode, Verdicts, keep_accepted
from tree_kernels.verification.records import MODE, ROWS

MAX_SEQUENCES = 8
PASSES = 3
LAST_POSITION = 200


class Case(NamedTuple):
    """`rows` that each sequence may have, `longest` keys before a root, and `vocabulary` tokens in use: few tokens make
    long walks, long runs and chains that coincide with nodes. The first sequences are `prefilling` so many rows, and
    may have none."""

    page_size: int
    rows: list[int]
    rows_in_all: int
    longest: int
    vocabulary: int
    lookup_tokens: int = LOOKUP
    prefilling: tuple[int, ...] = ()
    recycles: bool = False

    @property
    def passes(self) -> int:
        """Steps with prompts are not gone on with."""
        return 1 if self.prefilling else PASSES


CASES = (
    Case(1, [64], 64, 40, 3),
    Case(4, [8, 0, 8, 1], 16, 90, 2),
    Case(16, [64] * 5, 96, 300, 3),
    Case(16, [64] * 4, 300, 600, 20),
    Case(64, [64, 100], 128, 9000, 2),
    Case(16, [64, 16], 64, 30, 1000),
    Case(16, [64, 1, 64, 0, 16, 9, 3], 8, 300, 4),
    Case(16, [64] * 5, 40, 60, 2, 0),
    Case(4, [64] * 4, 60, 200, 4, 5),
    Case(16, [0, 0, 64, 64, 9], 128, 90, 3, prefilling=(37, 1)),
    Case(4, [0, 64, 0, 64], 70, 40, 4, prefilling=(64,)),
    Case(16, [16, 64, 1, 0, 9, 30], 64, 60, 30, recycles=True),
    Case(4, [20] * 4, 40, 20, 6, 0, recycles=True),
    Case(16, [0, 0, 64, 9], 64, 90, 30, prefilling=(20, 1), recycles=True),
    Case(16, [12] * 5, 60, 120, 5, recycles=True),
    Case(4, [64, 40], 64, 300, 4, recycles=True),
)


class Given(NamedTuple):
    """A step of roots, the text [slots] int32, what is awaited and by how much it moves [B] int32, each sequence's slot
    [B] int32, and the tables by slot."""

    step: StepIntegers
    tokens: torch.Tensor
    pending: torch.Tensor
    moves: torch.Tensor
    table_slots: torch.Tensor
    tables: dict[int, list[int]]


def text_of(step: StepIntegers, tokens: torch.Tensor, b: int, end: int, page_size: int) -> list[int]:
    """The tokens fed as a sequence's keys up to `end`."""
    keys = torch.arange(end)
    pages = step.page_table.cpu()[int(step.page_starts[b]) :]
    found: list[int] = tokens.cpu()[(pages[keys // page_size] * page_size + keys % page_size).long()].tolist()
    return found


def random_tree(
    spine: list[int], count: int, vocabulary: int, rng: random.Random, apart: Iterable[int] = ()
) -> tuple[list[int], ...]:
    """Tokens, parents and costs of a tree of up to `count` nodes that begins with a path of these tokens, the root's
    first. The last of them has no children of the tokens `apart`."""
    tokens, parents = list(spine), list(range(-1, len(spine) - 1))
    children: list[set[int]] = [{token} for token in spine[1:]] + [set(apart)]
    deep = rng.choice([0.1, 0.5, 0.95])
    for _ in range(2 * count):
        if len(tokens) >= count:
            break
        parent = len(tokens) - 1 if rng.random() < deep else rng.randrange(len(tokens))
        token = rng.randrange(vocabulary)
        if token in children[parent]:
            continue
        children[parent].add(token)
        tokens, parents, children = [*tokens, token], [*parents, parent], [*children, set()]
    dearest = rng.choice([3, 500, 9000, 70000])
    costs = [0] * len(tokens)
    for i in range(1, len(tokens)):
        costs[i] = costs[parents[i]] + rng.randint(1, dearest)
    return tokens, parents, costs


def random_table(text: list[int], vocabulary: int, rng: random.Random) -> list[int]:
    """[TABLE] for a sequence with this text, its root's token included; of another text now and then. A "lost" one
    does not hold that token, and where it is a "leaf" nothing beside it either."""
    kind = rng.choice(["text"] * 5 + ["lost"] * 3 + ["leaf", "ahead", "far", "other", "none"])
    # A full table now and then: most would take long to make.
    count, age = rng.choice([4, 30, *[240] * 3, NODES]), rng.randrange(min(len(text), 12))
    if kind == "far":
        age = rng.randrange(len(text))
    apart: Iterable[int] = ()
    if kind in ("lost", "leaf"):
        # At age 0 there is nothing to lose.
        age = min(len(text) - 1, rng.choice([1, 1 + age, 40]))
        apart = range(vocabulary) if kind == "leaf" else text[-1:]
    base = len(text) - age
    spine = text[base - 1 :]
    if kind == "other":
        spine = spine[:1]
    if apart and age:
        spine = spine[:-1]
    if kind == "ahead":
        spine, base = [0], len(text) + rng.randint(1, 5)
    table = preorder(*random_tree(spine[:NODES], max(count, len(spine[:NODES])), vocabulary, rng, apart), base)
    used = table[1]
    for array in table[2:].reshape(5, NODES):
        array[used:] = [rng.randrange(-9, NODES) for _ in array[used:]]
    if kind == "none":
        table[1] = 0
    found: list[int] = table.tolist()
    return found


def given_for(case: Case, seed: int) -> Given:
    """The same in every process."""
    # Of these the cases have all that `test_random_cases_are_what_they_should_be` looks for.
    generator, rng = torch.Generator().manual_seed(seed + 500), random.Random(seed + 500)
    prefilling = len(case.prefilling)
    roots = [*case.prefilling, *(min(1, rows) for rows in case.rows[prefilling:])]
    step = random_step(roots, case.page_size, generator, longest=case.longest, room=260, rows_in_all=case.rows_in_all)
    records = step.parameters.view(-1, RECORD)
    records[:, MODE] = torch.arange(len(roots)).int() % 2
    records[0, MODE] = Mode.COUPLED
    records[:, ROWS] = torch.tensor(case.rows, dtype=torch.int32)
    assert step.causal is not None
    step.causal[:prefilling] = 1
    first = list(range(sum(case.prefilling), sum(roots)))
    step.token_ids[first] = integers(generator, 0, case.vocabulary, len(first))
    # Some are awaited.
    step.token_ids[first[::2]] = -1 - torch.randperm(MAX_SEQUENCES, generator=generator)[: len(first[::2])].int()
    slots = (int(step.page_table.max()) + 1) * case.page_size
    tokens = integers(generator, 0, case.vocabulary, slots)
    pending = integers(generator, 0, case.vocabulary, MAX_SEQUENCES)
    moves = integers(generator, 0, 4, MAX_SEQUENCES)
    table_slots, tables = [-1] * MAX_SEQUENCES, dict[int, list[int]]()
    free = rng.sample(range(MAX_SEQUENCES), MAX_SEQUENCES)
    for b, row in enumerate(step.query_starts[:-1].tolist()):
        if b < prefilling or not roots[b] or rng.random() < (0.3 if case.recycles else 0.15):
            continue
        root, moved = int(step.token_ids[row]), 0
        if root < 0:
            root, moved = int(pending[-1 - root]), int(moves[-1 - root])
        text = [*text_of(step, tokens, b, int(step.prefix_lengths[b]) + moved, case.page_size), root]
        table_slots[b] = free.pop()
        tables[table_slots[b]] = random_table(text, case.vocabulary, rng)
    return Given(step, tokens, pending, moves, torch.tensor(table_slots, dtype=torch.int32), tables)


def assign_slots(table: NodeTable, table_slots: torch.Tensor, tables: Mapping[int, Sequence[int]]) -> None:
    """Give the step's sequences their slots [B], and slots their tables, by way of boxes."""
    mail = Mailboxes(table.max_sequences, table_slots.device)
    for slot, given in tables.items():
        mail.next_table(slot)[:] = given
        mail.put(slot)
    mail.send()
    table.assign_slots(table_slots)
    table.copy_tables(mail)


def table_for(case: Case, tokens: torch.Tensor, backend: Literal["triton", "torch"]) -> NodeTable:
    """A table whose tensors hold what a launch before may have left there."""
    table = NodeTable(
        tokens, case.page_size, LAST_POSITION, max_sequences=MAX_SEQUENCES, max_passes=PASSES,
        lookup_tokens=case.lookup_tokens, recycles=case.recycles, backend=backend,
    )  # fmt: skip
    if case.recycles:
        # Of owners of their own, so that it does not matter which of several entries is written last.
        table.owners.copy_(torch.arange(MAX_SEQUENCES))
        given = random_logits(MAX_SEQUENCES * case.vocabulary, case.vocabulary, 1).unflatten(0, (MAX_SEQUENCES, -1))
        for owner, token in itertools.product(range(MAX_SEQUENCES), range(0, case.vocabulary, 2)):
            entry = recycling.entry_of(owner, token, given[owner, token])
            table.entries[recycling.place_of(owner, token)] = entry.to(tokens.device)
    for left in (
        table.reports, table.tables, table.passes, table.limits, table.counts, table.roots, table.keys, table.ranked,
        table.noted, table.unranked,
    ):  # fmt: skip
        left.random_(-3, 1000)
    return table


def random_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """[rows, vocabulary] fp32: the same differences between any row's tokens, in a random order. What they cost rounds
    alike on every device."""
    shuffled = torch.rand(rows, vocabulary, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return shuffled * -0.7


def random_verdicts(step: StepIntegers, vocabulary: int, rng: random.Random, prefilling: int = 0) -> Verdicts:
    """A random path down each sequence's tree, and a token behind it: often one that has a row too, which no target
    says, so that walks go on. Of those that read a token alone, or nothing."""
    starts, parents = step.query_starts.tolist(), (step.parents.tolist() if step.parents is not None else [])
    verdicts = Verdicts.over(torch.full((2 * MAX_SEQUENCES + len(step.token_ids),), -1).int(), MAX_SEQUENCES)
    verdicts.accepted_counts.zero_()
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        at, path = 0, []
        if b < prefilling:
            verdicts.next_tokens[b] = rng.choice([-1, rng.randrange(vocabulary)])
            continue
        while rng.random() < 0.6:
            below = [row for row in range(at + 1, end - first) if parents[first + row] == at]
            if not below:
                break
            at = rng.choice(below)
            path.append(at)
        below = [first + row for row in range(at + 1, end - first) if parents[first + row] == at]
        if end > first:
            likely = below and rng.random() < 0.7
            token = int(step.token_ids[rng.choice(below)]) if likely else rng.randrange(vocabulary)
            verdicts.accepted_counts[b], verdicts.next_tokens[b] = len(path), token
            verdicts.accepted_rows[first : first + len(path)] = torch.tensor(path, dtype=torch.int32)
    return Verdicts.over(verdicts.tensor.to(step.token_ids.device), MAX_SEQUENCES)


def run_pass(
    table: NodeTable, step: StepIntegers, verdicts: Verdicts, *, last: bool = False, vocabulary: int = 8
) -> None:
    """What happens to tables and text around a pass that is verified so; the `last` one is only reported. Logits have a
    larger vocabulary than the text."""
    # Random pages are shared, and no GPU says which of several writes to a slot is the last.
    kept = {slot: token for slot, token in zip(step.slots.tolist(), step.token_ids.tolist(), strict=True) if slot >= 0}
    slots = torch.tensor(list(kept), device=table.tokens.device)
    table.tokens[slots] = torch.tensor(list(kept.values()), dtype=torch.int32, device=table.tokens.device)
    keep_accepted(table.tokens, step.token_ids, step.slots, step.parameters, verdicts, table.backend)
    logits = random_logits(len(step.token_ids), vocabulary + 3, int(step.prefix_lengths[0])).to(slots.device)
    table.recycle(step, logits, vocabulary, verdicts)
    if last:
        table.report(step, verdicts)
    else:
        table.report_and_choose_rows(step, verdicts)


def reports_of(table: NodeTable, b: int, turn: int) -> list[int]:
    """What was said of a pass, without what means nothing."""
    reports: list[int] = table.reports[b, turn].tolist()
    return reports[: REPORT_TOKENS + reports[0] + 1] + reports[REPORT_ROWS : REPORT_ROWS + reports[0]]


def shifted_by_accepted(case: Case, seed: int, backend: Literal["triton", "torch"]) -> list[object]:
    """The step after `choose_rows`, and after each of `PASSES` passes, with what was said by then and the text."""
    given, device = given_for(case, seed), DEVICE if backend == "triton" else torch.device("cpu")
    step = StepIntegers(*(getattr(given.step, name).to(device) for name in given.step.__slots__))
    table = table_for(case, given.tokens.to(device), backend)
    # Left over from a launch before.
    table.accepted.copy_(given.moves)
    assign_slots(table, given.table_slots.to(device), given.tables)
    found: list[object] = []

    def note() -> None:
        found.append([getattr(step, name).tolist() for name in step.__slots__])

    prefilling = len(case.prefilling)
    table.choose_rows(step, given.pending.to(device), given.moves.to(device) if seed % 2 else None, prefilling)
    note()
    rng = random.Random(seed)
    for turn in range(case.passes):
        # The last one is reported alone in every other case, whatever its step.
        last = turn == case.passes - 1 and seed % 2 == 0
        run_pass(
            table,
            step,
            random_verdicts(step, case.vocabulary, rng, prefilling),
            last=last,
            vocabulary=case.vocabulary + 5,
        )
        note()
        assert not last or found[-1] == found[-2], "a report moved the step on"
    for b, rows in enumerate(case.rows):
        if rows:
            found.append([reports_of(table, b, turn) for turn in range(case.passes)])
        elif b < prefilling:
            # The rest says what was never found.
            found.append([[*reports_of(table, b, 0)[:1], *reports_of(table, b, 0)[REPORT_TOKENS:]]])
    count = len(case.rows)
    kept = table.entries[table.entries[:, 0] >= 0] if case.recycles else table.entries
    return [
        *found,
        kept.tolist(),
        table.passes[:count].tolist(),
        table.accepted[:count].tolist(),
        table.tokens.tolist(),
    ]
