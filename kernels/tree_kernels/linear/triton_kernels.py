"""Kernels of a decoder layer's linear parts: each reads its weights once and ends in what the layer does next."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_int8 import high_numbers, low_numbers
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

# Where it lies differs from level to level of a tree: kernels would be compiled for each alignment.
_CONDITION = ["condition"]
# Bytes of weights that one instruction prefetches.
_PREFETCH_BYTES = tl.constexpr(256)


@triton.jit
def _prefetch(address):  # type: ignore[no-untyped-def]
    """Bring 256 bytes from each address on into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;", "=r,l", [address],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def await_inputs(  # type: ignore[no-untyped-def]
    weight, column, condition, WIDTH: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
    CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Let the next launch begin, bring the first weights into the L2 cache where the launch is not known to do nothing,
    and wait for the launch before."""
    if DEPENDENT:
        gdc_launch_dependents()
        if AHEAD > 0:
            step: tl.constexpr = _PREFETCH_BYTES // (weight.dtype.element_ty.primitive_bitwidth // 8)
            inner = tl.program_id(2) * (WIDTH // SPLITS) + tl.arange(0, AHEAD) * step
            inner = tl.minimum(inner, WIDTH - step)
            address = weight + column[:, None].to(tl.int64) * WIDTH + inner[None, :]
            if CONDITIONAL:
                if is_wanted(condition):
                    _prefetch(address)
            else:
                _prefetch(address)
        gdc_wait()


@triton.jit
def _sum_of_parts(  # type: ignore[no-untyped-def]
    total, partials, counters, row, there, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[BLOCK_N, BLOCK_M] fp32 of the `SPLITS` programs that share a tile, and which rows this program is to store: the
    last to arrive adds up the parts of all, always in the same order."""
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        at = partials + tile.to(tl.int64) * SPLITS * BLOCK_N * BLOCK_M
        at += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(at + tl.program_id(2) * BLOCK_N * BLOCK_M, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        there = there & (row * 0 + arrived == SPLITS - 1)
        if arrived == SPLITS - 1:
            tl.store(counters + tile, 0)
            total = tl.load(at, cache_modifier=".cg")
            for split in tl.static_range(1, SPLITS):
                total += tl.load(at + split * BLOCK_N * BLOCK_M, cache_modifier=".cg")
    return total, there


@triton.jit
def block_product(  # type: ignore[no-untyped-def]
    left_at, right_at, there, WIDTH: tl.constexpr, SHARE: tl.constexpr, INT8: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] fp32: SHARE numbers of each row of a weight times those of the rows that are `there`, from
    where their first STEP lie. `INT8` weights are those of `Int8Weight`, WIDTH words a row."""
    # The weight is the left factor: matrix units take 8 columns, but no fewer than 16 rows.
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, SHARE, STEP):
        kept = there[None, :]
        if SHARE % STEP == 0:
            left = tl.load(left_at)
        else:
            inside = start + tl.arange(0, STEP) < SHARE
            left = tl.load(left_at, mask=inside[None, :], other=0)
            kept = kept & inside[:, None]
        right = tl.load(right_at, mask=kept, other=0.0)
        if INT8:
            total = tl.dot(low_numbers(left, right.dtype), right, total, input_precision="ieee")
            right = tl.load(right_at + WIDTH, mask=kept, other=0.0)
            left = high_numbers(left, right.dtype)
        total = tl.dot(left, right, total, input_precision="ieee")
        left_at += STEP
        right_at += STEP
    return total


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    rows, weight, row_scales, rows_map, weight_map, partials, counters, row, column, first_column, there, row_stride,
    MAPPED: tl.constexpr, INT8: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] fp32, `rows` times the rows `column` of `weight`, and which rows this program is to store.

    `MAPPED`, both are read by tensor maps, which read zeros past their ends, and columns follow each other from
    `first_column` on.
    """
    # Of a row of weights: numbers, or words of two.
    WIDTH: tl.constexpr = INNER // 2 if INT8 else INNER
    STEP: tl.constexpr = BLOCK_K // 2 if INT8 else BLOCK_K
    SHARE: tl.constexpr = WIDTH // SPLITS
    begin = tl.program_id(2) * SHARE
    if MAPPED:
        first = tl.program_id(0) * BLOCK_M
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, SHARE, BLOCK_K):
            left, right = weight_map.load([first_column, begin + start]), rows_map.load([first, begin + start])
            total = tl.dot(left, right.T, total, input_precision="ieee")
    else:
        inner = begin + tl.arange(0, STEP)
        left_at = weight + column[:, None].to(tl.int64) * WIDTH + inner[None, :]
        right_at = rows + row[None, :].to(tl.int64) * row_stride + inner[:, None]
        total = block_product(left_at, right_at, there, WIDTH, SHARE, INT8, BLOCK_M, BLOCK_N, STEP)
    total, there = _sum_of_parts(total, partials, counters, row, there, SPLITS, BLOCK_M, BLOCK_N)
    if INT8:
        total *= tl.load(row_scales + column)[:, None]
    return tl.trans(total), there


