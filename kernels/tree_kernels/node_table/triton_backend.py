"""The kernels of `tree_kernels.node_table` that move sequences on and rank what may follow, and the launches of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.node_table import layout, recycling
from tree_kernels.node_table.layout import ReportField
from tree_kernels.node_table.step_integers import StepIntegers
from tree_kernels.node_table.triton_lookup import last_longest_run, text_at
from tree_kernels.node_table.triton_recycling import recycle as recycle
from tree_kernels.node_table.triton_recycling import recycle_tree
from tree_kernels.node_table.triton_rows import (
    KEPT_ROWS,
    NO_KEY,
    TAKING_WARPS,
    bound_for,
    copy_tables_kernel,
    lay_out_kernel,
)
from tree_kernels.verification.triton_rows import (
    COUPLED,
    MODE,
    POSITION,
    ROWS,
    TYPICAL,
    moved_long,
    record_of,
    without_mark,
)

if TYPE_CHECKING:
    from tree_kernels.node_table.dispatch import NodeTable
    from tree_kernels.node_table.mailboxes import Mailboxes
    from tree_kernels.verification.dispatch import Verdicts


# Width of a sequence's candidates.
_CANDIDATES = tl.constexpr(triton.next_power_of_2(layout.NODES + layout.LOOKUP))
# Bounds that are tried at once for the keys of a sequence's candidates: seven rounds at most, in each 32 comparisons a
# thread. 32 would take six of twice the work.
_BOUNDS = tl.constexpr(16)
# Above the key of any node, however unlikely.
_NO_CHILD = tl.constexpr(1 << 62)
_NODES, _TABLE = tl.constexpr(layout.NODES), tl.constexpr(layout.TABLE)
_RECYCLED, _RECYCLED_NODES = tl.constexpr(recycling.FIRST), tl.constexpr(recycling.NODES)
_TOKENS, _PARENTS, _ENDS = tl.constexpr(layout.TOKENS), tl.constexpr(layout.PARENTS), tl.constexpr(layout.ENDS)
_DEPTHS, _COSTS = tl.constexpr(layout.DEPTHS), tl.constexpr(layout.COSTS)
_MAX_PATH = tl.constexpr(layout.MAX_PATH)
_SUBSTITUTION_COST = tl.constexpr(layout.SUBSTITUTION_COST)
_REUSE_COST = tl.constexpr(layout.REUSE_COST)
_PROSPECTS = tl.constexpr(len(layout.PROSPECTS))
_PROSPECTS_BLOCK = tl.constexpr(triton.next_power_of_2(len(layout.PROSPECTS)))
_MOST_COST, _KEYS_PER_COST = tl.constexpr(layout.MOST_COST), tl.constexpr(layout.KEYS_PER_COST)
_COSTS_PER_CHANCE = tl.constexpr(layout.COSTS_PER_CHANCE)
_LOOKUP_COSTS = tl.constexpr(layout.LONGEST + 1)
# In the order of `ReportField`.
(
    _ACCEPTED, _DRAFTED, _DRAFTED_FROM_TABLE, _EXPECTED, _FIRST_ROW, _ACCEPTED_FROM_TABLE, _EXPECTED_FROM_TABLE,
    _FIRST_PROSPECT,
) = (tl.constexpr(int(field)) for field in ReportField)  # fmt: skip
_REPORT, _REPORT_TOKENS = tl.constexpr(layout.REPORT), tl.constexpr(layout.REPORT_TOKENS)
_REPORT_ROWS = tl.constexpr(layout.REPORT_ROWS)


@triton.jit
def _larger(one, other):  # type: ignore[no-untyped-def]
    return tl.maximum(one, other)


@triton.jit
def _likeliest(among, cost, i):  # type: ignore[no-untyped-def]
    """The place `i` of least `cost` where `among` [CANDIDATES], the first of several; -1 where that is nowhere."""
    # A table may hold paths that are too unlikely for a key of 32 bits.
    least = tl.min(tl.where(among, cost.to(tl.int64) * _KEYS_PER_COST + i, _NO_CHILD), axis=0)
    return tl.where(least < _NO_CHILD, least % _KEYS_PER_COST, -1).to(tl.int32)


@triton.jit
def _nodes_at(table, i):  # type: ignore[no-untyped-def]
    """Token, parent, end, depth and cost of the nodes at places `i` [CANDIDATES]. A table uses only so many; what lies
    behind is read without waiting for the count."""
    there = i < _NODES
    token = tl.load(table + _TOKENS + i, mask=there, other=-1)
    parent = tl.load(table + _PARENTS + i, mask=there, other=0)
    end = tl.load(table + _ENDS + i, mask=there, other=0)
    depth = tl.load(table + _DEPTHS + i, mask=there, other=0)
    return token, parent, end, depth, tl.load(table + _COSTS + i, mask=there, other=0)


@triton.jit
def _end_and_cost(table, place):  # type: ignore[no-untyped-def]
    """Of the node at a place; zeros where that is -1."""
    end = tl.load(table + _ENDS + place, mask=place >= 0, other=0)
    return end, tl.load(table + _COSTS + place, mask=place >= 0, other=0)


@triton.jit
def _nearest(on_path, depth, age, i):  # type: ignore[no-untyped-def]
    """The last token's place or else, of the token before, one that is to be realigned, -1 without either; and whether
    it is the former, which is the larger of both."""
    near = tl.where(on_path & (depth == age - 1), 2 * i, -2)
    near = tl.max(tl.where(on_path & (depth == age), 2 * i + 1, near), axis=0)
    return near >> 1, (near & 1) == 1


@triton.jit
def _top(table, near, near_end, near_cost, lost, children, cost, i):  # type: ignore[no-untyped-def]
    """The node that what may follow is below: the last token's at `near`, or where that is `lost` the likeliest of the
    `children` [CANDIDATES] in its place. Its place, its end, and its cost less what the exchange costs."""
    top, end, own_cost = near, near_end, near_cost
    if lost:
        top = _likeliest(children, cost, i)
        end, own_cost = _end_and_cost(table, top)
        own_cost -= _SUBSTITUTION_COST
    return top, end, own_cost


@triton.jit
def _donor(table, reuses, having, cost, i):  # type: ignore[no-untyped-def]
    """The likeliest of the nodes `having` [CANDIDATES] a token and anything below it, -1 for none and the root left
    out: its place, its end, its depth, and its cost less what reusing costs. None unless it `reuses`."""
    place, end, depth, own_cost = tl.full([], -1, tl.int32), 0, 0, 0
    if reuses:
        place = _likeliest(having & (i > 0), cost, i)
        end, own_cost = _end_and_cost(table, place)
        depth = tl.load(table + _DEPTHS + place, mask=place >= 0, other=0)
        own_cost -= _REUSE_COST
    return place, end, depth, own_cost


@triton.jit
def _within(part, differs, end, i):  # type: ignore[no-untyped-def]
    """Which nodes of `part` [CANDIDATES] are below none that `differs` from the text. Intervals of places are nested or
    apart, so the farthest end of those up to a place shows whether one of them covers it."""
    return part & (tl.associative_scan(tl.where(part & differs, end, 0), 0, _larger) <= i)


@triton.jit
def _recycled_at(  # type: ignore[no-untyped-def]
    entries, shape, tree, owner, tokens, pages, prefix, root, end, chain, i, wanted, PAGE_SIZE: tl.constexpr
):
    """Which candidates `i` are of a tree of recycled tokens, none unless it is `wanted`; their tokens, parents, depths
    and costs; and which of them are in the chain."""
    if wanted:
        recycle_tree(entries, shape, tree, owner, root)
    place = tl.where(wanted & (i < _NODES), i - _RECYCLED, -1)
    there = place >= 0
    token = tl.load(tree + place, mask=there, other=-1)
    cost = tl.load(tree + _RECYCLED_NODES + place, mask=there, other=0)
    parent = tl.load(shape + place, mask=there, other=0) + _RECYCLED
    behind = tl.load(shape + 2 * _RECYCLED_NODES + place, mask=there, other=0) + _RECYCLED
    depth = tl.load(shape + 3 * _RECYCLED_NODES + place, mask=there, other=0)
    position = tl.where(there, prefix + depth, -1)
    text_token = text_at(tokens, pages, prefix, root, end, chain, position, PAGE_SIZE)
    return there, token, parent, depth, cost, _within(there, token != text_token, behind, i)


@triton.jit
def _with_chain(both, in_chain, cost, depth, first, following, i):  # type: ignore[no-untyped-def]
    """The costs [CANDIDATES] where nodes that are in the chain too (`both`) cost the less of either, and the rest of
    the chain hangs below the last of them; the place of that, -1 for none, and its depth."""
    chain_cost = first + following * (depth - 1)
    cost = tl.where(both, tl.minimum(cost, chain_cost), cost)
    last = tl.max(tl.where(both, i, -1), axis=0)
    last_depth = tl.sum(tl.where(both & (i == last), depth, 0), axis=0)
    last_cost = tl.sum(tl.where(both & (i == last), cost, 0), axis=0)
    hung = tl.where(last >= 0, last_cost + following * (depth - last_depth), chain_cost)
    return tl.where(in_chain, hung, cost), last, last_depth


@triton.jit
def _keep_best(  # type: ignore[no-untyped-def]
    chances, counts, keys, ranked, unranked, b, limit, key, token, depth, parent, of_table
):
    """Keep the sequence's candidates of the least `key` [CANDIDATES], up to `limit`, by rising keys.

    All keys but `NO_KEY` differ, and none is negative. `parent` is a candidate of a smaller key, -1 for the root.
    Numbers below `of_table` are of the table. There is a barrier before the first store to what other threads may read.
    """
    kept = key < bound_for(key, tl.minimum(limit, KEPT_ROWS - 1), _BOUNDS)
    count = tl.sum(kept.to(tl.int32), axis=0)
    # Put together, the few that are kept can all be compared with each other.
    unranked += b * 4 * KEPT_ROWS
    out = unranked + tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(out, key, mask=kept)
    tl.store(out + KEPT_ROWS, token, mask=kept)
    tl.store(out + 2 * KEPT_ROWS, depth, mask=kept)
    tl.store(out + 3 * KEPT_ROWS, parent, mask=kept)
    # They are other threads'.
    tl.debug_barrier()
    k = tl.arange(0, KEPT_ROWS)
    there = k < count
    key = tl.load(unranked + k, mask=there, other=NO_KEY)
    token = tl.load(unranked + KEPT_ROWS + k, mask=there, other=0)
    depth = tl.load(unranked + 2 * KEPT_ROWS + k, mask=there, other=0)
    parent = tl.load(unranked + 3 * KEPT_ROWS + k, mask=there, other=-1)
    chance = tl.load(chances + key // _KEYS_PER_COST // _COSTS_PER_CHANCE, mask=there, other=0)
    # What lies behind keeps its place.
    rank = tl.where(there, tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1), k)
    # Its number is that of a table's root, which is no candidate.
    number = key % _KEYS_PER_COST
    above = tl.max(tl.where(number[None, :] == parent[:, None], rank[None, :], -1), axis=1)
    link = tl.where(number < of_table, 1 << 16, 0) + (depth << 8) + above + 1
    tl.store(keys + b * KEPT_ROWS + rank, key)
    out = ranked + b * 3 * KEPT_ROWS + rank
    tl.store(out, token, mask=there)
    tl.store(out + KEPT_ROWS, link, mask=there)
    tl.store(out + 2 * KEPT_ROWS, chance, mask=there)
    tl.store(counts + b, count)


@triton.jit
def _rank(  # type: ignore[no-untyped-def]
    tables, table_slots, owners, entries, shape, recycled, tokens, pages, lookup_costs, chances, counts, keys, ranked,
    unranked, b, prefix, root, limit, CHAIN: tl.constexpr, PAGE_SIZE: tl.constexpr, RECYCLES: tl.constexpr,
):  # fmt: skip
    """Find what may follow the sequence's root, and keep the best by rising keys; see `node_table.torch_backend._find`.

    Candidate i is a place of the table below `NODES`, the last of them those of a recycled tree where there is one, and
    a token of the chain from there on. There is a barrier before the first store to what other threads may read.
    """
    slot = tl.load(table_slots + b)
    table = tables + tl.maximum(slot, 0) * _TABLE
    i = tl.arange(0, _CANDIDATES)
    base = tl.load(table)
    nodes = tl.where(slot >= 0, tl.load(table + 1), 0)
    own_token, own_parent, own_end, own_depth, own_cost = _nodes_at(table, i)
    node = i < nodes
    in_chain = i >= _NODES
    run, end, chain = 0, prefix, 0
    if CHAIN > 0:
        run, end = last_longest_run(tokens, pages, prefix, root, PAGE_SIZE)
        chain = tl.where(run > 0, CHAIN, 0)
    first = tl.load(lookup_costs + run)
    following = tl.load(lookup_costs + _LOOKUP_COSTS + run)

    # Walk: a node whose token the text, or the chain behind it, does not have leaves all below it out.
    position = tl.where(in_chain, i - _NODES + prefix + 1, base - 1 + own_depth)
    text_token = text_at(tokens, pages, prefix, root, end, chain, position, PAGE_SIZE)
    on_path = _within(node, (i > 0) & (own_token != text_token), own_end, i)
    age = prefix + 1 - base
    near, held = _nearest(on_path, own_depth, age, i)
    lost = (near >= 0) & (held == 0)
    near_end, near_cost = _end_and_cost(table, near)
    # What may follow is below `top`.
    children = node & (i > near) & (own_parent == near)
    top, top_end, top_cost = _top(table, near, near_end, near_cost, lost, children, own_cost, i)
    # What is below another node of the last token hangs nowhere else.
    nothing_below = (held == 0) | (near_end == near + 1)
    reuses = nothing_below & (nodes > 0) & (age >= 0) & (age <= _MAX_PATH)
    having = node & (own_token == root) & (own_end > i + 1)
    donor, donor_end, donor_depth, donor_cost = _donor(table, reuses, having, own_cost, i)
    reused = node & (donor >= 0) & (i > donor) & (i < donor_end)

    # None of a realigned tree is on the text's path.
    below = node & (top >= 0) & (i > top) & (i < top_end) & (reused == 0)
    depth = tl.where(in_chain, i - _NODES + 1, own_depth - age)
    depth = tl.where(reused, own_depth - donor_depth, depth)
    cost = tl.where(reused, own_cost - donor_cost, own_cost - top_cost)
    of_root = tl.where(reused, own_parent == donor, own_parent == top)
    of_table = tl.full([], _NODES, tl.int32)
    if RECYCLES:
        owner = tl.load(owners + b)
        wanted = nothing_below & (nodes <= _RECYCLED) & (owner >= 0) & (limit > 0)
        of_tree, tree_token, tree_parent, tree_depth, tree_cost, followed = _recycled_at(
            entries, shape, recycled + b * 2 * _RECYCLED_NODES, owner, tokens, pages, prefix, root, end, chain, i,
            wanted, PAGE_SIZE,
        )  # fmt: skip
        own_token, own_parent = tl.where(of_tree, tree_token, own_token), tl.where(of_tree, tree_parent, own_parent)
        depth, cost = tl.where(of_tree, tree_depth, depth), tl.where(of_tree, tree_cost, cost)
        on_path, below = on_path | followed, below | (of_tree & (i > _RECYCLED))
        of_root = tl.where(of_tree, tree_parent == _RECYCLED, of_root)
        of_table = tl.where(wanted, _RECYCLED, of_table)
    cost, last, last_depth = _with_chain(below & on_path & (depth <= chain), in_chain, cost, depth, first, following, i)
    hangs = (below | reused) & (depth <= _MAX_PATH)
    candidate = tl.where(in_chain, (depth > last_depth) & (depth <= chain), hangs)
    key = tl.where(candidate & (cost < _MOST_COST), cost * _KEYS_PER_COST + i, NO_KEY)

    parent = tl.where(of_root, -1, own_parent)
    parent = tl.where(in_chain, tl.where(depth > last_depth + 1, i - 1, last), parent)
    token = tl.where(in_chain, text_token, own_token)
    _keep_best(chances, counts, keys, ranked, unranked, b, limit, key, token, depth, parent, of_table)


@triton.jit
def _move(records, prefix_lengths, roots, b, prefix, root, moves):  # type: ignore[no-untyped-def]
    """Let a sequence feed `root` as key `prefix`, which is `moves` keys further on."""
    record = record_of(records, b)
    mode = tl.load(record + MODE)
    draws_by_position = (mode == COUPLED) | (mode == TYPICAL)
    low = tl.load(record + POSITION)
    high = tl.load(record + POSITION + 1)
    # One thread stores a scalar, after every warp has read it.
    tl.debug_barrier()
    tl.store(prefix_lengths + b, prefix)
    low, high = moved_long(low, high, moves)
    tl.store(record + POSITION, low, mask=draws_by_position)
    tl.store(record + POSITION + 1, high, mask=draws_by_position)
    tl.store(roots + b, root)


@triton.jit(do_not_specialize=["laid_out"])
def _choose_rows_kernel(  # type: ignore[no-untyped-def]
    token_ids, records, query_starts, prefix_lengths, page_starts, page_table, tokens, tables, table_slots, owners,
    entries, shape, recycled, lookup_costs, chances, counts, roots, keys, ranked, unranked, passes, accepted,
    limits, laid_out_before, pending, moves, laid_out, CHAIN: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RECYCLES: tl.constexpr,
):  # fmt: skip
    """One sequence a program; see `NodeTable.choose_rows`."""
    b = tl.program_id(0)
    if b == 0:
        tl.store(laid_out_before, laid_out)
    tl.store(passes + b, 0)
    tl.store(accepted + b, 0)
    row = tl.load(query_starts + b)
    if (b >= laid_out) & (tl.load(query_starts + b + 1) > row):
        token = tl.load(token_ids + row)
        root = tl.load(pending - 1 - token, mask=token < 0, other=0)
        root = tl.where(token < 0, root, token)
        moved = tl.load(moves - 1 - token, mask=token < 0, other=0)
        limit = tl.load(record_of(records, b) + ROWS) - 1
        prefix = tl.load(prefix_lengths + b) + moved
        tl.store(limits + b, limit)
        _rank(
            tables, table_slots, owners, entries, shape, recycled, tokens, page_table + tl.load(page_starts + b),
            lookup_costs, chances, counts, keys, ranked, unranked, b, prefix, root, limit, CHAIN, PAGE_SIZE,
            RECYCLES,
        )  # fmt: skip
        _move(records, prefix_lengths, roots, b, prefix, root, moved)
    else:
        tl.store(counts + b, -1)
        tl.store(limits + b, 0)


@triton.jit
def _report_kernel(  # type: ignore[no-untyped-def]
    token_ids, records, query_starts, prefix_lengths, page_starts, page_table, tokens, tables, table_slots, owners,
    entries, shape, recycled, lookup_costs, chances, counts, roots, keys, ranked, unranked, passes, accepted,
    limits, laid_out, accepted_counts, next_tokens, accepted_rows, noted, reports, REPORT_STRIDE: tl.constexpr,
    NOTED_STRIDE: tl.constexpr, LAST: tl.constexpr, CHAIN: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RECYCLES: tl.constexpr,
):  # fmt: skip
    """One sequence a program; see `NodeTable.report_and_choose_rows`, and `NodeTable.report` for `LAST`.
    `reports` [B, P, REPORT]."""
    b = tl.program_id(0)
    row = tl.load(query_starts + b)
    rows = tl.load(query_starts + b + 1) - row
    by_host = b < tl.load(laid_out)
    if (rows > 0) & by_host:
        out = reports + b * REPORT_STRIDE + tl.load(passes + b) * _REPORT
        count = tl.load(accepted_counts + b)
        tl.store(out + _ACCEPTED, count)
        tl.store(accepted + b, count)
        tl.store(out + _REPORT_TOKENS, tl.load(next_tokens + b))
    if (rows > 0) & (by_host == 0):
        count, reported = tl.load(accepted_counts + b), tl.load(next_tokens + b)
        root = without_mark(reported)
        done, so_far = tl.load(passes + b), tl.load(accepted + b)
        limit, from_table = tl.load(limits + b), tl.load(noted + b)
        expected, expected_from_table = tl.load(noted + NOTED_STRIDE + b), tl.load(noted + 2 * NOTED_STRIDE + b)
        prospect = tl.arange(0, _PROSPECTS_BLOCK)
        prospects = tl.load(noted + (3 + prospect) * NOTED_STRIDE + b, mask=prospect < _PROSPECTS, other=0)
        prefix = tl.load(prefix_lengths + b) + count + 1
        k = tl.arange(0, KEPT_ROWS)
        path = tl.load(accepted_rows + row + k, mask=k < count, other=1)
        token = tl.load(token_ids + row + path, mask=k < count, other=0)
        link = tl.load(ranked + b * 3 * KEPT_ROWS + KEPT_ROWS + path - 1, mask=k < count, other=0)
        accepted_from_table = tl.sum(link >> 16, axis=0)
        if not LAST:
            _rank(
                tables, table_slots, owners, entries, shape, recycled, tokens, page_table + tl.load(page_starts + b),
                lookup_costs, chances, counts, keys, ranked, unranked, b, prefix, root, limit, CHAIN, PAGE_SIZE,
                RECYCLES,
            )  # fmt: skip
            _move(records, prefix_lengths, roots, b, prefix, root, count + 1)
        out = reports + b * REPORT_STRIDE + done * _REPORT
        tl.store(out + _ACCEPTED, count)
        tl.store(out + _DRAFTED, rows - 1)
        tl.store(out + _DRAFTED_FROM_TABLE, from_table)
        tl.store(out + _EXPECTED, expected)
        tl.store(out + _FIRST_ROW, row)
        tl.store(out + _ACCEPTED_FROM_TABLE, accepted_from_table)
        tl.store(out + _EXPECTED_FROM_TABLE, expected_from_table)
        tl.store(out + _FIRST_PROSPECT + prospect, prospects)
        tl.store(out + _REPORT_TOKENS + k, tl.where(k == count, reported, token), mask=k <= count)
        tl.store(out + _REPORT_ROWS + k, path, mask=k < count)
        tl.store(passes + b, done + 1)
        tl.store(accepted + b, so_far + count)
    elif not LAST:
        tl.store(counts + b, -1)


def copy_tables(table: NodeTable, mail: Mailboxes) -> None:
    """See `NodeTable.copy_tables`."""
    copy_tables_kernel[(table.max_sequences,)](
        mail.newest, mail.tables, table.taken, table.tables, num_warps=TAKING_WARPS
    )


def choose_rows(table: NodeTable, step: StepIntegers, pending: Tensor, moves: Tensor, laid_out: int) -> None:
    """See `NodeTable.choose_rows`."""
    _choose_rows_kernel[(len(step.prefix_lengths),)](
        *_tensors(table, step), pending, moves, laid_out, **_constants(table, step)
    )
    _lay_out(table, step)


def report_and_choose_rows(table: NodeTable, step: StepIntegers, verdicts: Verdicts, *, last: bool) -> None:
    """See `NodeTable.report_and_choose_rows`, and `NodeTable.report` for `last`."""
    _report_kernel[(len(step.prefix_lengths),)](
        *_tensors(table, step), verdicts.accepted_counts, verdicts.next_tokens, verdicts.accepted_rows, table.noted,
        table.reports, REPORT_STRIDE=table.reports.stride(0), NOTED_STRIDE=table.noted.stride(0), LAST=last,
        **_constants(table, step),
    )  # fmt: skip
    if not last:
        _lay_out(table, step)


def _tensors(table: NodeTable, step: StepIntegers) -> tuple[Tensor, ...]:
    return (
        step.token_ids, step.parameters, step.query_starts, step.prefix_lengths, step.page_starts, step.page_table,
        table.tokens, table.tables, table.table_slots, table.owners, table.entries, table.shape, table.recycled,
        table.lookup_costs, table.chances, table.counts, table.roots, table.keys, table.ranked,
        table.unranked, table.passes, table.accepted, table.limits, table.laid_out,
    )  # fmt: skip


def _constants(table: NodeTable, step: StepIntegers) -> dict[str, Any]:
    recycles = table.recycles_in(step)
    sizes = {"CHAIN": table.lookup_tokens, "PAGE_SIZE": table.page_size, "RECYCLES": recycles}
    # Two of a sequence's candidates a thread. With these and `_BOUNDS` 1,007 nodes take 20 us on an H100
    # (`benchmarks/results/2026-11-25-h100-widened-fourteenth.md`); no others were measured.
    return sizes | {"num_warps": 16}


def _lay_out(table: NodeTable, step: StepIntegers) -> None:
    sequences = len(step.prefix_lengths)
    warps, bounds = 8, 4
    # Up to so many sequences one warp chooses for all, and up to so many four do.
    if sequences <= 2:
        warps, bounds = 1, 16
    elif sequences <= 64:
        warps, bounds = 4, 8
    lay_out_kernel[(sequences,)](
        step.token_ids, step.positions, step.slots, step.owners, step.parents, step.parameters, step.query_starts,
        step.prefix_lengths, step.page_starts, step.page_table, step.causal, table.counts, table.roots, table.keys,
        table.ranked, table.noted, sequences, len(step.token_ids), table.last_position,
        table.laid_out, PAGE_SIZE=table.page_size, NOTED_STRIDE=table.noted.stride(0),
        BLOCK_B=triton.next_power_of_2(sequences), BOUNDS=bounds, num_warps=warps,
    )  # fmt: skip
