"""The kernels of `tree_kernels.node_table.recycling`: what follows a token is kept, and trees are filled in from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.node_table import layout, recycling
from tree_kernels.node_table.step_integers import StepIntegers
from tree_kernels.verification.triton_rows import FIRST_ROW, load_logits, record_of

if TYPE_CHECKING:
    from tree_kernels.node_table.dispatch import NodeTable
    from tree_kernels.verification.dispatch import Verdicts

_WIDTH, _ENTRY = tl.constexpr(recycling.WIDTH), tl.constexpr(recycling.ENTRY)
_TOKENS_AT, _COSTS_AT = tl.constexpr(recycling.TOKENS_AT), tl.constexpr(recycling.COSTS_AT)
_RECYCLED_NODES, _LEVELS = tl.constexpr(recycling.NODES), tl.constexpr(recycling.LEVELS)
_KEPT = tl.constexpr(recycling.KEPT_TOKENS)
_ONE, _OTHER = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA6B)
_MOST_COST, _COST_OF_HALVING = tl.constexpr(layout.MOST_COST), tl.constexpr(layout.COST_OF_HALVING)
# Logits of one program: 32 a thread.
_CHUNK = 4096
_NO_TOKEN = tl.constexpr(-2)
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _entry_at(entries, owner, token):  # type: ignore[no-untyped-def]
    """Where the entries of an owner's `token` [any] are kept; see `recycling.place_of`."""
    mixed = (owner.to(tl.uint32) * _ONE) ^ (token.to(tl.uint32) * _OTHER)
    return entries + ((mixed * _ONE) >> 16).to(tl.int64) * _ENTRY


@triton.jit
def _row_of(records, accepted_counts, accepted_rows, owners, laid_out, b, k):  # type: ignore[no-untyped-def]
    """The row of the `k`-th token, the root first, that a sequence accepted; -1 where it has none, or nothing is kept
    for it."""
    first = tl.load(record_of(records, b) + FIRST_ROW)
    kept = (tl.load(owners + b) >= 0) & (b >= tl.load(laid_out)) & (k <= tl.load(accepted_counts + b))
    below = tl.load(accepted_rows + first + k - 1, mask=kept & (k > 0), other=0)
    return tl.where(kept, first + below, -1)


@triton.jit(do_not_specialize=["chunks"])
def likeliest_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, records, query_starts, accepted_counts, accepted_rows, owners, laid_out, values, ids,
    vocabulary, chunks, CHUNK: tl.constexpr,
):  # fmt: skip
    """values [B * KEPT, chunks, WIDTH] fp32 and ids, likewise int32: the likeliest of a chunk behind one token, the
    lowest id of equals."""
    place, chunk = tl.program_id(0), tl.program_id(1)
    b, k = place // _KEPT, place % _KEPT
    if tl.load(query_starts + b + 1) > tl.load(query_starts + b):
        row = _row_of(records, accepted_counts, accepted_rows, owners, laid_out, b, k)
        if row >= 0:
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(logits, row, row_stride, token, vocabulary)
            out = (place * chunks + chunk) * _WIDTH
            for rank in tl.static_range(0, _WIDTH):
                peak = tl.max(x, 0)
                found = tl.min(tl.where((x == peak) & (token < vocabulary), token, _LAST), 0)
                tl.store(values + out + rank, peak)
                tl.store(ids + out + rank, found)
                x = tl.where(token == found, float("-inf"), x)