@triton.jit
def _mapped_products(  # type: ignore[no-untyped-def]
    rows_map, weight_map, row, column, OUTPUTS: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
    HALF_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Without splits, two products [BLOCK_M, HALF_N]: of gate, and of up, which is `OUTPUTS` below it."""
    gate, up = tl.zeros([HALF_N, BLOCK_M], tl.float32), tl.zeros([HALF_N, BLOCK_M], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        right = rows_map.load([row, start]).T
        gate = tl.dot(weight_map.load([column, start]), right, gate, input_precision="ieee")
        up = tl.dot(weight_map.load([column + OUTPUTS, start]), right, up, input_precision="ieee")
    return tl.trans(gate), tl.trans(up)


@triton.jit
def _halves(total, BLOCK_M: tl.constexpr, HALF_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_M, 2 * HALF_N] into its left and its right half."""
    return tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF_N)), (0, 2, 1)))


@triton.jit
def load_squares(squares, row, there, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, BLOCK_PARTS] sums of squares of `ScaledRows`; of rows that are normed whole, PARTS is 0, nothing."""
    if PARTS == 0:
        return row
    else:
        part = tl.arange(0, BLOCK_PARTS)[None, :]
        return tl.load(squares + row[:, None] * PARTS + part, mask=there[:, None] & (part < PARTS), other=0.0)


@triton.jit
def finish_norm(  # type: ignore[no-untyped-def]
    total, found, epsilon, PARTS: tl.constexpr, INNER: tl.constexpr
):
    """A product [rows, columns] of rows whose norm is half done, divided by their root mean square."""
    if PARTS == 0:
        return total
    else:
        return total * tl.rsqrt(tl.sum(found, 1) / INNER + epsilon)[:, None]


@triton.jit(do_not_specialize=_CONDITION)
def add_kernel(  # type: ignore[no-untyped-def]
    rows, bias, residual, norm_weight, output, scaled, squares, weight, row_scales, partials, counters,
    rows_map, weight_map, condition, count, row_stride, MAPPED: tl.constexpr,
    INT8: tl.constexpr, HAS_BIAS: tl.constexpr, MULTIPLIER: tl.constexpr, ADDS: tl.constexpr, SCALES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A linear layer; `ADDS` the residual to a multiple, and `SCALES` the sum for the norm that reads it next."""
    tile = tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUTPUTS
    if OUTPUTS % BLOCK_N != 0:
        column = tl.minimum(column, OUTPUTS - 1)
    await_inputs(weight, column, condition, INNER // 2 if INT8 else INNER, SPLITS, AHEAD, CONDITIONAL, DEPENDENT)
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < count
    total, there = _product(
        rows, weight, row_scales, rows_map, weight_map, partials, counters, row, column, tile * BLOCK_N, there,
        row_stride, MAPPED, INT8, INNER, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + column).to(tl.float32)[None, :]
    if MULTIPLIER != 1.0:
        total *= MULTIPLIER
    at = row[:, None].to(tl.int64) * OUTPUTS + column[None, :]
    kept = there[:, None] & inside[None, :]
    if ADDS:
        total += tl.load(residual + at, mask=kept, other=0.0).to(tl.float32)
    result = total.to(output.dtype.element_ty)
    tl.store(output + at, result, mask=kept)
    if SCALES:
        # The norm is that of the numbers as they are stored.
        result = tl.where(kept, result.to(tl.float32), 0.0)
        norm = tl.load(norm_weight + column).to(tl.float32)
        tl.store(scaled + at, (result * norm[None, :]).to(scaled.dtype.element_ty), mask=kept)
        tl.store(squares + row * tl.cdiv(OUTPUTS, BLOCK_N) + tile, tl.sum(result * result, 1), mask=there)


@triton.jit(do_not_specialize=_CONDITION)
def activated_kernel(  # type: ignore[no-untyped-def]
    rows, squares, bias, parameters, output, weight, row_scales, partials, counters, rows_map, weight_map,
    condition, count, epsilon,
    MAPPED: tl.constexpr, INT8: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, OUTPUTS: tl.constexpr,
    INNER: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm, up_proj and activation(up); `GATED`, gate_proj too, and activation(gate) * up. A tile then holds as many
    columns of gate as of up."""
    OWN_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * OWN_N
    if GATED:
        column = tl.minimum(first + lane % OWN_N, OUTPUTS - 1) + lane // OWN_N * OUTPUTS
    elif OUTPUTS % BLOCK_N != 0:
        column = tl.minimum(first + lane, OUTPUTS - 1)
    else:
        column = first + lane
    await_inputs(weight, column, condition, INNER // 2 if INT8 else INNER, SPLITS, AHEAD, CONDITIONAL, DEPENDENT)
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < count
    # Loaded before the product and used after it.
    found = load_squares(squares, row, there, PARTS, BLOCK_PARTS)
    if MAPPED and GATED:
        result, up = _mapped_products(
            rows_map, weight_map, tl.program_id(0) * BLOCK_M, first, OUTPUTS, INNER, BLOCK_M, OWN_N, BLOCK_K
        )
    else:
        result, there = _product(
            rows, weight, row_scales, rows_map, weight_map, partials, counters, row, column, first, there,
            INNER, MAPPED, INT8, INNER, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if GATED:
            result, up = _halves(result, BLOCK_M, OWN_N)
    result = finish_norm(result, found, epsilon, PARTS, INNER)
    own = first + tl.arange(0, OWN_N)
    inside = own < OUTPUTS
    if HAS_BIAS:
        result += tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = activated(result, parameters, ACTIVATION)
    if GATED:
        up = finish_norm(up, found, epsilon, PARTS, INNER)
        if HAS_BIAS:
            up += tl.load(bias + OUTPUTS + own, mask=inside, other=0.0).to(tl.float32)[None, :]
        result *= up
    at = row[:, None].to(tl.int64) * OUTPUTS + own[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=_CONDITION)
def rotary_kernel(  # type: ignore[no-untyped-def]
    rows, squares, bias, query_norm, key_norm, cosines, sines, slots, query, key_cache, value_cache, weight, row_scales,
    partials, counters, rows_map, weight_map, condition, count, epsilon, query_epsilon, key_epsilon,
    MAPPED: tl.constexpr, INT8: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, VALUE_EPSILON: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm, q_proj, k_proj and v_proj, `NORMS` of each head, rotary embedding, and keys and values into their slots.

    A tile holds the first numbers of some pairs of a head, and behind them the second; with `NORMS` it is a head.
    """
    tl.static_assert(not NORMS or BLOCK_N == WIDTH, "a norm needs its whole head")
    tl.static_assert(not MAPPED or BLOCK_N == WIDTH, "a tensor map reads columns that lie side by side")
    HALF_N: tl.constexpr = BLOCK_N // 2
    HALF_WIDTH: tl.constexpr = WIDTH // 2
    lane = tl.arange(0, BLOCK_N)
    head = tl.program_id(1) * HALF_N // HALF_WIDTH
    first = tl.program_id(1) * HALF_N % HALF_WIDTH
    pair = first + lane % HALF_N
    distance = pair_distance(pair, WIDTH, ROTARY, INTERLEAVED)
    column = head * WIDTH + pair_column(pair, WIDTH, ROTARY, INTERLEAVED) + lane // HALF_N * distance
    await_inputs(weight, column, condition, INNER // 2 if INT8 else INNER, SPLITS, AHEAD, CONDITIONAL, DEPENDENT)
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < count
    found = load_squares(squares, row, there, PARTS, BLOCK_PARTS)
    slot = tl.load(slots + row, mask=there, other=-1).to(tl.int64)
    total, there = _product(
        rows, weight, row_scales, rows_map, weight_map, partials, counters, row, column, head * WIDTH, there,
        INNER, MAPPED, INT8, INNER, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    total = finish_norm(total, found, epsilon, PARTS, INNER)
    if HAS_BIAS:
        total += tl.load(bias + column).to(tl.float32)[None, :]
    if NORMS and head < HEADS + KV_HEADS:
        norm, own_epsilon = key_norm, key_epsilon
        if head < HEADS:
            norm, own_epsilon = query_norm, query_epsilon
        total *= tl.rsqrt(tl.sum(total * total, 1) / WIDTH + own_epsilon)[:, None]
        total *= tl.load(norm + column - head * WIDTH).to(tl.float32)[None, :]
    if VALUE_EPSILON > 0 and head >= HEADS + KV_HEADS:
        tl.static_assert(NORMS, "a norm needs its whole head")
        total *= tl.rsqrt(tl.sum(total * total, 1) / WIDTH + VALUE_EPSILON)[:, None]
    left, right = _halves(total, BLOCK_M, HALF_N)
    pair = first + tl.arange(0, HALF_N)[None, :]
    if ROTARY > 0 and head < HEADS + KV_HEADS:
        left, right = rotated(left, right, cosines, sines, row[:, None], pair, there[:, None], WIDTH, ROTARY)
    # A row without a slot is padding of a captured step.
    kept = there & (slot >= 0)
    if head < HEADS:
        kept = there
        at = query + (row.to(tl.int64) * HEADS + head) * WIDTH
    elif head < HEADS + KV_HEADS:
        at = key_cache + (slot * KV_HEADS + head - HEADS) * WIDTH
    else:
        at = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH
    at = at[:, None] + pair_column(pair, WIDTH, ROTARY, INTERLEAVED)
    tl.store(at, left.to(query.dtype.element_ty), mask=kept[:, None])
    at += pair_distance(pair, WIDTH, ROTARY, INTERLEAVED)
    tl.store(at, right.to(query.dtype.element_ty), mask=kept[:, None])


@triton.jit(do_not_specialize=_CONDITION)
def norm_kernel(  # type: ignore[no-untyped-def]
    rows, norm_weight, norm_bias, output, squares, condition, row_stride, output_stride, epsilon, WHOLE: tl.constexpr,
    CENTERED: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The norm of one row per program, or unless `WHOLE` its row times the norm's weight and its sum of squares."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
    norm, shift = load_norm(norm_weight, norm_bias, column, inside, HAS_NORM_BIAS)
    if DEPENDENT:
        gdc_wait()
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    read = load_wide(rows + row.to(tl.int64) * row_stride, column, inside)
    if WHOLE:
        read = whole_norm(read, inside, norm, shift, epsilon, WIDTH, CENTERED, HAS_NORM_BIAS)
    else:
        tl.store(squares + row, tl.sum(read * read, 0))
        read *= norm
    tl.store(output + row.to(tl.int64) * output_stride + column, read.to(output.dtype.element_ty), mask=inside)


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    rows, output, row_stride, output_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One row per program. Unlike PyTorch's copies it lets the launch behind it bring its weights meanwhile."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    read = tl.load(rows + row * row_stride + column, mask=inside)
    tl.store(output + row * output_stride + column, read, mask=inside)


@triton.jit(do_not_specialize=_CONDITION)
def head_input_kernel(  # type: ignore[no-untyped-def]
    token_ids, embedding, embedding_norm, features, feature_norm, positions, sources, frequencies, output, taken,
    cosines, sines, condition, feature_stride, embedding_epsilon, feature_epsilon, scaling, TAKES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_ROTARY: tl.constexpr,
    CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program: see `RowLinears.head_input`. `TAKES` features by `sources`."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    lane = tl.arange(0, BLOCK_ROTARY)
    inside_rotary = lane < ROTARY
    # It comes first behind the launch that writes a condition: those behind it begin when that has ended, and read it
    # before they wait.
    if DEPENDENT and not CONDITIONAL:
        gdc_launch_dependents()
    frequency = tl.load(frequencies + lane, mask=inside_rotary, other=0.0)
    if DEPENDENT:
        gdc_wait()
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    if DEPENDENT and CONDITIONAL:
        gdc_launch_dependents()
    own = embedding + tl.load(token_ids + row).to(tl.int64) * WIDTH
    read = tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
    source = row.to(tl.int64)
    if TAKES:
        source = tl.load(sources + row).to(tl.int64)
    feature = tl.load(features + source * feature_stride + column, mask=inside, other=0.0)
    if TAKES:
        tl.store(taken + row.to(tl.int64) * WIDTH + column, feature, mask=inside)
    feature = feature.to(tl.float32)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    at = output + row.to(tl.int64) * 2 * WIDTH + column
    norm = load_wide(embedding_norm, column, inside)
    result = whole_norm(read, inside, norm, norm, embedding_epsilon, WIDTH, False, False)
    tl.store(at, result.to(output.dtype.element_ty), mask=inside)
    norm = load_wide(feature_norm, column, inside)
    result = whole_norm(feature, inside, norm, norm, feature_epsilon, WIDTH, False, False)
    tl.store(at + WIDTH, result.to(output.dtype.element_ty), mask=inside)
    tl.store(cosines + row * ROTARY + lane, tl.cos(angle) * scaling, mask=inside_rotary)
    tl.store(sines + row * ROTARY + lane, tl.sin(angle) * scaling, mask=inside_rotary)
