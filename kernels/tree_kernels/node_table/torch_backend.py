"""The reference of `tree_kernels.node_table`, in plain Python on PyTorch tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tree_kernels.node_table import layout, recycling
from tree_kernels.node_table.layout import (
    NODES,
    PROSPECTS,
    REPORT_ROWS,
    REPORT_TOKENS,
    ReportField,
    link_of,
    longest_run,
)
from tree_kernels.node_table.mailboxes import TURNS
from tree_kernels.node_table.step_integers import StepIntegers
from tree_kernels.verification.dispatch import Verdicts
from tree_kernels.verification.records import (
    DRAWN_BY_POSITION,
    FIRST_ROW,
    IS_CHAIN,
    MODE,
    POSITION,
    RECORD,
    ROWS,
    TOKEN_BITS,
)

if TYPE_CHECKING:
    from tree_kernels.node_table.dispatch import NodeTable
    from tree_kernels.node_table.mailboxes import Mailboxes


class Nodes(NamedTuple):
    """The nodes of a table, none where it has no tree: see `tree_kernels.node_table.layout`."""

    base: int
    tokens: list[int]
    parents: list[int]
    ends: list[int]
    depths: list[int]
    costs: list[int]


_NO_TREE = Nodes(1, [], [], [], [], [])


class LookupChain(NamedTuple):
    """Tokens that were looked up; the first costs `first`, each after it `following`."""

    tokens: list[int]
    first: int
    following: int


class Standing(NamedTuple):
    """Where a text stands in a table, as places of nodes, -1 for none: of its last token; where the table does not hold
    that, of the token before; where it holds nothing below it, of a node to reuse from."""

    root: int
    before: int
    reused: int
    # Whether nothing is below the last token.
    is_end: bool


class NodeCandidate(NamedTuple):
    """A node below the present root. `number` is its place in the table, `FIRST` + its place in a recycled tree, or
    `NODES` + its place in the chain, and `parent` another's; -1 for the root."""

    number: int
    token: int
    parent: int
    depth: int
    cost: int

    @property
    def key(self) -> int:
        """Ranks candidates, the smallest first."""
        return self.cost * layout.KEYS_PER_COST + self.number


def copy_tables(table: NodeTable, mail: Mailboxes) -> None:
    """See `NodeTable.copy_tables`."""
    for slot, number in enumerate(mail.newest.tolist()):
        if number != int(table.taken[slot]):
            table.tables[slot] = mail.tables[slot, number % TURNS]
            table.taken[slot] = number


def choose_rows(table: NodeTable, step: StepIntegers, pending: Tensor, moves: Tensor, laid_out: int) -> None:
    """See `NodeTable.choose_rows`."""
    count = len(step.prefix_lengths)
    table.laid_out[0] = laid_out
    table.passes[:count] = 0
    table.accepted[:count] = 0
    table.limits[:count] = 0
    table.counts.fill_(-1)
    for b, row, _ in _trees(step):
        if b < laid_out:
            continue
        table.limits[b] = step.parameters[b * RECORD + ROWS] - 1
        token, moved = int(step.token_ids[row]), 0
        if token < 0:
            token, moved = int(pending[-1 - token]), int(moves[-1 - token])
        _find(table, step, b, token, moved)
    _lay_out(table, step)


def report_and_choose_rows(table: NodeTable, step: StepIntegers, verdicts: Verdicts, *, last: bool) -> None:
    """See `NodeTable.report_and_choose_rows`, and `NodeTable.report` for `last`."""
    if not last:
        table.counts.fill_(-1)
    for b, row, rows in _trees(step):
        count, token = int(verdicts.accepted_counts[b]), int(verdicts.next_tokens[b])
        path = verdicts.accepted_rows[row : row + count].long()
        reports = table.reports[b, int(table.passes[b])]
        if b < int(table.laid_out):
            reports[ReportField.ACCEPTED], reports[REPORT_TOKENS] = count, token
            table.accepted[b] = count
            continue
        reports[:REPORT_TOKENS] = 0
        reports[ReportField.ACCEPTED], reports[ReportField.DRAFTED], reports[ReportField.FIRST_ROW] = (
            count,
            rows - 1,
            row,
        )
        reports[ReportField.ACCEPTED_FROM_TABLE] = (table.ranked[b, 1, path - 1] >> 16).sum()
        from_table, expected, expected_from_table = table.noted[:3, b]
        reports[ReportField.DRAFTED_FROM_TABLE], reports[ReportField.EXPECTED] = from_table, expected
        reports[ReportField.EXPECTED_FROM_TABLE] = expected_from_table
        reports[ReportField.FIRST_PROSPECT : ReportField.FIRST_PROSPECT + len(PROSPECTS)] = table.noted[3:, b]
        reports[REPORT_TOKENS : REPORT_TOKENS + count] = step.token_ids[row + path]
        reports[REPORT_TOKENS + count] = token
        reports[REPORT_ROWS : REPORT_ROWS + count] = path.int()
        table.passes[b] += 1
        table.accepted[b] += count
        if not last:
            _find(table, step, b, token & TOKEN_BITS, count + 1)
    if not last:
        _lay_out(table, step)


