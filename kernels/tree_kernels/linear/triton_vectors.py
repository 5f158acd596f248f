"""Kernels of a decoder layer's linear parts for a single row: weights go through registers, without matrix units.

A program has its first weights in flight before it waits for the launch before, and many small programs take the place
of those that end, so that the memory is busy from one launch to the next. Blocks of a weight are [outputs, CHUNKS,
BLOCK_T], where BLOCK_T is one load of each thread: sums over CHUNKS stay in a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_parts import activated, pair_column, pair_distance, rotated


@triton.jit
def load_weights(  # type: ignore[no-untyped-def]
    weight, column, start, INNER: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """[outputs, CHUNKS, BLOCK_T] of the rows `column` of a weight [.., INNER], zeros past their end."""
    inner = start + tl.arange(0, CHUNKS)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    at = weight + column[:, None, None].to(tl.int64) * INNER + inner[None, :, :]
    if INNER % (CHUNKS * BLOCK_T) == 0:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(inner < INNER)[None, :, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def multiplied(  # type: ignore[no-untyped-def]
    loaded, row, start, INNER: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """[outputs, BLOCK_T] fp32: loaded weights times their numbers of a row, summed over CHUNKS."""
    inner = start + tl.arange(0, CHUNKS)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    if INNER % (CHUNKS * BLOCK_T) == 0:
        numbers = tl.load(row + inner)
    else:
        numbers = tl.load(row + inner, mask=inner < INNER, other=0.0)
    return tl.sum(loaded.to(tl.float32) * numbers.to(tl.float32)[None, :, :], 1)


@triton.jit
def dot_rest(  # type: ignore[no-untyped-def]
    loaded, row, weight, column, INNER: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """[outputs] fp32: a row times the rows `column` of a weight, whose first block is `loaded`. The next block is
    loaded before one is multiplied."""
    BLOCK: tl.constexpr = CHUNKS * BLOCK_T
    total = tl.zeros([loaded.shape[0], BLOCK_T], tl.float32)
    for start in tl.static_range(0, INNER, BLOCK):
        following = loaded
        if start + BLOCK < INNER:
            following = load_weights(weight, column, start + BLOCK, INNER, CHUNKS, BLOCK_T)
        total += multiplied(loaded, row, start, INNER, CHUNKS, BLOCK_T)
        loaded = following
    return tl.sum(total, 1)


@triton.jit
def norm_factor(squares, epsilon, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, INNER: tl.constexpr):  # type: ignore[no-untyped-def]
    """What finishes the norm of a row whose norm is half done; 1 where it is whole and PARTS is 0."""
    if PARTS == 0:
        return 1.0
    else:
        part = tl.arange(0, BLOCK_PARTS)
        found = tl.load(squares + part, mask=part < PARTS, other=0.0)
        return tl.rsqrt(tl.sum(found, 0) / INNER + epsilon)


@triton.jit
def store_sum(  # type: ignore[no-untyped-def]
    total, column, inside, residual, norm_weight, output, scaled, squares, tile, ADDS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Store a sum with the residual, and scaled for the norm that reads it next."""
    if ADDS:
        total += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    result = total.to(output.dtype.element_ty)
    tl.store(output + column, result, mask=inside)
    if SCALES:
        # The norm is that of the numbers as they are stored.
        result = tl.where(inside, result.to(tl.float32), 0.0)
        norm = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(scaled + column, (result * norm).to(scaled.dtype.element_ty), mask=inside)
        tl.store(squares + tile, tl.sum(result * result, 0))


