"""What a decoder layer does after a product of many rows: one launch between two products."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_kernels import rotated


@triton.jit
def add_epilogue_kernel(  # type: ignore[no-untyped-def]
    product, bias, residual, norm_weight, normed, epsilon,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program: bias and residual added to the product in place, and the norm that reads it next."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
    if NORMS:
        norm = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    at = row * WIDTH + column
    total = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    result = total.to(product.dtype.element_ty)
    tl.store(product + at, result, mask=inside)
    if NORMS:
        # The norm is that of the numbers as they are stored.
        result = result.to(tl.float32)
        result *= tl.rsqrt(tl.sum(result * result, 0) / WIDTH + epsilon)
        tl.store(normed + at, (result * norm).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def gated_epilogue_kernel(  # type: ignore[no-untyped-def]
    product, output, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """BLOCK columns of one row per program: SiLU(gate) * up. A row of the product is gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < OUTPUTS
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = product + row * 2 * OUTPUTS + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + OUTPUTS, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * OUTPUTS + column, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def rotary_epilogue_kernel(  # type: ignore[no-untyped-def]
    product, bias, cosines, sines, slots, query, key_cache, value_cache,
    HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of one row per program: rotary embedding, and keys and values into their slots.

    A row of the product is its queries, then its keys, then its values.
    """
    HALF_WIDTH: tl.constexpr = WIDTH // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    there = (head < TOTAL) & (lane < HALF_WIDTH)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # Once for each head: in the interpreter a mask cannot have a scalar part.
    slot = tl.load(slots + row + 0 * head).to(tl.int64)
    column = head * WIDTH + lane
    at = product + row * TOTAL * WIDTH + column
    left = tl.load(at, mask=there, other=0.0).to(tl.float32)
    right = tl.load(at + HALF_WIDTH, mask=there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        left += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        right += tl.load(bias + column + HALF_WIDTH, mask=there, other=0.0).to(tl.float32)
    first, second = rotated(left, right, cosines, sines, row * WIDTH + lane, lane < HALF_WIDTH, HALF_WIDTH)
    # Values are not rotated; multiplying them with cosines of 1 and sines of 0 would make NaN of infinite ones.
    rotates = head < HEADS + KV_HEADS
    first = tl.where(rotates, first, left).to(query.dtype.element_ty)
    second = tl.where(rotates, second, right).to(query.dtype.element_ty)
    kept = there & (head < HEADS)
    at = query + row * HEADS * WIDTH + column
    tl.store(at, first, mask=kept)
    tl.store(at + HALF_WIDTH, second, mask=kept)
    # A row without a slot is padding of a captured step.
    kept = there & (head >= HEADS) & rotates & (slot >= 0)
    at = key_cache + (slot * KV_HEADS + head - HEADS) * WIDTH + lane
    tl.store(at, first, mask=kept)
    tl.store(at + HALF_WIDTH, second, mask=kept)
    kept = there & (head >= HEADS + KV_HEADS) & (slot >= 0)
    at = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH + lane
    tl.store(at, first, mask=kept)
    tl.store(at + HALF_WIDTH, second, mask=kept)
