"""New latents and rotary keys into the paged cache, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    latents, rotary, cache, slots, latent_row, rotary_row, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program. Strides are of rows; the cache is contiguous."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    to = cache + slot * (LATENT + ROTARY) + column
    if slot >= 0:
        tl.store(to, tl.load(latents + row * latent_row + column, mask=column < LATENT), mask=column < LATENT)
        turned = tl.load(rotary + row * rotary_row + column, mask=column < ROTARY)
        tl.store(to + LATENT, turned, mask=column < ROTARY)


def write_rows(latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See `writing.write_latents`. Rows whose slot is negative are left out.

    Raises:
        ValueError: the last dimension of `latents` or `rotary` is not contiguous.
    """
    rows, latent = latents.shape
    if latents.stride(1) != 1 or rotary.stride(1) != 1:
        raise ValueError("expected latents and rotary keys whose last dimension is contiguous")
    block = triton.next_power_of_2(max(latent, rotary.shape[1]))
    if rows:
        _write_kernel[(rows,)](
            latents, rotary, cache, slots, latents.stride(0), rotary.stride(0),
            LATENT=latent, ROTARY=rotary.shape[1], BLOCK=block, num_warps=4,
        )  # fmt: skip
