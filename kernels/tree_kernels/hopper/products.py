"""Products of a decoder layer by a ring of weights: what `add_kernel`, `activated_kernel` and `rotary_kernel` of
`linear.triton_kernels` compute, for weights in 16 bits, gated MLPs, and heads of 128 that rotate whole.

Program (rows, tile, split): see `weight_ring`. Tiles hold no more than the weight has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tree_kernels.hopper.specialising import warp_specialize
from tree_kernels.hopper.weight_ring import (
    PART,
    fill_ring,
    finish_ring_norm,
    make_ring,
    multiply_ring,
    sum_of_splits,
)

_WIDTH = gl.constexpr(128)
# How numbers are stored: a thread has eight of one row, 16 bytes, side by side.
_STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))


@gluon.jit
def _store_sum(  # type: ignore[no-untyped-def]
    total, column, row, bias, residual, norm_weight, output, scaled, count, HAS_BIAS: gl.constexpr,
    MULTIPLIER: gl.constexpr, ADDS: gl.constexpr, SCALES: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Store 64 columns of the sum, and the same scaled by the next norm; [BLOCK_M] sums of squares of those."""
    total = gl.convert_layout(total, _STORED)
    column += gl.arange(0, PART, gl.SliceLayout(1, _STORED))
    row += gl.arange(0, BLOCK_M, gl.SliceLayout(0, _STORED))
    if HAS_BIAS:
        total += gl.load(bias + column).to(gl.float32)[:, None]
    if MULTIPLIER != 1.0:
        total *= MULTIPLIER
    at = row[None, :].to(gl.int64) * OUTPUTS + column[:, None]
    kept = (row < count)[None, :]
    if ADDS:
        total += gl.load(residual + at, mask=kept, other=0.0).to(gl.float32)
    result = total.to(output.dtype.element_ty)
    gl.store(output + at, result, mask=kept)
    # The norm is that of the numbers as they are stored.
    total = gl.where(kept, result.to(gl.float32), 0.0)
    if SCALES:
        norm = gl.load(norm_weight + column).to(gl.float32)
        gl.store(scaled + at, (total * norm[:, None]).to(scaled.dtype.element_ty), mask=kept)
    return gl.sum(total * total, 0)


