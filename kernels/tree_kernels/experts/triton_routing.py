"""Kernels that choose experts: a router's product and the choice by it in one launch, and rows in order of experts."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_kernels import await_inputs, finish_norm, load_squares
from tree_kernels.linear.triton_vectors import dot_rest, load_weights, norm_factor

# Below every key of a score.
_NO_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def _closed_groups(  # type: ignore[no-untyped-def]
    wanted, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
):  # fmt: skip
    """`wanted` [BLOCK_M, BLOCK_E] with minus infinity for the experts of all but the best groups."""
    SIZE: tl.constexpr = BLOCK_E // GROUPS
    grouped = tl.reshape(wanted, (BLOCK_M, GROUPS, SIZE))
    best = tl.max(grouped, 2)
    if TOP2:
        member = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == best[:, :, None], member, SIZE), 2)
        best += tl.max(tl.where(member == first[:, :, None], float("-inf"), grouped), 2)
    group = tl.arange(0, GROUPS)[None, :]
    is_open = tl.zeros([BLOCK_M, GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        left = tl.where(is_open > 0, float("-inf"), best)
        found = tl.min(tl.where((left == tl.max(left, 1)[:, None]) & (is_open == 0), group, GROUPS), 1)
        is_open = tl.where(group == found[:, None], 1, is_open)
    grouped = tl.where(is_open[:, :, None] > 0, grouped, float("-inf"))
    return tl.reshape(grouped, (BLOCK_M, BLOCK_E))


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits, bias, correction, experts, weights, row, there, least_sum, clamped_sum, scaling, rounded_to,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, CORRECTS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, RENORMALISES: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Store the experts of BLOCK_M rows and their weights, by logits [BLOCK_M, BLOCK_E]."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = expert < EXPERTS
    if HAS_BIAS:
        logits += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(inside, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores /= tl.sum(scores, 1)[:, None]
    wanted = scores
    if CORRECTS:
        wanted += tl.load(correction + expert, mask=inside, other=0.0).to(tl.float32)
    if GROUPS > 1:
        wanted = _closed_groups(wanted, BLOCK_M, BLOCK_E, GROUPS, TOP_GROUPS, TOP2)
    # Ordered as the scores are, the lowest of equal experts first; so one maximum finds both.
    bits = wanted.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (BLOCK_E - 1 - expert)
    key = tl.where(inside, key, _NO_KEY)
    rank = tl.arange(0, BLOCK_TOP_K)[None, :]
    chosen = tl.zeros([BLOCK_M, BLOCK_TOP_K], tl.int32)
    found = tl.zeros([BLOCK_M, BLOCK_TOP_K], tl.float32)
    for index in tl.static_range(TOP_K):
        highest = tl.max(key, 1)
        best = (BLOCK_E - 1 - (highest & 0xFFFFFFFF)).to(tl.int32)
        own = expert == best[:, None]
        key = tl.where(own, _NO_KEY, key)
        # Where scores are not numbers, an expert that is there.
        chosen = tl.where(rank == index, tl.minimum(best, EXPERTS - 1)[:, None], chosen)
        if CORRECTS:
            weight = tl.sum(tl.where(own, scores, 0.0), 1)
        else:
            # The key has the score itself.
            ordered = (highest >> 32).to(tl.int32)
            weight = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        found = tl.where(rank == index, weight[:, None], found)
    if RENORMALISES:
        total = tl.sum(found, 1) + least_sum
        found /= tl.maximum(total, clamped_sum)[:, None]
    found *= scaling
    if ROUNDS:
        found = found.to(rounded_to.dtype.element_ty).to(tl.float32)
    kept = there[:, None] & (rank < TOP_K)
    at = row[:, None] * TOP_K + rank
    tl.store(experts + at, chosen, mask=kept)
    tl.store(weights + at, found, mask=kept)


# It may lie anywhere in a plan.
@triton.jit(do_not_specialize=["present"])
def route_kernel(  # type: ignore[no-untyped-def]
    rows, squares, weight, bias, correction, present, partials, counters, experts, weights, count, row_stride, epsilon,
    least_sum, clamped_sum, scaling,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    CORRECTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    RENORMALISES: tl.constexpr, ROUNDS: tl.constexpr, PADDED: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A share of the router's product of BLOCK_M rows; the last program of those rows to arrive chooses for them."""
    block = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Of no condition, for which any pointer stands in.
    await_inputs(weight, tl.minimum(column, EXPERTS - 1), weight, INNER, SPLITS, AHEAD, False, DEPENDENT)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < count
    # Whose numbers are read.
    source = row
    if PADDED:
        source = tl.where(row < tl.load(present), row, 0)
    SHARE: tl.constexpr = INNER // SPLITS
    begin = tl.program_id(2) * SHARE
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, SHARE, BLOCK_K):
        step = start + tl.arange(0, BLOCK_K)
        inner, kept = begin + step, step < SHARE
        left = tl.load(
            weight + column[:, None] * INNER + inner[None, :],
            mask=(column < EXPERTS)[:, None] & kept[None, :],
            other=0.0,
        )
        right = tl.load(
            rows + source[None, :].to(tl.int64) * row_stride + inner[:, None],
            mask=there[None, :] & kept[:, None],
            other=0.0,
        )
        total = tl.dot(left, right.to(left.dtype), total, input_precision="ieee")
    # Rows of experts, which one warp then compares with each other.
    line = tl.arange(0, BLOCK_M)
    at = partials + block.to(tl.int64) * SPLITS * BLOCK_E * BLOCK_M
    tl.store(at + (tl.program_id(2) * BLOCK_M + line[None, :]) * BLOCK_E + column[:, None], total)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + block, 1, sem="acq_rel")
    if arrived == TILES * SPLITS - 1:
        tl.store(counters + block, 0)
        expert = tl.arange(0, BLOCK_E)[None, :]
        parts = at + line[:, None] * BLOCK_E + expert
        written = expert < TILES * BLOCK_N
        logits = tl.load(parts, mask=written, other=0.0, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            logits += tl.load(parts + split * BLOCK_E * BLOCK_M, mask=written, other=0.0, cache_modifier=".cg")
        sums = load_squares(squares, source, there, PARTS, BLOCK_PARTS)
        logits = finish_norm(logits, sums, epsilon, PARTS, INNER)
        _choose(
            logits, bias, correction, experts, weights, row, there, least_sum, clamped_sum, scaling, rows,
            EXPERTS, BLOCK_E, BLOCK_M, TOP_K, BLOCK_TOP_K, SIGMOID, HAS_BIAS, CORRECTS, GROUPS, TOP_GROUPS, TOP2,
            RENORMALISES, ROUNDS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["present"])
def route_vector_kernel(  # type: ignore[no-untyped-def]
    rows, squares, weight, bias, correction, present, logits, counters, experts, weights, row_stride, epsilon,
    least_sum, clamped_sum, scaling,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    CORRECTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    RENORMALISES: tl.constexpr, ROUNDS: tl.constexpr, PADDED: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `route_kernel`, of one row, through registers."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(column, EXPERTS - 1)
    if DEPENDENT:
        gdc_launch_dependents()
    loaded = load_weights(weight, read, 0, INNER, CHUNKS, BLOCK_T)
    if DEPENDENT:
        gdc_wait()
    source = row
    if PADDED:
        source = tl.where(row < tl.load(present), row, 0)
    numbers = rows + source.to(tl.int64) * row_stride
    own = logits + row * EXPERTS
    tl.store(own + column, dot_rest(loaded, numbers, weight, read, INNER, CHUNKS, BLOCK_T), mask=column < EXPERTS)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel")
    if arrived == TILES - 1:
        tl.store(counters + row, 0)
        expert = tl.arange(0, BLOCK_E)[None, :]
        found = tl.load(own + expert, mask=expert < EXPERTS, other=0.0, cache_modifier=".cg")
        found *= norm_factor(squares + source * PARTS, epsilon, PARTS, BLOCK_PARTS, INNER)
        line = tl.arange(0, 1)
        _choose(
            found, bias, correction, experts, weights, row + line, line == 0, least_sum, clamped_sum, scaling, rows,
            EXPERTS, BLOCK_E, 1, TOP_K, BLOCK_TOP_K, SIGMOID, HAS_BIAS, CORRECTS, GROUPS, TOP_GROUPS, TOP2,
            RENORMALISES, ROUNDS,
        )  # fmt: skip


@triton.jit
def order_kernel(  # type: ignore[no-untyped-def]
    experts, order, sizes, pairs, capacity, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One expert per program: the pairs of a row and an expert that are its own, in their order, and how many."""
    own = tl.program_id(0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    total = own * 0
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        match = tl.load(experts + pair, mask=pair < pairs, other=-1) == own
        rank = total + tl.cumsum(match.to(tl.int32), 0) - 1
        tl.store(order + own * capacity + rank, pair, mask=match)
        total += tl.sum(match.to(tl.int32), 0)
    tl.store(sizes + own, total)
