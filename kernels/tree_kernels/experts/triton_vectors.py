"""Kernels of experts for very few rows: weights go through registers, and one launch sums the experts of a row.

A program of `expert_down_vector_kernel` has its share of all experts of a row in flight before it waits for gate and
up; it knows the experts by then, since `expert_gated_vector_kernel` lets it begin only after their choice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_parts import activated, gated
from tree_kernels.linear.triton_vectors import dot_rest, load_weights, norm_factor, store_sum


@triton.jit
def expert_gated_vector_kernel(  # type: ignore[no-untyped-def]
    rows, squares, experts, weight, bias, parameters, output, row_stride, epsilon,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `expert_gated_kernel`, of one pair of a row and an expert."""
    pair = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(column, OUTPUTS - 1)
    if DEPENDENT:
        # In this order: the next launch reads which experts were chosen.
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + pair).to(tl.int64)
    MADE: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    own = weight + expert * (MADE * INNER)
    row = pair // TOP_K
    loaded = load_weights(own, read, 0, INNER, CHUNKS, BLOCK_T)
    if GATED:
        loaded_up = load_weights(own, OUTPUTS + read, 0, INNER, CHUNKS, BLOCK_T)
    factor = norm_factor(squares + row * PARTS, epsilon, PARTS, BLOCK_PARTS, INNER)
    numbers = rows + row.to(tl.int64) * row_stride
    gate = dot_rest(loaded, numbers, own, read, INNER, CHUNKS, BLOCK_T) * factor
    if HAS_BIAS:
        gate += tl.load(bias + expert * MADE + read).to(tl.float32)
    if GATED:
        up = dot_rest(loaded_up, numbers, own, OUTPUTS + read, INNER, CHUNKS, BLOCK_T) * factor
        if HAS_BIAS:
            up += tl.load(bias + expert * MADE + OUTPUTS + read).to(tl.float32)
        result = gated(gate, up, parameters, ACTIVATION, LIMIT, LIMITS_ACTIVATED, OFFSET)
    else:
        result = activated(gate, parameters, ACTIVATION)
    tl.store(output + pair.to(tl.int64) * OUTPUTS + column, result.to(output.dtype.element_ty), mask=column < OUTPUTS)


@triton.jit
def _load_experts(weight, expert, column, inner, kept, OUTPUTS: tl.constexpr, INNER: tl.constexpr):  # type: ignore[no-untyped-def]
    """[columns, experts, BLOCK_T] of the rows `column` of several experts' weights."""
    at = weight + expert[None, :, None] * (OUTPUTS * INNER) + column[:, None, None] * INNER + inner[None, None, :]
    return tl.load(at, mask=kept[None, :, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def expert_down_vector_kernel(  # type: ignore[no-untyped-def]
    inputs, experts, shares, weight, bias, residual, norm_weight, output, scaled, squares,
    HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, MULTIPLIER: tl.constexpr, ADDS: tl.constexpr,
    SCALES: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """down_proj of all experts of a row, weighed and summed, the residual, and the first half of the norm behind it."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUTPUTS
    read = tl.minimum(column, OUTPUTS - 1).to(tl.int64)
    rank, lane = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_T)
    there = rank < TOP_K
    if DEPENDENT:
        gdc_launch_dependents()
    expert = tl.load(experts + row * TOP_K + rank, mask=there, other=0).to(tl.int64)
    share = tl.load(shares + row * TOP_K + rank, mask=there, other=0.0)
    loaded = _load_experts(weight, expert, read, lane, there[:, None] & (lane < INNER)[None, :], OUTPUTS, INNER)
    if DEPENDENT:
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.static_range(0, INNER, BLOCK_T):
        inner, following = start + lane, loaded
        if start + BLOCK_T < INNER:
            kept = there[:, None] & (inner + BLOCK_T < INNER)[None, :]
            following = _load_experts(weight, expert, read, inner + BLOCK_T, kept, OUTPUTS, INNER)
        kept = there[:, None] & (inner < INNER)[None, :]
        numbers = tl.load(inputs + (row * TOP_K + rank)[:, None] * INNER + inner[None, :], mask=kept, other=0.0)
        numbers = numbers.to(tl.float32) * share[:, None]
        total += tl.sum(loaded.to(tl.float32) * numbers[None, :, :], 1)
        loaded = following
    result = tl.sum(total, 1)
    if HAS_BIAS:
        added = tl.load(bias + expert[None, :] * OUTPUTS + read[:, None], mask=there[None, :], other=0.0)
        result += tl.sum(added.to(tl.float32) * share[None, :], 1)
    if MULTIPLIER != 1.0:
        result *= MULTIPLIER
    tiles = tl.cdiv(OUTPUTS, BLOCK_N)
    store_sum(
        result, column, inside, residual + row * OUTPUTS, norm_weight, output + row * OUTPUTS,
        scaled + row * OUTPUTS, squares + row * tiles, tile, ADDS, SCALES,
    )  # fmt: skip