def recycle(table: NodeTable, step: StepIntegers, logits: Tensor, vocabulary: int, verdicts: Verdicts) -> None:
    """See `NodeTable.recycle`."""
    for b, row, _ in _trees(step):
        owner, count = int(table.owners[b]), int(verdicts.accepted_counts[b])
        if owner < 0 or b < int(table.laid_out):
            continue
        path = [row, *(row + verdicts.accepted_rows[row : row + count]).tolist()]
        for at in path[: recycling.KEPT_TOKENS]:
            token = int(step.token_ids[at])
            entry = recycling.entry_of(owner, token, logits[at, :vocabulary])
            table.entries[recycling.place_of(owner, token)] = entry.to(table.entries.device)


def nodes_of(table: Tensor) -> Nodes:
    """The nodes of a table [TABLE] int32."""
    base, count = table[:2].tolist()
    return Nodes(base, *(each[:count] for each in table[2:].view(5, NODES).tolist()))


def recycled_nodes(entries: Tensor, owner: int, root: int) -> Nodes:
    """The nodes of a recycled tree below an owner's token `root`; `entries` as in `recycling`."""
    tokens, costs = recycling.recycled_tree(entries, owner, root)
    shape = recycling.SHAPE
    return Nodes(1, tokens, shape.parents, shape.ends, shape.depths, costs)


def walk(nodes: Nodes, text: Sequence[int], last: int) -> int:
    """The place in the table of token number `last` of a sequence, with which `text` ends; -1 where the table does not
    hold it."""
    age = last - (nodes.base - 1)
    if not nodes.tokens or not 0 <= age < min(NODES, len(text)):
        return -1
    place = 0
    for token in text[len(text) - age :]:
        place = _child(nodes, place, token)
        if place < 0:
            return -1
    return place


def stand(nodes: Nodes, text: Sequence[int], last: int) -> Standing:
    """Where a text stands that ends with token number `last` of a sequence."""
    root = walk(nodes, text, last)
    before = walk(nodes, text[:-1], last - 1) if root < 0 else -1
    is_end = root < 0 or nodes.ends[root] == root + 1
    reuses = is_end and 0 <= last + 1 - nodes.base <= layout.MAX_PATH
    return Standing(root, before, donor(nodes, text[-1]) if reuses else -1, is_end)


def look_up(text: Sequence[int], limit: int) -> LookupChain:
    """Up to `limit` tokens that followed an earlier occurrence of the text's end; none without one."""
    run = longest_run(text) if limit else None
    if run is None or not run.length:
        return LookupChain([], 0, 0)
    behind = text[run.end :]
    tokens = [behind[k % len(behind)] for k in range(limit)]
    return LookupChain(tokens, layout.FIRST_COST[run.length], layout.NEXT_COST[run.length])


def donor(nodes: Nodes, token: int) -> int:
    """The place of the likeliest node of a token with anything below it, the root left out; -1 where there is none."""
    places = range(1, len(nodes.tokens))
    donors = [place for place in places if nodes.tokens[place] == token and nodes.ends[place] > place + 1]
    return min(donors, key=lambda place: (nodes.costs[place], place), default=-1)


