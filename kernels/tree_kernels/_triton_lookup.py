"""See `tree_kernels.lookup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.feeding import StepIntegers
from tree_kernels.lookup import LONGEST, MAX_LOOKED_UP, SAID, WINDOW
from tree_kernels.row_shares import MOST_COST
from tree_kernels.tree_mask import MAX_TREE_ROWS
from tree_kernels.verification_records import FIRST_ROW, MODE, POSITION, RECORD, ROWS, Mode

if TYPE_CHECKING:
    from tree_kernels.device_verification import Verdicts
    from tree_kernels.lookup import DeviceLookup

# Tokens that are compared at once; a longer run counts for more than a later one.
_BLOCK = 1024
_RUN_BITS = 26
# Rows of a sequence.
_BLOCK_K = triton.next_power_of_2(1 + MAX_LOOKED_UP)
# Sequences of which one warp adds up the rows.
_ONE_WARP = 64


@triton.jit
def _tokens_at(tokens, pages, keys, mask, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens fed as `keys` [n] of a sequence whose `pages` these are; -1 where masked."""
    page = tl.load(pages + keys // PAGE_SIZE, mask=mask, other=0)
    return tl.load(tokens + page * PAGE_SIZE + keys % PAGE_SIZE, mask=mask, other=-1)


@triton.jit
def _last_longest_run(  # type: ignore[no-untyped-def]
    tokens, pages, prefix, root,
    PAGE_SIZE: tl.constexpr, LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The length of the run that `lookup.longest_run` finds, and the key behind it; 0 and `prefix` without one."""
    first = tl.maximum(prefix - WINDOW, 0)
    best = -1
    for start in range(first, prefix, BLOCK):
        j = start + tl.arange(0, BLOCK)
        same = _tokens_at(tokens, pages, j, j < prefix, PAGE_SIZE) == root
        run = same.to(tl.int32)
        # Loads do not wait for each other: whether a run goes on is asked afterwards.
        for i in tl.static_range(1, LONGEST):
            wanted = _tokens_at(tokens, pages, prefix - i, prefix >= i, PAGE_SIZE)
            before = _tokens_at(tokens, pages, j - i, (j >= i) & (j < prefix), PAGE_SIZE)
            same = same & (before == wanted) & (before >= 0)
            run += same.to(tl.int32)
        found = tl.where(run > 0, (run << RUN_BITS) + (j - first), -1)
        best = tl.maximum(best, tl.max(found, axis=0))
    end = tl.where(best < 0, prefix, first + (best & ((1 << RUN_BITS) - 1)) + 1)
    return tl.where(best < 0, 0, best >> RUN_BITS), end


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    records, prefix_lengths, pages, tokens, runs, run_ends, roots, b, root, moves,
    PAGE_SIZE: tl.constexpr, RECORD: tl.constexpr, MODE: tl.constexpr, POSITION: tl.constexpr, RACED: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `DeviceLookup._find`. All that the program reads of what it writes is read before its first store."""
    prefix = tl.load(prefix_lengths + b) + moves
    raced = tl.load(records + b * RECORD + MODE) == RACED
    before = tl.load(records + b * RECORD + POSITION)
    high = tl.load(records + b * RECORD + POSITION + 1)
    run, end = _last_longest_run(tokens, pages, prefix, root, PAGE_SIZE, LONGEST, WINDOW, RUN_BITS, BLOCK)
    # One thread stores what is one number, and every warp has read it by now.
    tl.debug_barrier()
    tl.store(prefix_lengths + b, prefix)
    low = before + moves
    tl.store(records + b * RECORD + POSITION, low, mask=raced)
    # Of two's complement: the sum wraps where it goes from a negative number to one that is not.
    tl.store(records + b * RECORD + POSITION + 1, high + tl.where((before < 0) & (low >= 0), 1, 0), mask=raced)
    tl.store(runs + b, run)
    tl.store(run_ends + b, end)
    tl.store(roots + b, root)


@triton.jit
def _begin_kernel(  # type: ignore[no-untyped-def]
    token_ids, records, query_starts, prefix_lengths, page_starts, page_table, tokens, runs, run_ends, roots,
    awaited, moves, passes, accepted, limits, ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RECORD: tl.constexpr, MODE: tl.constexpr, POSITION: tl.constexpr, RACED: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence a program; see `DeviceLookup.begin`."""
    b = tl.program_id(0)
    tl.store(passes + b, 0)
    tl.store(accepted + b, 0)
    row = tl.load(query_starts + b)
    if tl.load(query_starts + b + 1) > row:
        token = tl.load(token_ids + row)
        root = tl.load(awaited - 1 - token, mask=token < 0, other=0)
        moved = tl.load(moves - 1 - token, mask=token < 0, other=0)
        tl.store(limits + b, tl.load(records + b * RECORD + ROWS) - 1)
        _find(
            records, prefix_lengths, page_table + tl.load(page_starts + b), tokens, runs, run_ends, roots, b,
            tl.where(token < 0, root, token), moved,
            PAGE_SIZE, RECORD, MODE, POSITION, RACED, LONGEST, WINDOW, RUN_BITS, BLOCK,
        )  # fmt: skip
    else:
        tl.store(runs + b, -1)


@triton.jit
def _go_on_kernel(  # type: ignore[no-untyped-def]
    token_ids, records, query_starts, prefix_lengths, page_starts, page_table, tokens, runs, run_ends, roots,
    accepted_counts, next_tokens, said, passes, accepted, SAID_STRIDE: tl.constexpr, SAID: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RECORD: tl.constexpr, MODE: tl.constexpr, POSITION: tl.constexpr, RACED: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence a program; see `DeviceLookup.go_on`. `said` [B, P, SAID]."""
    b = tl.program_id(0)
    row = tl.load(query_starts + b)
    rows = tl.load(query_starts + b + 1) - row
    if rows > 0:
        count, root = tl.load(accepted_counts + b), tl.load(next_tokens + b)
        done, so_far = tl.load(passes + b), tl.load(accepted + b)
        k = tl.arange(0, BLOCK_K)
        drafted = tl.load(token_ids + row + k, mask=(k > 0) & (k <= count), other=0)
        _find(
            records, prefix_lengths, page_table + tl.load(page_starts + b), tokens, runs, run_ends, roots, b,
            root, count + 1, PAGE_SIZE, RECORD, MODE, POSITION, RACED, LONGEST, WINDOW, RUN_BITS, BLOCK,
        )  # fmt: skip
        out = said + b * SAID_STRIDE + done * SAID
        tl.store(out, count)
        # Behind both counts.
        tl.store(out + 1 + k, tl.where(k == 0, rows - 1, drafted), mask=k <= count)
        tl.store(out + count + 2, root)
        tl.store(passes + b, done + 1)
        tl.store(accepted + b, so_far + count)
    else:
        tl.store(runs + b, -1)


@triton.jit
def _shares(runs, limits, costs, room, places, COSTS: tl.constexpr, MOST_COST: tl.constexpr):  # type: ignore[no-untyped-def]
    """[B] drafted rows of every sequence; see `row_shares.share_rows`."""
    first = tl.load(costs + tl.maximum(runs, 0)) + places
    following = tl.load(costs + COSTS + tl.maximum(runs, 0))
    limits = tl.where(runs > 0, limits, 0)
    # Rows that cost less than the bound: the highest for which there is room.
    low = tl.full([], 0, tl.int32)
    high = tl.full([], MOST_COST, tl.int32)
    bound = tl.full([], MOST_COST, tl.int32)
    while low < high:
        below = tl.minimum((tl.maximum(bound - 1 - first, 0)) // following + 1, limits)
        fits = tl.sum(tl.where(bound > first, below, 0), 0) <= room
        low = tl.where(fits, bound, low)
        high = tl.where(fits, high, bound - 1)
        bound = (low + high + 1) // 2
    below = tl.minimum((tl.maximum(low - 1 - first, 0)) // following + 1, limits)
    return tl.where(low > first, below, 0)


@triton.jit
def _lay_out_kernel(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, records, owners, query_starts, prefix_lengths, page_starts, page_table, tokens,
    runs, run_ends, roots, limits, costs, sequences, rows_in_all, last_position,
    PAGE_SIZE: tl.constexpr, RECORD: tl.constexpr, FIRST_ROW: tl.constexpr, ROWS: tl.constexpr, COSTS: tl.constexpr,
    MOST_COST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One sequence a program, and the first one the free rows; see `DeviceLookup._lay_out`."""
    b = tl.program_id(0)
    every = tl.arange(0, BLOCK_B)
    all_runs = tl.load(runs + every, mask=every < sequences, other=-1)
    all_limits = tl.load(limits + every, mask=every < sequences, other=0)
    there = all_runs >= 0
    room = rows_in_all - tl.sum(there.to(tl.int32), 0)
    shares = tl.where(there, 1 + _shares(all_runs, all_limits, costs, room, every, COSTS, MOST_COST), 0)
    row = tl.sum(tl.where(every < b, shares, 0), 0)
    rows = tl.sum(tl.where(every == b, shares, 0), 0)
    tl.store(query_starts + b + 1, row + rows)
    k = tl.arange(0, BLOCK_K)
    if rows > 0:
        prefix, end, root = tl.load(prefix_lengths + b), tl.load(run_ends + b), tl.load(roots + b)
        pages = page_table + tl.load(page_starts + b)
        mine = k < rows
        keys = prefix + k
        page = tl.load(pages + keys // PAGE_SIZE, mask=mine, other=0)
        # The token of row k > 0 is the (k - 1)th behind the run, and that at `prefix` is the root.
        source = end + tl.maximum(k - 1, 0) % (prefix + 1 - end)
        copied = _tokens_at(tokens, pages, source, mine & (k > 0) & (source < prefix), PAGE_SIZE)
        tl.store(token_ids + row + k, tl.where((k > 0) & (source < prefix), copied, root), mask=mine)
        tl.store(positions + row + k, tl.minimum(keys, last_position), mask=mine)
        tl.store(slots + row + k, page * PAGE_SIZE + keys % PAGE_SIZE, mask=mine)
        tl.store(owners + row + k, b + tl.zeros_like(k), mask=mine)
        tl.store(records + b * RECORD + FIRST_ROW, row)
        tl.store(records + b * RECORD + ROWS, rows)
    if b == 0:
        for free in tl.range(tl.sum(shares, 0), rows_in_all, BLOCK_K):
            at = free + k
            nobody = tl.zeros_like(k)
            tl.store(token_ids + at, nobody, mask=at < rows_in_all)
            tl.store(positions + at, nobody, mask=at < rows_in_all)
            tl.store(slots + at, nobody - 1, mask=at < rows_in_all)
            tl.store(owners + at, nobody - 1, mask=at < rows_in_all)


@triton.jit
def _keep_kernel(  # type: ignore[no-untyped-def]
    token_ids, slots, records, accepted_counts, accepted_rows, tokens, RECORD: tl.constexpr, BLOCK: tl.constexpr
):
    """One sequence a program; see `DeviceLookup.keep_accepted`."""
    b = tl.program_id(0)
    count = tl.load(accepted_counts + b)
    first = tl.load(records + b * RECORD, mask=count > 0, other=0)
    k = tl.arange(0, BLOCK)
    row = tl.load(accepted_rows + first + k, mask=k < count, other=0)
    token = tl.load(token_ids + first + row, mask=k < count, other=0)
    slot = tl.load(slots + first + 1 + k, mask=k < count, other=-1)
    tl.store(tokens + slot, token, mask=slot >= 0)


def _constants(lookup: DeviceLookup) -> dict[str, int]:
    return {
        "PAGE_SIZE": lookup.page_size,
        "RECORD": RECORD,
        "MODE": MODE,
        "POSITION": POSITION,
        "RACED": int(Mode.COUPLED),
        "LONGEST": LONGEST,
        "WINDOW": WINDOW,
        "RUN_BITS": _RUN_BITS,
        "BLOCK": _BLOCK,
        "num_warps": 8,
    }


def _tensors(lookup: DeviceLookup, step: StepIntegers) -> tuple[Tensor, ...]:
    return (
        step.token_ids, step.parameters, step.query_starts, step.prefix_lengths, step.page_starts, step.page_table,
        lookup.tokens, lookup.runs, lookup.run_ends, lookup.roots,
    )  # fmt: skip


def begin(lookup: DeviceLookup, step: StepIntegers, awaited: Tensor, moves: Tensor) -> None:
    """See `DeviceLookup.begin`."""
    _begin_kernel[(len(step.prefix_lengths),)](
        *_tensors(lookup, step), awaited, moves, lookup.passes, lookup.accepted, lookup.limits, ROWS=ROWS,
        **_constants(lookup),
    )  # fmt: skip
    _lay_out(lookup, step)


def go_on(lookup: DeviceLookup, step: StepIntegers, verdicts: Verdicts) -> None:
    """See `DeviceLookup.go_on`."""
    _go_on_kernel[(len(step.prefix_lengths),)](
        *_tensors(lookup, step), verdicts.accepted_counts, verdicts.next_tokens, lookup.said, lookup.passes,
        lookup.accepted, SAID_STRIDE=lookup.said.stride(0), SAID=SAID, BLOCK_K=_BLOCK_K, **_constants(lookup),
    )  # fmt: skip
    _lay_out(lookup, step)


def _lay_out(lookup: DeviceLookup, step: StepIntegers) -> None:
    sequences = len(step.prefix_lengths)
    _lay_out_kernel[(sequences,)](
        step.token_ids, step.positions, step.slots, step.parameters, step.owners, step.query_starts,
        step.prefix_lengths, step.page_starts, step.page_table, lookup.tokens, lookup.runs, lookup.run_ends,
        lookup.roots, lookup.limits, lookup.costs, sequences, len(step.token_ids), lookup.last_position,
        PAGE_SIZE=lookup.page_size, RECORD=RECORD, FIRST_ROW=FIRST_ROW, ROWS=ROWS, COSTS=lookup.costs.shape[1],
        MOST_COST=MOST_COST, BLOCK_B=triton.next_power_of_2(sequences), BLOCK_K=_BLOCK_K,
        num_warps=1 if sequences <= _ONE_WARP else 4,
    )  # fmt: skip


def keep_accepted(
    lookup: DeviceLookup, token_ids: Tensor, slots: Tensor, parameters: Tensor, verdicts: Verdicts
) -> None:
    """See `DeviceLookup.keep_accepted`."""
    _keep_kernel[(len(verdicts.accepted_counts),)](
        token_ids, slots, parameters, verdicts.accepted_counts, verdicts.accepted_rows, lookup.tokens,
        RECORD=RECORD, BLOCK=MAX_TREE_ROWS,
    )  # fmt: skip
