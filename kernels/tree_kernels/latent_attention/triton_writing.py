"""Writes new latents and rotary keys into the paged cache after norm and rotation, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from tree_kernels.latent_attention.norm_rope import LatentRows, RotaryAngles


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    source, target, cosines, sines, live, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
):  # fmt: skip
    """Rotary parts from `source` to `target`, pointers [M, 1] each; `cosines` and `sines` are [1, BLOCK_HALF]."""
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = live & (i < HALF)
    first = tl.load(source + (2 * i if PAIRS_IN else i), mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + (2 * i + 1 if PAIRS_IN else HALF + i), mask=mask, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + (2 * i if PAIRS_OUT else i), (first * cosines - second * sines).to(kind), mask=mask)
    tl.store(target + (2 * i + 1 if PAIRS_OUT else HALF + i), (second * cosines + first * sines).to(kind), mask=mask)


@triton.jit
def _norm_rope_write_kernel(  # type: ignore[no-untyped-def]
    vectors, queries, weight, cosines, sines, cache, slots, absorbed, epsilon, vector_row, query_row, query_head,
    cosine_row, cosine_step, sine_row, sine_step, absorbed_row, absorbed_head, HEADS: tl.constexpr,
    LATENT: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr,
):  # fmt: skip
    """Programs (row, block): block 0 norms the row's latent and writes its vector, the others rotate BLOCK_HEADS
    queries each."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cosines + row * cosine_row + i * cosine_step, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sines + row * sine_row + i * sine_step, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    if block == 0:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            c = tl.arange(0, BLOCK_LATENT)
            kind = cache.dtype.element_ty
            own = vectors + row * vector_row
            latent = tl.load(own + c, mask=c < LATENT, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / LATENT + epsilon)
            factor = tl.load(weight + c, mask=c < LATENT, other=0.0).to(tl.float32)
            to = cache + slot * (LATENT + 2 * HALF)
            # Rounded before it is multiplied with the weight, as in the models' own code.
            tl.store(to + c, ((latent * scale).to(kind).to(tl.float32) * factor).to(kind), mask=c < LATENT)
            one = tl.zeros([1, 1], tl.int32)
            _rotate(own + LATENT + one, to + LATENT + one, cos, sin, one == 0, HALF, BLOCK_HALF, PAIRS_IN, PAIRS_OUT)
    else:
        head = ((block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        _rotate(
            queries + row * query_row + head * query_head + PLAIN,
            absorbed + row * absorbed_row + head * absorbed_head + LATENT, cos, sin, head < HEADS, HALF, BLOCK_HALF,
            PAIRS_IN, PAIRS_OUT,
        )  # fmt: skip


def norm_rope_write_rows(
    rows: LatentRows, rotary: RotaryAngles, cache: Tensor, slots: Tensor, absorbed: Tensor
) -> None:
    """See `norm_rope.norm_rope_write`, which has checked the shapes. Rows whose slot is negative are left out of the
    cache."""
    count, heads, width = rows.queries.shape
    latent, half = len(rows.weight), rotary.cosines.shape[1]
    # Heads of queries that a program rotates: 16 of 64 elements are 8 of each of 128 threads, as many as one load
    # takes.
    each = min(16, triton.next_power_of_2(heads))
    if count:
        _norm_rope_write_kernel[(count, 1 + triton.cdiv(heads, each))](
            rows.vectors, rows.queries, rows.weight, rotary.cosines, rotary.sines, cache, slots, absorbed, rows.epsilon,
            rows.vectors.stride(0), rows.queries.stride(0), rows.queries.stride(1), *rotary.cosines.stride(),
            *rotary.sines.stride(), absorbed.stride(0), absorbed.stride(1),
            HEADS=heads, LATENT=latent, HALF=half, PLAIN=width - 2 * half, BLOCK_LATENT=triton.next_power_of_2(latent),
            BLOCK_HALF=triton.next_power_of_2(half), BLOCK_HEADS=each, PAIRS_IN=rotary.pairs_in,
            PAIRS_OUT=rotary.pairs_out, num_warps=4,
        )  # fmt: skip
