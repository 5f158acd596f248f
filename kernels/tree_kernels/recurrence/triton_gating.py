"""Triton: `gating`, a launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _softplus(number):  # type: ignore[no-untyped-def]
    """log(1 + e), by its series where adding 1 would round e."""
    small = tl.exp(-tl.abs(number))
    series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0 - small * 0.25)))
    return tl.maximum(number, 0.0) + tl.where(small < 0.01, series, tl.log(1.0 + small))


@triton.jit(do_not_specialize=["stride"])
def delta_gates_kernel(  # type: ignore[no-untyped-def]
    product, decay, bias, gates, stride, HEADS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One row a program."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = head < HEADS
    beta = tl.load(product + row * stride + head, mask=there, other=0.0).to(tl.float32)
    number = tl.load(product + row * stride + HEADS + head, mask=there, other=0.0).to(tl.float32)
    number += tl.load(bias + head, mask=there, other=0.0)
    log = _softplus(number) * tl.load(decay + head, mask=there, other=0.0)
    tl.store(gates + row * 2 * HEADS + head, log, mask=there)
    tl.store(gates + row * 2 * HEADS + HEADS + head, tl.sigmoid(beta), mask=there)


@triton.jit(do_not_specialize=["stride"])
def gated_heads_kernel(  # type: ignore[no-untyped-def]
    mixed, gate, weight, output, stride, epsilon, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of one row a program."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    there = (head < HEADS) & (column < WIDTH)
    at = head * WIDTH + column
    kind = output.dtype.element_ty
    number = tl.load(mixed + row * HEADS * WIDTH + at, mask=there, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(number * number, 1) / WIDTH + epsilon)
    # Rounded where the plain form rounds.
    normed = (number * factor[:, None]).to(kind).to(tl.float32)
    scale = tl.load(weight + column + 0 * head, mask=there, other=0.0).to(tl.float32)
    normed = (normed * scale).to(kind).to(tl.float32)
    opening = tl.load(gate + row * stride + at, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row * HEADS * WIDTH + at, normed * opening * tl.sigmoid(opening), mask=there)


@triton.jit(do_not_specialize=["stride"])
def space_gates_kernel(  # type: ignore[no-untyped-def]
    product, decay, bias, gates, stride, LEAST: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = head < HEADS
    number = tl.load(product + row * stride + head, mask=there, other=0.0).to(tl.float32)
    steps = _softplus(number + tl.load(bias + head, mask=there, other=0.0))
    # A comparison keeps NaN, which a minimum may not.
    steps = tl.where(steps < LEAST, LEAST, tl.where(steps > MOST, MOST, steps))
    tl.store(gates + row * 2 * HEADS + head, steps * tl.load(decay + head, mask=there, other=0.0), mask=there)
    tl.store(gates + row * 2 * HEADS + HEADS + head, steps, mask=there)


@triton.jit(do_not_specialize=["values_stride", "gate_stride"])
def space_output_kernel(  # type: ignore[no-untyped-def]
    mixed, values, skip, gate, norm, output, values_stride, gate_stride, epsilon, HEAD: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """GROUP numbers of one row a program, which are normed together."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, column = lane < GROUP, tl.program_id(1) * GROUP + lane
    kind = output.dtype.element_ty
    number = tl.load(mixed + row * GROUP * GROUPS + column, mask=there, other=0.0).to(tl.float32)
    own = tl.load(values + row * values_stride + column, mask=there, other=0.0).to(tl.float32)
    number += tl.load(skip + column // HEAD, mask=there, other=0.0) * own
    # Rounded where the plain form rounds.
    number = number.to(kind).to(tl.float32)
    opening = tl.load(gate + row * gate_stride + column, mask=there, other=0.0).to(tl.float32)
    number *= opening * tl.sigmoid(opening)
    if NORMS:
        number = (number * tl.rsqrt(tl.sum(number * number, 0) / GROUP + epsilon)).to(kind).to(tl.float32)
        number *= tl.load(norm + column, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row * GROUP * GROUPS + column, number.to(kind), mask=there)