@triton.jit
def add_vector_kernel(  # type: ignore[no-untyped-def]
    row, bias, residual, norm_weight, output, scaled, squares, weight,
    HAS_BIAS: tl.constexpr, MULTIPLIER: tl.constexpr, ADDS: tl.constexpr, SCALES: tl.constexpr,
    OUTPUTS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `add_kernel`, of one row."""
    tile = tl.program_id(0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUTPUTS
    read = tl.minimum(column, OUTPUTS - 1)
    if DEPENDENT:
        gdc_launch_dependents()
    loaded = load_weights(weight, read, 0, INNER, CHUNKS, BLOCK_T)
    if DEPENDENT:
        gdc_wait()
    total = dot_rest(loaded, row, weight, read, INNER, CHUNKS, BLOCK_T)
    if HAS_BIAS:
        total += tl.load(bias + read).to(tl.float32)
    if MULTIPLIER != 1.0:
        total *= MULTIPLIER
    store_sum(total, column, inside, residual, norm_weight, output, scaled, squares, tile, ADDS, SCALES)


@triton.jit
def activated_vector_kernel(  # type: ignore[no-untyped-def]
    row, squares, bias, parameters, output, weight, epsilon,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `activated_kernel`, of one row."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUTPUTS
    read = tl.minimum(column, OUTPUTS - 1)
    if DEPENDENT:
        gdc_launch_dependents()
    loaded = load_weights(weight, read, 0, INNER, CHUNKS, BLOCK_T)
    if GATED:
        loaded_up = load_weights(weight, OUTPUTS + read, 0, INNER, CHUNKS, BLOCK_T)
    if DEPENDENT:
        gdc_wait()
    factor = norm_factor(squares, epsilon, PARTS, BLOCK_PARTS, INNER)
    result = dot_rest(loaded, row, weight, read, INNER, CHUNKS, BLOCK_T) * factor
    if HAS_BIAS:
        result += tl.load(bias + read).to(tl.float32)
    result = activated(result, parameters, ACTIVATION)
    if GATED:
        up = dot_rest(loaded_up, row, weight, OUTPUTS + read, INNER, CHUNKS, BLOCK_T) * factor
        if HAS_BIAS:
            up += tl.load(bias + OUTPUTS + read).to(tl.float32)
        result *= up
    tl.store(output + column, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def rotary_vector_kernel(  # type: ignore[no-untyped-def]
    row, squares, bias, query_norm, key_norm, cosines, sines, slots, query, key_cache, value_cache, weight, product,
    counters, epsilon, query_epsilon, key_epsilon,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, NORMS: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, VALUE_EPSILON: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, INNER: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `rotary_kernel`, of one row. Of the programs of a head the last to arrive norms and rotates it."""
    TILES: tl.constexpr = WIDTH // BLOCK_N
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(0) // TILES
    if DEPENDENT:
        gdc_launch_dependents()
    loaded = load_weights(weight, column, 0, INNER, CHUNKS, BLOCK_T)
    if DEPENDENT:
        gdc_wait()
    factor = norm_factor(squares, epsilon, PARTS, BLOCK_PARTS, INNER)
    total = dot_rest(loaded, row, weight, column, INNER, CHUNKS, BLOCK_T) * factor
    if HAS_BIAS:
        total += tl.load(bias + column).to(tl.float32)
    tl.store(product + column, total)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + head, 1, sem="acq_rel")
    if arrived == TILES - 1:
        tl.store(counters + head, 0)
        _finish_head(
            head, product, query_norm, key_norm, cosines, sines, slots, query, key_cache, value_cache, query_epsilon,
            key_epsilon, NORMS, ROTARY, INTERLEAVED, VALUE_EPSILON, HEADS, KV_HEADS, WIDTH,
        )  # fmt: skip


@triton.jit
def _finish_head(  # type: ignore[no-untyped-def]
    head, product, query_norm, key_norm, cosines, sines, slots, query, key_cache, value_cache, query_epsilon,
    key_epsilon, NORMS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, VALUE_EPSILON: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one head of the product, and store it."""
    pair = tl.arange(0, WIDTH // 2)
    left_column = pair_column(pair, WIDTH, ROTARY, INTERLEAVED)
    right_column = left_column + pair_distance(pair, WIDTH, ROTARY, INTERLEAVED)
    # Written by other processors: not from the cache of this one.
    left = tl.load(product + head * WIDTH + left_column, cache_modifier=".cg")
    right = tl.load(product + head * WIDTH + right_column, cache_modifier=".cg")
    if NORMS and head < HEADS + KV_HEADS:
        norm, own_epsilon = key_norm, key_epsilon
        if head < HEADS:
            norm, own_epsilon = query_norm, query_epsilon
        factor = tl.rsqrt(tl.sum(left * left + right * right, 0) / WIDTH + own_epsilon)
        left *= factor * tl.load(norm + left_column).to(tl.float32)
        right *= factor * tl.load(norm + right_column).to(tl.float32)
    if VALUE_EPSILON > 0 and head >= HEADS + KV_HEADS:
        factor = tl.rsqrt(tl.sum(left * left + right * right, 0) / WIDTH + VALUE_EPSILON)
        left, right = left * factor, right * factor
    if ROTARY > 0 and head < HEADS + KV_HEADS:
        left, right = rotated(left, right, cosines, sines, 0, pair, pair >= 0, WIDTH, ROTARY)
    # A row without a slot is padding of a captured step. One for each pair: in the interpreter a mask is no scalar.
    slot = tl.load(slots + 0 * pair).to(tl.int64)
    kept = slot >= 0
    if head < HEADS:
        kept = pair >= 0
        at = query + head * WIDTH + 0 * slot
    elif head < HEADS + KV_HEADS:
        at = key_cache + (slot * KV_HEADS + head - HEADS) * WIDTH
    else:
        at = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH
    tl.store(at + left_column, left.to(query.dtype.element_ty), mask=kept)
    tl.store(at + right_column, right.to(query.dtype.element_ty), mask=kept)