@gluon.jit
def _add(  # type: ignore[no-untyped-def]
    ring, read, written, partials, counters, count, HAS_BIAS: gl.constexpr, MULTIPLIER: gl.constexpr,
    ADDS: gl.constexpr, SCALES: gl.constexpr, OUTPUTS: gl.constexpr, BLOCKS: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    bias, residual, norm_weight = read
    output, scaled, squares = written
    total, none = multiply_ring(ring, BLOCKS, 1, BLOCK_M, STAGES)
    total, none, has_sums = sum_of_splits(total, none, partials, counters, SPLITS, 1, BLOCK_M)
    if has_sums:
        tile, row = gl.program_id(1), gl.program_id(0) * BLOCK_M
        found = _store_sum(
            total, tile * PART, row, bias, residual, norm_weight, output, scaled, count, HAS_BIAS, MULTIPLIER, ADDS,
            SCALES, OUTPUTS, BLOCK_M,
        )  # fmt: skip
        if SCALES:
            row += gl.arange(0, BLOCK_M, gl.SliceLayout(0, _STORED))
            gl.store(squares + row * (OUTPUTS // PART) + tile, found, mask=row < count)


@gluon.jit
def ring_add_kernel(  # type: ignore[no-untyped-def]
    bias, residual, norm_weight, output, scaled, squares, partials, counters, rows_map, weight_map, count,
    HAS_BIAS: gl.constexpr, MULTIPLIER: gl.constexpr, ADDS: gl.constexpr, SCALES: gl.constexpr, OUTPUTS: gl.constexpr,
    INNER: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A linear layer; `ADDS` the residual to a multiple, and `SCALES` the sum for the norm that reads it next."""
    BLOCKS: gl.constexpr = INNER // SPLITS // BLOCK_K
    row, first, begin = gl.program_id(0) * BLOCK_M, gl.program_id(1) * PART, gl.program_id(2) * (INNER // SPLITS)
    ring = make_ring(rows_map, weight_map, 1, BLOCK_M, BLOCK_K, STAGES)
    warp_specialize(
        [
            (_add, (
                ring, (bias, residual, norm_weight), (output, scaled, squares), partials, counters, count, HAS_BIAS,
                MULTIPLIER, ADDS, SCALES, OUTPUTS, BLOCKS, SPLITS, BLOCK_M, STAGES,
            )),
            (fill_ring, (rows_map, weight_map, ring, row, first, first, begin, BLOCKS, 1, BLOCK_M, BLOCK_K, STAGES)),
        ],
        [1],
    )  # fmt: skip


@gluon.jit
def _activated(number, KIND: gl.constexpr):  # type: ignore[no-untyped-def]
    """`forms.Activation` of fp32 numbers, of the kinds of `RING_ACTIVATIONS`."""
    if KIND == "silu":
        return number / (1.0 + gl.exp(-number))
    else:
        gl.static_assert(KIND == "gelu_tanh", "an activation that has no kernel")
        # (1 + tanh(u)) / 2 is a sigmoid of 2u.
        twice = 1.5957691216057308 * (number + 0.044715 * number * number * number)
        return number / (1.0 + gl.exp(-twice))


@gluon.jit
def _activate(  # type: ignore[no-untyped-def]
    ring, squares, bias, output, partials, counters, count, epsilon, SUMS: gl.constexpr, BLOCK_SUMS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, OUTPUTS: gl.constexpr, INNER: gl.constexpr, BLOCKS: gl.constexpr,
    SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    gate, up = multiply_ring(ring, BLOCKS, 2, BLOCK_M, STAGES)
    gate, up, has_sums = sum_of_splits(gate, up, partials, counters, SPLITS, 2, BLOCK_M)
    if has_sums:
        first, row = gl.program_id(1) * PART, gl.program_id(0) * BLOCK_M
        gate, up = finish_ring_norm(gate, up, squares, row, count, epsilon, INNER, SUMS, BLOCK_SUMS, BLOCK_M)
        if HAS_BIAS:
            own = bias + first + gl.arange(0, PART, gl.SliceLayout(1, gate.type.layout))
            gate += gl.load(own).to(gl.float32)[:, None]
            up += gl.load(own + OUTPUTS).to(gl.float32)[:, None]
        result = gl.convert_layout((_activated(gate, ACTIVATION) * up).to(output.dtype.element_ty), _STORED)
        column = first + gl.arange(0, PART, gl.SliceLayout(1, _STORED))
        row += gl.arange(0, BLOCK_M, gl.SliceLayout(0, _STORED))
        at = row[None, :].to(gl.int64) * OUTPUTS + column[:, None]
        gl.store(output + at, result, mask=(row < count)[None, :])


@gluon.jit
def ring_activated_kernel(  # type: ignore[no-untyped-def]
    squares, bias, output, partials, counters, rows_map, weight_map, count, epsilon, SUMS: gl.constexpr,
    BLOCK_SUMS: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, OUTPUTS: gl.constexpr,
    INNER: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Norm, gate_proj and up_proj, and activation(gate) * up. A tile holds 64 columns of gate, and the same of up."""
    BLOCKS: gl.constexpr = INNER // SPLITS // BLOCK_K
    row, first, begin = gl.program_id(0) * BLOCK_M, gl.program_id(1) * PART, gl.program_id(2) * (INNER // SPLITS)
    ring = make_ring(rows_map, weight_map, 2, BLOCK_M, BLOCK_K, STAGES)
    warp_specialize(
        [
            (_activate, (
                ring, squares, bias, output, partials, counters, count, epsilon, SUMS, BLOCK_SUMS, HAS_BIAS, ACTIVATION,
                OUTPUTS, INNER, BLOCKS, SPLITS, BLOCK_M, STAGES,
            )),
            (fill_ring, (
                rows_map, weight_map, ring, row, first, OUTPUTS + first, begin, BLOCKS, 2, BLOCK_M, BLOCK_K, STAGES,
            )),
        ],
        [1],
    )  # fmt: skip


@gluon.jit
def _load_halves(numbers, column):  # type: ignore[no-untyped-def]
    """[64, 1] fp32 twice: numbers `column` on, and those 64 behind."""
    at = numbers + column + gl.arange(0, PART, gl.SliceLayout(1, _STORED))
    return gl.load(at).to(gl.float32)[:, None], gl.load(at + PART).to(gl.float32)[:, None]


@gluon.jit
def _rotate(  # type: ignore[no-untyped-def]
    ring, read, written, partials, counters, count, epsilon, query_epsilon, key_epsilon, SUMS: gl.constexpr,
    BLOCK_SUMS: gl.constexpr, HAS_BIAS: gl.constexpr, NORMS: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, INNER: gl.constexpr, BLOCKS: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    squares, bias, query_norm, key_norm, cosines, sines, slots = read
    query, key_cache, value_cache = written
    left, right = multiply_ring(ring, BLOCKS, 2, BLOCK_M, STAGES)
    left, right, has_sums = sum_of_splits(left, right, partials, counters, SPLITS, 2, BLOCK_M)
    if has_sums:
        head, row = gl.program_id(1), gl.program_id(0) * BLOCK_M
        left, right = finish_ring_norm(left, right, squares, row, count, epsilon, INNER, SUMS, BLOCK_SUMS, BLOCK_M)
        one, two = gl.convert_layout(left, _STORED), gl.convert_layout(right, _STORED)
        if HAS_BIAS:
            first, second = _load_halves(bias, head * _WIDTH)
            one, two = one + first, two + second
        pair = gl.arange(0, PART, gl.SliceLayout(1, _STORED))
        row += gl.arange(0, BLOCK_M, gl.SliceLayout(0, _STORED))
        there = row < count
        if head < HEADS + KV_HEADS:
            if NORMS:
                norm, own_epsilon = key_norm, key_epsilon
                if head < HEADS:
                    norm, own_epsilon = query_norm, query_epsilon
                root = gl.rsqrt((gl.sum(one * one, 0) + gl.sum(two * two, 0)) / _WIDTH + own_epsilon)[None, :]
                first, second = _load_halves(norm, 0)
                one, two = one * root * first, two * root * second
            at = row[None, :] * _WIDTH + pair[:, None]
            kept = there[None, :]
            first_cosine = gl.load(cosines + at, mask=kept, other=0.0).to(gl.float32)
            first_sine = gl.load(sines + at, mask=kept, other=0.0).to(gl.float32)
            second_cosine = gl.load(cosines + at + PART, mask=kept, other=0.0).to(gl.float32)
            second_sine = gl.load(sines + at + PART, mask=kept, other=0.0).to(gl.float32)
            turned = one * first_cosine - two * first_sine
            two = two * second_cosine + one * second_sine
            one = turned
        # A row without a slot is padding of a captured step.
        slot = gl.load(slots + row, mask=there, other=-1).to(gl.int64)
        there_too = there & (slot >= 0)
        to = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * _WIDTH
        if head < HEADS:
            there_too = there
            to = query + (row.to(gl.int64) * HEADS + head) * _WIDTH
        elif head < HEADS + KV_HEADS:
            to = key_cache + (slot * KV_HEADS + head - HEADS) * _WIDTH
        at_pair = to[None, :] + pair[:, None]
        gl.store(at_pair, one.to(query.dtype.element_ty), mask=there_too[None, :])
        gl.store(at_pair + PART, two.to(query.dtype.element_ty), mask=there_too[None, :])


@gluon.jit
def ring_rotary_kernel(  # type: ignore[no-untyped-def]
    squares, bias, query_norm, key_norm, cosines, sines, slots, query, key_cache, value_cache, partials, counters,
    rows_map, weight_map, count, epsilon, query_epsilon, key_epsilon, SUMS: gl.constexpr, BLOCK_SUMS: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMS: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, INNER: gl.constexpr,
    SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Norm, q_proj, k_proj and v_proj, `NORMS` of each head, rotary embedding, and keys and values into their slots. A
    tile is a head of 128, whose pairs lie half a head apart."""
    BLOCKS: gl.constexpr = INNER // SPLITS // BLOCK_K
    row, first, begin = gl.program_id(0) * BLOCK_M, gl.program_id(1) * _WIDTH, gl.program_id(2) * (INNER // SPLITS)
    ring = make_ring(rows_map, weight_map, 2, BLOCK_M, BLOCK_K, STAGES)
    warp_specialize(
        [
            (_rotate, (
                ring, (squares, bias, query_norm, key_norm, cosines, sines, slots), (query, key_cache, value_cache),
                partials, counters, count, epsilon, query_epsilon, key_epsilon, SUMS, BLOCK_SUMS, HAS_BIAS, NORMS,
                HEADS, KV_HEADS, INNER, BLOCKS, SPLITS, BLOCK_M, STAGES,
            )),
            (fill_ring, (
                rows_map, weight_map, ring, row, first, first + PART, begin, BLOCKS, 2, BLOCK_M, BLOCK_K, STAGES,
            )),
        ],
        [1],
    )  # fmt: skip
