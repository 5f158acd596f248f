"""The kernels of `tree_kernels.node_table` that choose rows and lay them out, and the one that copies tables."""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.node_table import layout, mailboxes
from tree_kernels.verification.triton_rows import FIRST_ROW, IS_CHAIN, ROWS, record_of

NO_KEY = tl.constexpr(layout.NO_KEY)
# A sequence's root and the candidates that are kept.
KEPT_ROWS = tl.constexpr(layout.KEPT + 1)
_PROSPECTS, _PROSPECT_COUNT = tl.constexpr(layout.PROSPECTS), tl.constexpr(len(layout.PROSPECTS))
_EXPECTED = tl.constexpr(layout.SURE // layout.EXPECTED_UNIT)
_TURNS = tl.constexpr(mailboxes.TURNS)
_TABLE, _TABLE_BLOCK = tl.constexpr(layout.TABLE), tl.constexpr(triton.next_power_of_2(layout.TABLE))
# Of a program that takes a table. Chosen, not measured: ten integers a thread.
TAKING_WARPS = 16
_THREADS = tl.constexpr(32 * TAKING_WARPS)


@triton.jit
def bound_for(keys, room, BOUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest bound with at most `room` of `keys` [n] below it; see `node_table.torch_backend.bound_for`."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], NO_KEY, tl.int32)
    step = 1 + tl.arange(0, BOUNDS)
    # The first round tests `high` among others, and ends the search where there is room for all.
    while low < high:
        width = (high - low + BOUNDS - 1) // BOUNDS
        bounds = tl.minimum(low + width * step, high)
        below = tl.sum((keys[None, :] < bounds[:, None]).to(tl.int32), axis=1)
        fitting = tl.sum((below <= room).to(tl.int32), axis=0)
        beyond = low + width * (fitting + 1) - 1
        low = tl.minimum(low + width * fitting, high)
        high = tl.where(fitting == BOUNDS, low, tl.minimum(beyond, high - 1))
    return low


@triton.jit
def lay_out_kernel(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, owners, parents, records, query_starts, prefix_lengths, page_starts, page_table,
    causal, counts, roots, keys, ranked, noted, sequences, rows_in_all, last_position, laid_out,
    PAGE_SIZE: tl.constexpr, NOTED_STRIDE: tl.constexpr, BLOCK_B: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """One sequence a program, and the first one the free rows; see `node_table.torch_backend._lay_out`.

    Each program repeats the choice among all candidates [B * KEPT_ROWS]. Nothing is stored of the first `laid_out`
    sequences, which own no candidates.
    """
    b = tl.program_id(0)
    k = tl.arange(0, KEPT_ROWS)
    every = tl.arange(0, BLOCK_B)
    here = tl.load(counts + every, mask=every < sequences, other=-1) >= 0
    candidate = tl.arange(0, BLOCK_B * KEPT_ROWS)
    owner = candidate // KEPT_ROWS
    all_keys = tl.load(keys + candidate, mask=owner < sequences, other=NO_KEY)
    owner_count = tl.load(counts + owner, mask=owner < sequences, other=-1)
    all_keys = tl.where(owner_count >= 0, all_keys, NO_KEY)
    # What this program lays out, loaded before it is known how much of it is taken.
    own_key = tl.load(keys + b * KEPT_ROWS + k)
    count = tl.load(counts + b)
    prefix, root = tl.load(prefix_lengths + b), tl.load(roots + b)
    pages = page_table + tl.load(page_starts + b)
    own = ranked + b * 3 * KEPT_ROWS + k - 1
    token = tl.load(own, mask=k > 0, other=0)
    link = tl.load(own + KEPT_ROWS, mask=k > 0, other=0)
    chance = tl.load(own + 2 * KEPT_ROWS, mask=k > 0, other=0)

    # After the rows of sequences that read, which no program stores.
    laid_out_count = tl.load(laid_out)
    first = tl.load(query_starts + laid_out_count)
    bound = bound_for(all_keys, rows_in_all - first - tl.sum(here.to(tl.int32), axis=0), BOUNDS)
    taken = all_keys < bound
    before = tl.sum((taken & (owner < b)).to(tl.int32), axis=0) + tl.sum((here & (every < b)).to(tl.int32), axis=0)
    row = first + before
    rows = tl.where(count >= 0, 1 + tl.sum((own_key < bound).to(tl.int32), axis=0), 0)
    tl.store(query_starts + b + 1, row + rows, mask=b >= laid_out_count)
    tl.store(causal + b, 0, mask=b >= laid_out_count)
    if rows > 0:
        mine = k < rows
        key = prefix + k
        page = tl.load(pages + key // PAGE_SIZE, mask=mine, other=0)
        # Row 0 is the root, at depth 0.
        depth = tl.where(k > 0, (link >> 8) & 255, 0)
        tl.store(token_ids + row + k, tl.where(k > 0, token, root), mask=mine)
        tl.store(parents + row + k, link & 255, mask=mine)
        tl.store(positions + row + k, tl.minimum(prefix + depth, last_position), mask=mine)
        tl.store(slots + row + k, page * PAGE_SIZE + key % PAGE_SIZE, mask=mine)
        tl.store(owners + row + k, b + tl.zeros_like(k), mask=mine)
        record = record_of(records, b)
        tl.store(record + FIRST_ROW, row)
        tl.store(record + ROWS, rows)
        tl.store(record + IS_CHAIN, 0)
        tl.store(noted + b, tl.sum(tl.where(mine, link >> 16, 0), axis=0))
        tl.store(noted + NOTED_STRIDE + b, tl.sum(tl.where(mine, chance, 0), axis=0) // _EXPECTED)
        from_table = mine & ((link >> 16) > 0)
        tl.store(noted + 2 * NOTED_STRIDE + b, tl.sum(tl.where(from_table, chance, 0), axis=0) // _EXPECTED)
        for i in tl.static_range(0, _PROSPECT_COUNT):
            # Row 0 is the root.
            near = (k <= count) & (k <= _PROSPECTS[i])
            tl.store(noted + (3 + i) * NOTED_STRIDE + b, tl.sum(tl.where(near, chance, 0), axis=0) // _EXPECTED)
    if b == 0:
        end = first + tl.sum(taken.to(tl.int32), axis=0) + tl.sum(here.to(tl.int32), axis=0)
        for free in tl.range(end, rows_in_all, KEPT_ROWS):
            at = free + k
            zeros = tl.zeros_like(k)
            tl.store(token_ids + at, zeros, mask=at < rows_in_all)
            tl.store(parents + at, zeros, mask=at < rows_in_all)
            tl.store(positions + at, zeros, mask=at < rows_in_all)
            tl.store(slots + at, zeros - 1, mask=at < rows_in_all)
            tl.store(owners + at, zeros - 1, mask=at < rows_in_all)


@triton.jit
def _number_of(newest, slot):  # type: ignore[no-untyped-def]
    """The number of the newest table in a box. It may be written concurrently; all threads get the same one: each of
    them reads it, and the largest is taken."""
    return tl.max(tl.load(newest + slot + tl.zeros([_THREADS], tl.int32), volatile=True), axis=0)


@triton.jit
def copy_tables_kernel(newest, boxes, taken, tables):  # type: ignore[no-untyped-def]
    """One slot a program; see `NodeTable.copy_tables`."""
    slot = tl.program_id(0)
    number = _number_of(newest, slot)
    if number != tl.load(taken + slot):
        i = tl.arange(0, _TABLE_BLOCK)
        box = boxes + (slot * _TURNS + number % _TURNS) * _TABLE
        new = tl.load(box + i, mask=i < _TABLE, other=0, volatile=True)
        tl.store(tables + slot * _TABLE + i, new, mask=i < _TABLE)
        # All was read, since it is stored; and every thread has read `taken`, which changes now.
        tl.debug_barrier()
        if _number_of(newest, slot) != number:
            # It may be torn: no node. Which of several newer tables may be on its way to its place is not known here.
            tl.store(tables + slot * _TABLE + 1, 0)
            number = -1
        tl.store(taken + slot, number)