def candidates(
    nodes: Nodes, root: int, chain: LookupChain, before: int = -1, reused: int = -1, recycled: Nodes | None = None
) -> list[NodeCandidate]:
    """What may follow the node at place `root` of the table: the nodes below it, and the chain. Without one, the
    realigned nodes behind the node at place `before`. What is below the node at place `reused` is reused. `recycled`
    nodes, where there are none below `root`, hang beside all. Places are those of `Standing`.

    A node below `root`, or a recycled one, that is also in the chain has the smaller cost of both; the rest of the
    chain hangs below the last such node, or below the root.
    """
    hung: list[NodeCandidate] = []
    if root >= 0:
        hung = _hung(nodes, root, 0)
    elif before >= 0:
        hung = _realigned(nodes, before)
    if reused >= 0:
        below = range(reused + 1, nodes.ends[reused])
        hung = [one for one in hung if one.number not in below] + _hung(nodes, reused, layout.REUSE_COST)
    tree, place, first = nodes, root, 0
    if recycled:
        tree, place, first = recycled, 0, recycling.FIRST
        hung += [
            one._replace(number=first + one.number, parent=first + one.parent if one.parent >= 0 else -1)
            for one in _hung(recycled, 0, 0)
        ]
    found = {one.number: one for one in hung}
    above, cost, chain_cost = -1, 0, 0
    for k, token in enumerate(chain.tokens):
        edge = chain.following if k else chain.first
        chain_cost += edge
        place = _child(tree, place, token) if place >= 0 else -1
        if place >= 0:
            above = first + place
            cost = min(found[above].cost, chain_cost)
            found[above] = found[above]._replace(cost=cost)
        else:
            cost += edge
            found[NODES + k] = NodeCandidate(NODES + k, token, above, k + 1, cost)
            above = NODES + k
    return list(found.values())


def best(every: Sequence[NodeCandidate], limit: int) -> list[NodeCandidate]:
    """The cheapest candidates, up to `limit` and `KEPT`, all below `MOST_COST`, by rising keys."""
    ranked = sorted((one for one in every if one.cost < layout.MOST_COST), key=lambda one: one.key)
    return ranked[: max(0, min(limit, layout.KEPT))]


def bound_for(keys: Sequence[int], room: int) -> int:
    """The largest bound with at most `room` keys below it: of equal keys all or none."""
    rising = sorted(keys)
    return rising[room] if len(rising) > room else layout.NO_KEY


def _child(nodes: Nodes, place: int, token: int) -> int:
    below = range(place + 1, nodes.ends[place])
    return next((i for i in below if nodes.parents[i] == place and nodes.tokens[i] == token), -1)


def _hung(nodes: Nodes, root: int, added: int) -> list[NodeCandidate]:
    """The nodes below the one at place `root`, as if it were the root, for `added` more than they cost."""
    found = []
    for place in range(root + 1, nodes.ends[root]):
        parent = -1 if nodes.parents[place] == root else nodes.parents[place]
        depth, cost = nodes.depths[place] - nodes.depths[root], nodes.costs[place] - nodes.costs[root] + added
        if depth <= layout.MAX_PATH:
            found.append(NodeCandidate(place, nodes.tokens[place], parent, depth, cost))
    return found


def _realigned(nodes: Nodes, before: int) -> list[NodeCandidate]:
    """What may follow a token that is no child of the node at place `before`: see `tree_kernels.node_table.layout`."""
    children = [place for place in range(before + 1, nodes.ends[before]) if nodes.parents[place] == before]
    if not children:
        return []
    likeliest = min(children, key=lambda place: (nodes.costs[place], place))
    return _hung(nodes, likeliest, layout.SUBSTITUTION_COST)


def text_of(table: NodeTable, step: StepIntegers, b: int, root: int) -> list[int]:
    """The end of a sequence's text, as far back as runs are looked up, with `root` behind its keys."""
    prefix = int(step.prefix_lengths[b])
    keys = torch.arange(max(0, prefix - layout.WINDOW - layout.LONGEST), prefix, device=table.tokens.device)
    return [*table.tokens[_slots(table, step, b, keys).long()].tolist(), root]


