"""Triton: where top_k and top_p cut a row's distribution, without sorting the vocabulary.

A cut is a weight and a token id: tokens above the weight stay, and of those at it the ones up to the id. Few tokens
lie near it: top_k's is not below the k-th greatest logit of the row's blocks, and top_p's lies between two rungs, whose
weights are known. These few are listed in order of their ids, and the cut is searched in the list by halving the range
of the weights' bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.verification.triton_rows import (
    FILTERED,
    MIN_P,
    RUNGS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_double,
    load_logits,
    peak_of,
    record_of,
    rungs_of,
    sequence_of,
)

# Just above the bits of 1.
_HIGHEST = tl.constexpr(0x3FF0000000000001)
# Leaves the bound a part in 2**13 low at most, or a power of two where few steps were left.
_BOUND_STEPS = tl.constexpr(24)


@triton.jit
def _bound(weights, top_k):  # type: ignore[no-untyped-def]
    """A weight just below the k-th greatest [n] of blocks, which the k-th greatest of all tokens is not below."""
    low = tl.full([], 0, tl.int64)
    high = tl.full([], _HIGHEST, tl.int64)
    for _ in tl.range(0, _BOUND_STEPS):
        middle = (low + high) // 2
        true = tl.sum((weights >= middle.to(tl.float64, bitcast=True)).to(tl.int32), 0) >= top_k
        low = tl.where(true, middle, low)
        high = tl.where(true, high, middle)
    return low.to(tl.float64, bitcast=True)


@triton.jit
def _rungs(masses, row, top_p, vocabulary, chunks, BLOCK_CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Between which rungs top_p cuts: bound, ceiling, what the tokens above weigh, and the weight to reach."""
    rung = tl.arange(0, RUNGS)
    chunk = tl.arange(0, BLOCK_CHUNKS)[:, None]
    parts = tl.load(masses + (row * chunks + chunk) * RUNGS + rung[None, :], mask=chunk < chunks, other=0.0)
    mass = tl.sum(parts, 0)
    rungs = rungs_of(rung, top_p, vocabulary)
    goal = top_p * tl.sum(tl.where(rung == RUNGS - 1, mass, 0.0), 0)
    short = (mass < goal) & (rung < RUNGS - 1)
    passed = tl.sum(short.to(tl.int32), 0)
    bound = tl.sum(tl.where(rung == passed, rungs, 0.0), 0)
    ceiling = tl.where(passed > 0, tl.sum(tl.where(rung == passed - 1, rungs, 0.0), 0), 2.0)
    return bound, ceiling, tl.sum(tl.where(rung == passed - 1, mass, 0.0), 0), goal


