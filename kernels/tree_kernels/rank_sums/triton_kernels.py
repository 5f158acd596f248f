"""The sum of all ranks' rows, with residual and norms."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.linear.triton_parts import load_norm, load_wide, whole_norm


@triton.jit
def _meet(signals, program, RANK: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until this program of every rank is here. What ranks wrote before can then be read.

    A signal counts how often its sender was here less how often its receiver was: a sender needs no answer.
    """
    # Other threads' reads must have come back before the signal.
    tl.debug_barrier()
    for step in tl.static_range(1, RANKS):
        theirs = signals[(RANK + step) % RANKS] + program * RANKS + RANK
        tl.atomic_add(theirs, 1, sem="release", scope="sys")
    for step in tl.static_range(1, RANKS):
        own = signals[RANK] + program * RANKS + (RANK + step) % RANKS
        while tl.atomic_add(own, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.atomic_add(own, -1, sem="relaxed", scope="sys")
    tl.debug_barrier()


@triton.jit
def add_parts_kernel(  # type: ignore[no-untyped-def]
    parts, signals, post_weight, post_bias, residual, norm_weight, norm_bias, output, normed, count, post_epsilon,
    epsilon,
    RANK: tl.constexpr, RANKS: tl.constexpr, LEAVES_TOGETHER: tl.constexpr, POST_NORMS: tl.constexpr,
    POST_CENTERED: tl.constexpr, HAS_POST_BIAS: tl.constexpr, MULTIPLIER: tl.constexpr, ADDS: tl.constexpr,
    NORMS: tl.constexpr, CENTERED: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some rows per program: see `definition.added_parts`. With `LEAVES_TOGETHER` no rank goes on, and writes its next
    part, before all have read this one."""
    program = tl.program_id(0)
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
    _meet(signals, program, RANK, RANKS)
    for row in range(program, count, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * WIDTH
        total = load_wide(parts[0] + at, column, inside)
        for rank in tl.static_range(1, RANKS):
            total += load_wide(parts[rank] + at, column, inside)
        if POST_NORMS:
            total = whole_norm(total, inside, post, post_shift, post_epsilon, WIDTH, POST_CENTERED, HAS_POST_BIAS)
        if MULTIPLIER != 1.0:
            total *= MULTIPLIER
        if ADDS:
            total += load_wide(residual + at, column, inside)
        result = total.to(output.dtype.element_ty)
        tl.store(output + at + column, result, mask=inside)
        if NORMS:
            # The norm is that of the numbers as they are stored.
            total = whole_norm(result.to(tl.float32), inside, norm, shift, epsilon, WIDTH, CENTERED, HAS_NORM_BIAS)
            tl.store(normed + at + column, total.to(normed.dtype.element_ty), mask=inside)
    if LEAVES_TOGETHER:
        _meet(signals, program, RANK, RANKS)
