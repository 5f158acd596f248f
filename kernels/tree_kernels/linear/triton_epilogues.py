"""What a decoder layer does after a product of many rows: one launch between two products."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_parts import (
    activated,
    load_norm,
    load_wide,
    pair_column,
    pair_distance,
    rotated,
    whole_norm,
)
from tree_kernels.triton_condition import is_wanted


@triton.jit
def add_epilogue_kernel(  # type: ignore[no-untyped-def]
    product, bias, post_weight, post_bias, residual, norm_weight, norm_bias, output, normed, post_epsilon, epsilon,
    HAS_BIAS: tl.constexpr, POST_NORMS: tl.constexpr, POST_CENTERED: tl.constexpr, HAS_POST_BIAS: tl.constexpr,
    MULTIPLIER: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, CENTERED: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program: a product's bias and norm, the residual, and the norm that reads the sum next.

    `output` may be the product.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
    if POST_NORMS:
        post, post_shift = load_norm(post_weight, post_bias, column, inside, HAS_POST_BIAS)
    if NORMS:
        norm, shift = load_norm(norm_weight, norm_bias, column, inside, HAS_NORM_BIAS)
    if DEPENDENT:
        gdc_wait()
    total = load_wide(product + row * WIDTH, column, inside)
    if HAS_BIAS:
        total += load_wide(bias, column, inside)
    if POST_NORMS:
        total = whole_norm(total, inside, post, post_shift, post_epsilon, WIDTH, POST_CENTERED, HAS_POST_BIAS)
    if MULTIPLIER != 1.0:
        total *= MULTIPLIER
    if ADDS:
        total += load_wide(residual + row * WIDTH, column, inside)
    result = total.to(output.dtype.element_ty)
    tl.store(output + row * WIDTH + column, result, mask=inside)
    if NORMS:
        # The norm is that of the numbers as they are stored.
        total = whole_norm(result.to(tl.float32), inside, norm, shift, epsilon, WIDTH, CENTERED, HAS_NORM_BIAS)
        tl.store(normed + row * WIDTH + column, total.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def gated_epilogue_kernel(  # type: ignore[no-untyped-def]
    product, bias, parameters, output, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row per program: an activation, `GATED` that of gate times up. A row of the product is then
    gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < OUTPUTS
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = product + row * (2 if GATED else 1) * OUTPUTS + column
    result = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = activated(result, parameters, ACTIVATION)
    if GATED:
        up = tl.load(at + OUTPUTS, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(bias + OUTPUTS + column, mask=inside, other=0.0).to(tl.float32)
        result *= up
    tl.store(output + row * OUTPUTS + column, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _read_pairs(  # type: ignore[no-untyped-def]
    product, bias, row, columns, there, scale, TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Numbers of a row of the product of queries, keys and values."""
    found = tl.load(product + row * TOTAL + columns, mask=there, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        found += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _mean_square(  # type: ignore[no-untyped-def]
    product, bias, row, begin, scale, COUNT: tl.constexpr, TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Of COUNT numbers of a row of the product."""
    total = tl.zeros([1024], tl.float32)
    for start in range(0, COUNT, 1024):
        column = start + tl.arange(0, 1024)
        found = _read_pairs(product, bias, row, begin + column, column < COUNT, scale, TOTAL, HAS_BIAS)
        total += found * found
    return tl.sum(total, 0) / COUNT


@triton.jit
def _norm_of(query_norm, key_norm, columns, of_query, of_key):  # type: ignore[no-untyped-def]
    """The weights of norms of queries and of keys, from where those of each head begin."""
    weight = tl.load(query_norm + columns, mask=of_query, other=0.0).to(tl.float32)
    return weight + tl.load(key_norm + columns, mask=of_key, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["condition"])
def rotary_epilogue_kernel(  # type: ignore[no-untyped-def]
    product, squares, bias, query_norm, key_norm, cosines, sines, slots, query, key_cache, value_cache, condition,
    epsilon, query_epsilon, key_epsilon,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, NORMS: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, VALUE_EPSILON: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of one row per program: norms, rotary embedding, and keys and values into their slots.

    A row of the product is its queries, then its keys, then its values. `NORMS` is "none", "heads" for a norm of each
    head by itself, or "all" for one over all queries and one over all keys.
    """
    HALF_WIDTH: tl.constexpr = WIDTH // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    there = (head < TOTAL) & (pair < HALF_WIDTH)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    # Once for each head: in the interpreter a mask cannot have a scalar part.
    slot = tl.load(slots + row + 0 * head).to(tl.int64)
    scale = 1.0
    if PARTS > 0:
        part = tl.arange(0, BLOCK_PARTS)
        found = tl.load(squares + row * PARTS + part, mask=part < PARTS, other=0.0)
        scale = tl.rsqrt(tl.sum(found, 0) / INNER + epsilon)
    left_column = pair_column(pair, WIDTH, ROTARY, INTERLEAVED)
    right_column = left_column + pair_distance(pair, WIDTH, ROTARY, INTERLEAVED)
    begin = head * WIDTH
    left = _read_pairs(product, bias, row, begin + left_column, there, scale, TOTAL * WIDTH, HAS_BIAS)
    right = _read_pairs(product, bias, row, begin + right_column, there, scale, TOTAL * WIDTH, HAS_BIAS)
    # Values are not rotated; multiplying them with cosines of 1 and sines of 0 would make NaN of
    # infinite ones.
    turns = head < HEADS + KV_HEADS
    normed_left, normed_right = left, right
    if NORMS != "none":
        if NORMS == "heads":
            mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1))[:, None] / WIDTH
        else:
            QUERIES: tl.constexpr = HEADS * WIDTH
            queries = _mean_square(product, bias, row, 0, scale, QUERIES, TOTAL * WIDTH, HAS_BIAS)
            keys = _mean_square(product, bias, row, QUERIES, scale, KV_HEADS * WIDTH, TOTAL * WIDTH, HAS_BIAS)
            mean = tl.where(head < HEADS, queries, keys)
        factor = tl.rsqrt(mean + tl.where(head < HEADS, query_epsilon, key_epsilon))
        of_query, of_key = there & (head < HEADS), there & (head >= HEADS) & turns
        query_begin, key_begin = head * 0, head * 0
        if NORMS == "all":
            query_begin, key_begin = begin, (head - HEADS) * WIDTH
        weight = _norm_of(query_norm + query_begin, key_norm + key_begin, left_column, of_query, of_key)
        normed_left = left * factor * weight
        weight = _norm_of(query_norm + query_begin, key_norm + key_begin, right_column, of_query, of_key)
        normed_right = right * factor * weight
        if VALUE_EPSILON > 0:
            tl.static_assert(NORMS == "heads", "of each head by itself")
            factor = tl.rsqrt(mean + VALUE_EPSILON)
            left, right = left * factor, right * factor
    first, second = normed_left, normed_right
    if ROTARY > 0:
        first, second = rotated(first, second, cosines, sines, row, pair, pair < HALF_WIDTH, WIDTH, ROTARY)
    first = tl.where(turns, first, left).to(query.dtype.element_ty)
    second = tl.where(turns, second, right).to(query.dtype.element_ty)
    kept = there & (head < HEADS)
    at = query + row * HEADS * WIDTH + begin
    tl.store(at + left_column, first, mask=kept)
    tl.store(at + right_column, second, mask=kept)
    # A row without a slot is padding of a captured step.
    kept = there & (head >= HEADS) & turns & (slot >= 0)
    at = key_cache + (slot * KV_HEADS + head - HEADS) * WIDTH
    tl.store(at + left_column, first, mask=kept)
    tl.store(at + right_column, second, mask=kept)
    kept = there & (head >= HEADS + KV_HEADS) & (slot >= 0)
    at = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH
    tl.store(at + left_column, first, mask=kept)
    tl.store(at + right_column, second, mask=kept)