def _find(table: NodeTable, step: StepIntegers, b: int, root: int, moves: int) -> None:
    """Let a sequence feed `root`, `moves` keys further on, and rank what may follow it."""
    step.prefix_lengths[b] += moves
    record = step.parameters[b * RECORD : (b + 1) * RECORD]
    if int(record[MODE]) in DRAWN_BY_POSITION:
        low = int(record[POSITION]) % 2**32 + moves
        # 32 bit as int32 holds them.
        record[POSITION] = (low + 2**31) % 2**32 - 2**31
        record[POSITION + 1] += low // 2**32
    prefix, slot = int(step.prefix_lengths[b]), int(table.table_slots[b])
    text = text_of(table, step, b, root)
    nodes = nodes_of(table.tables[slot]) if slot >= 0 else _NO_TREE
    place, before, reused, is_end = stand(nodes, text, prefix)
    recycled, owner, limit = None, int(table.owners[b]), int(table.limits[b])
    has_room = len(nodes.tokens) <= recycling.FIRST
    if is_end and has_room and table.recycles_in(step) and owner >= 0 and limit > 0:
        recycled = recycled_nodes(table.entries, owner, root)
    of_table = recycling.FIRST if recycled else NODES
    chain = look_up(text, table.lookup_tokens)
    kept = best(candidates(nodes, place, chain, before, reused, recycled), limit)
    table.counts[b], table.roots[b] = len(kept), root
    rows = {-1: 0} | {one.number: 1 + rank for rank, one in enumerate(kept)}
    table.keys[b] = layout.NO_KEY
    for rank, one in enumerate(kept):
        link = link_of(rows[one.parent], one.depth, one.number < of_table)
        table.keys[b, rank] = one.key
        chance = table.chances[one.cost // layout.COSTS_PER_CHANCE]
        table.ranked[b, :, rank] = torch.tensor([one.token, link, int(chance)], dtype=torch.int32)


def _lay_out(table: NodeTable, step: StepIntegers) -> None:
    """Give every sequence its rows, behind those that the host laid out."""
    sequences, rows_in_all, laid_out = len(step.prefix_lengths), len(step.token_ids), int(table.laid_out)
    counts = table.counts[:sequences].tolist()
    keys = [table.keys[b, : max(0, count)].tolist() for b, count in enumerate(counts)]
    row = int(step.query_starts[laid_out])
    room = rows_in_all - row - sum(count >= 0 for count in counts)
    bound = bound_for([key for own in keys for key in own], room)
    step.token_ids[row:] = 0
    step.positions[row:] = 0
    step.slots[row:] = -1
    step.owners[row:rows_in_all] = -1
    step.parents[row:] = 0
    step.causal[laid_out:sequences] = 0
    for b, count in enumerate(counts):
        if b < laid_out:
            continue
        taken = sum(key < bound for key in keys[b])
        if count >= 0:
            _lay_out_one(table, step, b, slice(row, row + 1 + taken))
            row += 1 + taken
        step.query_starts[b + 1] = row


def _lay_out_one(table: NodeTable, step: StepIntegers, b: int, rows: slice) -> None:
    taken, prefix = rows.stop - rows.start - 1, int(step.prefix_lengths[b])
    tokens, links, chances = table.ranked[b, :, :taken]
    below = slice(rows.start + 1, rows.stop)
    step.token_ids[rows.start], step.token_ids[below] = table.roots[b], tokens
    step.parents[rows.start], step.parents[below] = 0, links & 255
    step.positions[rows.start], step.positions[below] = prefix, prefix + (links >> 8 & 255)
    step.positions[rows] = step.positions[rows].clamp(max=table.last_position)
    step.slots[rows] = _slots(table, step, b, torch.arange(prefix, prefix + 1 + taken, device=step.slots.device))
    step.owners[rows] = b
    record = step.parameters[b * RECORD : (b + 1) * RECORD]
    record[FIRST_ROW], record[ROWS], record[IS_CHAIN] = rows.start, 1 + taken, 0
    unit, of_table = layout.SURE // layout.EXPECTED_UNIT, (links >> 16).bool()
    table.noted[0, b], table.noted[1, b] = of_table.sum(), chances.sum() // unit
    table.noted[2, b] = chances[of_table].sum() // unit
    kept = table.ranked[b, 2, : max(0, int(table.counts[b]))]
    for i, most in enumerate(PROSPECTS):
        table.noted[3 + i, b] = kept[:most].sum() // unit


def _slots(table: NodeTable, step: StepIntegers, b: int, keys: Tensor) -> Tensor:
    pages = step.page_table[int(step.page_starts[b]) :]
    return (pages[keys // table.page_size] * table.page_size + keys % table.page_size).int()


def _trees(step: StepIntegers) -> list[tuple[int, int, int]]:
    """(sequence, first row, rows) of those that have rows."""
    starts = step.query_starts.tolist()
    return [(b, row, end - row) for b, (row, end) in enumerate(itertools.pairwise(starts)) if end > row]