@triton.jit
def _list(  # type: ignore[no-untyped-def]
    logits, row, row_stride, vocabulary, peak, temperature, bound, ceiling, list_weights, list_ids, list_blocks, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the tokens from the bound to below the ceiling, in order of their ids. Returns how many.

    `blocks`: how many of list_blocks to look into.
    """
    lane = tl.arange(0, BLOCKS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    count = tl.full([], 0, tl.int32)
    for start in tl.range(0, blocks, BLOCKS):
        block = tl.load(list_blocks + start + lane, mask=start + lane < blocks, other=-1)
        ids = tl.where(block >= 0, block * BLOCK + column, -1)
        x = load_logits(logits, row, row_stride, ids, vocabulary)
        weight = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
        ids = tl.reshape(ids, [BLOCKS * BLOCK])
        weight = tl.reshape(weight, [BLOCKS * BLOCK])
        kept = (weight >= bound) & (weight > 0.0) & (weight < ceiling)
        place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(list_weights + place, weight, mask=kept)
        tl.store(list_ids + place, ids, mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def _total(list_weights, list_ids, count, cut, cut_id, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weight of the listed tokens that a cut keeps."""
    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        weight = tl.load(list_weights + at, mask=at < count, other=0.0)
        ids = tl.load(list_ids + at, mask=at < count, other=0)
        total += tl.sum(tl.where((weight > cut) | ((weight == cut) & (ids <= cut_id)), weight, 0.0), 0)
    return total


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    list_weights, list_ids, count, cut, cut_id, above, goal, BY_MASS: tl.constexpr, TILE: tl.constexpr
):
    """The narrowest cut whose tokens reach the goal: a number of tokens, or with BY_MASS a weight.

    Of what another cut keeps already; that cut is returned where the goal is out of reach. `above` is what the tokens
    above all listed ones amount to.
    """
    low = tl.full([], 1, tl.int64)
    high = tl.full([], _HIGHEST, tl.int64)
    reached = tl.full([], 0, tl.int32)
    while low < high - 1:
        middle = (low + high) // 2
        amount = above
        # Both ends move to weights that are there, so that a few dozen turns suffice.
        next_low = high
        next_high = low
        for start in tl.range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            weight = tl.load(list_weights + at, mask=at < count, other=0.0)
            ids = tl.load(list_ids + at, mask=at < count, other=0)
            bits = weight.to(tl.int64, bitcast=True)
            here = (bits >= low) & (bits < high) & ((weight > cut) | ((weight == cut) & (ids <= cut_id)))
            upper = here & (bits >= middle)
            path_prob = weight if BY_MASS else tl.full([TILE], 1.0, tl.float64)
            amount += tl.sum(tl.where(upper, path_prob, 0.0), 0)
            next_low = tl.minimum(next_low, tl.min(tl.where(upper, bits, high), 0))
            next_high = tl.maximum(next_high, tl.max(tl.where(here & (bits < middle), bits + 1, low), 0))
        if amount >= goal:
            low = next_low
            reached = reached * 0 + 1
        else:
            above = amount
            high = next_high
    found = low.to(tl.float64, bitcast=True)
    wanted = goal - above
    before = tl.full([], 0, tl.int32)
    last = cut_id
    for start in tl.range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        weight = tl.load(list_weights + at, mask=at < count, other=0.0)
        ids = tl.load(list_ids + at, mask=at < count, other=0)
        tie = (weight == found) & ((weight > cut) | (ids <= cut_id))
        ties = before + tl.cumsum(tie.to(tl.int32), 0)
        path_prob = found if BY_MASS else tl.full([], 1.0, tl.float64)
        # The ties before it fall short of the goal.
        needed = tie & ((ties - 1).to(tl.float64) * path_prob < wanted)
        last = tl.where(tl.sum(needed.to(tl.int32), 0) > 0, tl.max(tl.where(needed, ids, -1), 0), last)
        before += tl.sum(tie.to(tl.int32), 0)
    return tl.where(reached > 0, found, cut), tl.where(reached > 0, last, cut_id)


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    logits, row_stride, record, row, peak, block_peaks, row_blocks, masses, list_weights, list_ids, list_blocks,
    vocabulary, chunks, BLOCK_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ALL_BLOCKS: tl.constexpr, TILE: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """One row's cut by top_k, and then by top_p of what that leaves."""
    top_k = tl.load(record + TOP_K)
    top_p = load_double(record + TOP_P)
    temperature = load_double(record + TEMPERATURE)
    least = load_double(record + MIN_P)
    block = tl.arange(0, ALL_BLOCKS)
    x = tl.load(block_peaks + row * row_blocks + block, mask=block < row_blocks, other=float("-inf"))
    weight = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
    above = tl.full([], 0.0, tl.float64)
    ceiling = tl.full([], 2.0, tl.float64)
    goal = top_k.to(tl.float64)
    if top_k > 0:
        bound = _bound(weight, top_k)
    else:
        bound, ceiling, above, goal = _rungs(masses, row, top_p, vocabulary, chunks, BLOCK_CHUNKS)
    bound = tl.maximum(bound, least)
    wanted = (weight >= bound) & (weight > 0.0)
    tl.store(list_blocks + tl.cumsum(wanted.to(tl.int32), 0) - 1, block, mask=wanted)
    tl.debug_barrier()
    blocks = tl.sum(wanted.to(tl.int32), 0)
    count = _list(
        logits, row, row_stride, vocabulary, peak, temperature, bound, ceiling, list_weights, list_ids, list_blocks,
        blocks, BLOCK, TILE // BLOCK,
    )  # fmt: skip
    cut = least
    cut_id = vocabulary
    if top_k > 0:
        cut, cut_id = _search(list_weights, list_ids, count, cut, cut_id, above, goal, False, SEARCH)
        goal = top_p * _total(list_weights, list_ids, count, cut, cut_id, SEARCH)
    if top_p < 1.0:
        cut, cut_id = _search(list_weights, list_ids, count, cut, cut_id, above, goal, True, SEARCH)
    # The next row is listed over this one.
    tl.debug_barrier()
    return cut, cut_id


@triton.jit(do_not_specialize=["sequences", "rows", "chunks", "row_blocks", "list_length"])
def filter_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, parameters, sequences, peaks, block_peaks, masses, list_weights, list_ids, list_blocks,
    cuts, cut_ids, rows, vocabulary, chunks, row_blocks, list_length,
    BLOCK_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ALL_BLOCKS: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """cuts [R] fp64 and cut_ids [R] int32. A program takes every n-th row, and has a list of its own.

    list_weights fp64, list_ids and list_blocks int32: [programs, list_length], list_length >= V.
    """
    program = tl.program_id(0).to(tl.int64)
    row = tl.program_id(0)
    while row < rows:
        sequence = sequence_of(parameters, row, sequences)
        if sequence >= 0:
            record = record_of(parameters, sequence)
            cut = tl.full([], 0.0, tl.float64)
            cut_id = tl.full([], -1, tl.int32)
            if tl.load(record + FILTERED) > 0:
                cut = load_double(record + MIN_P)
                cut_id = vocabulary + tl.full([], 0, tl.int32)
                if (tl.load(record + TOP_K) > 0) | (load_double(record + TOP_P) < 1.0):
                    peak = peak_of(peaks, row, chunks, BLOCK_CHUNKS)
                    cut, cut_id = _cut(
                        logits, row_stride, record, row, peak, block_peaks, row_blocks, masses,
                        list_weights + program * list_length, list_ids + program * list_length,
                        list_blocks + program * row_blocks, vocabulary, chunks, BLOCK_CHUNKS, BLOCK, ALL_BLOCKS, TILE,
                        SEARCH,
                    )  # fmt: skip
            tl.store(cuts + row, cut)
            tl.store(cut_ids + row, cut_id)
        row += tl.num_programs(0)
