"""Kernels of experts: gate and up, down, and the weighed sum. A program reads its share of one expert once.

A pair is a row and one of its experts: pair p is of row p // k. With few pairs, up to PAIRS, a program stands for a
pair and goes on if no earlier pair has its expert; with PAIRS of 1 all are of one row, and so of different experts.
With more, PAIRS is 0 and a program stands for an expert, whose pairs `order_kernel` has listed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_kernels import block_product, finish_norm, load_squares
from tree_kernels.linear.triton_parts import activated, gated, load_norm, load_wide, whole_norm


@triton.jit
def _work(experts, sizes, pairs, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of this program and how many pairs it has for it."""
    own = tl.program_id(1)
    if PAIRS == 1:
        return tl.load(experts + own), 1
    elif PAIRS > 1:
        pair = tl.arange(0, PAIRS)
        expert = tl.load(experts + own)
        match = (tl.load(experts + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        earlier = tl.sum(tl.where(pair < own, match, 0), 0)
        return expert, tl.where(earlier == 0, tl.sum(match, 0), 0)
    else:
        return own, tl.load(sizes + own)


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    experts, order, expert, pairs, capacity, slot, there, PAIRS: tl.constexpr
):
    """[BLOCK_M] the pairs of an expert in these places of its list."""
    if PAIRS == 1:
        return slot * 0 + tl.program_id(1)
    elif PAIRS > 1:
        pair = tl.arange(0, PAIRS)
        match = (tl.load(experts + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        rank = tl.cumsum(match, 0) - 1
        own = (match[None, :] > 0) & (rank[None, :] == slot[:, None])
        return tl.sum(tl.where(own, pair[None, :], 0), 1)
    else:
        return tl.load(order + expert * capacity + slot, mask=there, other=0)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    rows, weight, row, column, there, row_stride, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] fp32 of gathered rows and the rows `column` of an expert's weight."""
    inner = tl.arange(0, BLOCK_K)
    left_at = weight + column[:, None].to(tl.int64) * INNER + inner[None, :]
    right_at = rows + row[None, :].to(tl.int64) * row_stride + inner[:, None]
    return tl.trans(block_product(left_at, right_at, there, INNER, INNER, False, BLOCK_M, BLOCK_N, BLOCK_K))


@triton.jit
def _prefetch_share(weight, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bring this tile's share of an expert's next weight into the L2 cache, PIECE bytes a thread."""
    if PIECE > 0:
        piece = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
        address = weight.to(tl.pointer_type(tl.int8), bitcast=True) + piece.to(tl.int64) * PIECE
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
            [address, tl.full([128], PIECE, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def expert_gated_kernel(  # type: ignore[no-untyped-def]
    rows, squares, experts, order, sizes, weight, bias, following, parameters, output, pairs, capacity, row_stride,
    epsilon,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PIECE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm, gate_proj and up_proj of an expert, and what `gated` makes of them, for all its rows; a row of output a
    pair."""
    # Columns of gate that a tile has, and as many of up; or of up alone.
    OWN_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    MADE: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert, total = _work(experts, sizes, pairs, PAIRS)
    lane = tl.arange(0, BLOCK_N)
    first = tl.program_id(0) * OWN_N
    column = tl.minimum(first + lane % OWN_N, OUTPUTS - 1) + lane // OWN_N * OUTPUTS
    own = weight + expert.to(tl.int64) * (MADE * INNER)
    if total > 0:
        _prefetch_share(following + expert.to(tl.int64) * (OUTPUTS * INNER), PIECE)
    for start in range(0, total, BLOCK_M):
        slot = start + tl.arange(0, BLOCK_M)
        there = slot < total
        place = _places(experts, order, expert, pairs, capacity, slot, there, PAIRS)
        row = place // TOP_K
        found = load_squares(squares, row, there, PARTS, BLOCK_PARTS)
        both = _product(rows, own, row, column, there, row_stride, INNER, BLOCK_M, BLOCK_N, BLOCK_K)
        both = finish_norm(both, found, epsilon, PARTS, INNER)
        if HAS_BIAS:
            both += tl.load(bias + expert.to(tl.int64) * MADE + column).to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, OWN_N)), (0, 2, 1)))
            result = gated(gate, up, parameters, ACTIVATION, LIMIT, LIMITS_ACTIVATED, OFFSET)
        else:
            result = activated(both, parameters, ACTIVATION)
        inner = first + tl.arange(0, OWN_N)
        at = output + place[:, None].to(tl.int64) * OUTPUTS + inner[None, :]
        tl.store(at, result.to(output.dtype.element_ty), mask=there[:, None] & (inner < OUTPUTS)[None, :])


@triton.jit
def expert_down_kernel(  # type: ignore[no-untyped-def]
    rows, experts, order, sizes, weight, bias, output, pairs, capacity,
    HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """down_proj of an expert for all its pairs: a row of input and one of output, in fp32, for each."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert, total = _work(experts, sizes, pairs, PAIRS)
    lane = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.minimum(lane, OUTPUTS - 1)
    own = weight + expert.to(tl.int64) * (OUTPUTS * INNER)
    for start in range(0, total, BLOCK_M):
        slot = start + tl.arange(0, BLOCK_M)
        there = slot < total
        place = _places(experts, order, expert, pairs, capacity, slot, there, PAIRS)
        result = _product(rows, own, place, column, there, INNER, INNER, BLOCK_M, BLOCK_N, BLOCK_K)
        if HAS_BIAS:
            result += tl.load(bias + expert.to(tl.int64) * OUTPUTS + column).to(tl.float32)[None, :]
        at = output + place[:, None].to(tl.int64) * OUTPUTS + lane[None, :]
        tl.store(at, result, mask=there[:, None] & (lane < OUTPUTS)[None, :])


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    parts, weights, residual, norm_weight, norm_bias, output, normed, epsilon,
    TOP_K: tl.constexpr, MULTIPLIER: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, CENTERED: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program: its experts' outputs weighed and summed in order, the residual, and the norm behind it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
    if NORMS:
        norm, shift = load_norm(norm_weight, norm_bias, column, inside, HAS_NORM_BIAS)
    if DEPENDENT:
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(TOP_K):
        pair = row * TOP_K + index
        total += tl.load(weights + pair) * load_wide(parts + pair * WIDTH, column, inside)
    if MULTIPLIER != 1.0:
        total *= MULTIPLIER
    if ADDS:
        total += load_wide(residual + row * WIDTH, column, inside)
    result = total.to(output.dtype.element_ty)
    tl.store(output + row * WIDTH + column, result, mask=inside)
    if NORMS:
        # The norm is that of the numbers as they are stored.
        total = result.to(tl.float32)
        total = whole_norm(total, inside, norm, shift, epsilon, WIDTH, CENTERED, HAS_NORM_BIAS)
        tl.store(normed + row * WIDTH + column, total.to(normed.dtype.element_ty), mask=inside)