@triton.jit(do_not_specialize=["chunks"])
def enter_kernel(  # type: ignore[no-untyped-def]
    token_ids, records, query_starts, accepted_counts, accepted_rows, owners, laid_out, values, ids, entries, chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of one sequence a program: its entry, from the likeliest of all chunks. Of equal tokens the last."""
    place = tl.program_id(0)
    b, k = place // _KEPT, place % _KEPT
    if tl.load(query_starts + b + 1) > tl.load(query_starts + b):
        row = _row_of(records, accepted_counts, accepted_rows, owners, laid_out, b, k)
        if row >= 0:
            token, owner = tl.load(token_ids + row), tl.load(owners + b)
            later = k + 1 + tl.arange(0, _KEPT)
            there = (later < _KEPT) & (later <= tl.load(accepted_counts + b))
            first = tl.load(record_of(records, b) + FIRST_ROW)
            rows = tl.load(accepted_rows + first + later - 1, mask=there, other=0)
            again = tl.load(token_ids + first + rows, mask=there, other=-1) == token
            if tl.max(again.to(tl.int32), 0) == 0:
                i = tl.arange(0, BLOCK)
                inside = i < chunks * _WIDTH
                value = tl.load(values + place * chunks * _WIDTH + i, mask=inside, other=float("-inf"))
                number = tl.load(ids + place * chunks * _WIDTH + i, mask=inside, other=_LAST)
                lane = tl.arange(0, _ENTRY)
                entry = tl.where(lane == 0, owner, tl.where(lane == 1, token, -1))
                peaks = tl.full([_ENTRY], float("-inf"), tl.float32)
                for rank in tl.static_range(0, _WIDTH):
                    peak = tl.max(value, 0)
                    found = tl.min(tl.where(value == peak, number, _LAST), 0)
                    # NaN is no token's.
                    kept = tl.where((found < _LAST) & (tl.abs(peak) < float("inf")), found, _NO_TOKEN)
                    entry = tl.where(lane == _TOKENS_AT + rank, kept, entry)
                    peaks = tl.where(lane == _COSTS_AT + rank, peak, peaks)
                    value = tl.where(number == found, float("-inf"), value)
                    number = tl.where(number == found, _LAST, number)
                highest = tl.max(peaks, 0)
                total = tl.sum(tl.exp(peaks - highest), 0)
                cost = (tl.log(total) - (peaks - highest)) * (1.4426950408889634 * _COST_OF_HALVING)
                cost = tl.minimum(tl.maximum(cost, 1.0), _MOST_COST * 1.0) + 0.5
                # Of what is no number, no cost is one.
                cost = tl.where((tl.abs(peaks) < float("inf")) & (cost == cost), cost, _MOST_COST * 1.0)
                holds = (lane >= _COSTS_AT) & (lane < _COSTS_AT + _WIDTH)
                # One warp stores it at once, so that no thread reads parts of two entries.
                tl.store(_entry_at(entries, owner, token) + lane, tl.where(holds, cost.to(tl.int32), entry))


@triton.jit
def recycle_tree(entries, shape, tree, owner, root):  # type: ignore[no-untyped-def]
    """Write tokens and costs of the tree of recycled tokens below an owner's `root` to a `tree` [2, NODES]; see
    `recycling.recycled_tree`. All threads may read it afterwards."""
    i = tl.arange(0, _RECYCLED_NODES)
    parent, rank = tl.load(shape + i), tl.load(shape + _RECYCLED_NODES + i)
    depth, extra = tl.load(shape + 3 * _RECYCLED_NODES + i), tl.load(shape + 4 * _RECYCLED_NODES + i)
    tl.store(tree + i, tl.where(i == 0, root, _NO_TOKEN))
    tl.store(tree + _RECYCLED_NODES + i, tl.where(i == 0, 0, _MOST_COST))
    for level in tl.static_range(1, _LEVELS + 1):
        # The level above is other threads'.
        tl.debug_barrier()
        own = depth == level
        above = tl.load(tree + parent, mask=own, other=_NO_TOKEN)
        above_cost = tl.load(tree + _RECYCLED_NODES + parent, mask=own, other=_MOST_COST)
        entry = _entry_at(entries, owner, above)
        there = own & (above >= 0)
        there = there & (tl.load(entry, mask=there, other=-1) == owner)
        there = there & (tl.load(entry + 1, mask=there, other=-1) == above)
        token = tl.load(entry + _TOKENS_AT + rank, mask=there, other=_NO_TOKEN)
        cost = tl.load(entry + _COSTS_AT + rank, mask=there, other=_MOST_COST)
        tl.store(tree + i, token, mask=own)
        tl.store(tree + _RECYCLED_NODES + i, above_cost + cost + extra, mask=own)
    tl.debug_barrier()


def recycle(table: NodeTable, step: StepIntegers, logits: Tensor, vocabulary: int, verdicts: Verdicts) -> None:
    """See `NodeTable.recycle`."""
    tokens, chunks = len(step.prefix_lengths) * recycling.KEPT_TOKENS, triton.cdiv(vocabulary, _CHUNK)
    values = torch.empty(tokens, chunks, recycling.WIDTH, dtype=torch.float32, device=logits.device)
    ids = torch.empty_like(values, dtype=torch.int32)
    where = (step.parameters, step.query_starts, verdicts.accepted_counts, verdicts.accepted_rows, table.owners)
    likeliest_kernel[(tokens, chunks)](
        logits, logits.stride(0), *where, table.laid_out, values, ids, vocabulary, chunks, CHUNK=_CHUNK
    )
    enter_kernel[(tokens,)](
        step.token_ids, *where, table.laid_out, values, ids, table.entries, chunks,
        BLOCK=triton.next_power_of_2(chunks * recycling.WIDTH), num_warps=1,
    )  # fmt: skip
