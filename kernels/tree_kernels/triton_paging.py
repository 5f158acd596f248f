"""Writes new keys and values into the paged cache, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, slots, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row per program. Strides are of rows and heads; a slot's heads are KEY_WIDTH and VALUE_WIDTH apart."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    # In the interpreter a mask cannot have a scalar part.
    here = (head < HEADS) & (slot + 0 * head >= 0)
    read = tl.load(key + row * key_row + head * key_head + column, mask=here & (column < D))
    tl.store(key_cache + (slot * HEADS + head) * KEY_WIDTH + column, read, mask=here & (column < D))
    read = tl.load(value + row * value_row + head * value_head + column, mask=here & (column < DV))
    tl.store(value_cache + (slot * HEADS + head) * VALUE_WIDTH + column, read, mask=here & (column < DV))


def write_rows(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See `paging.write_kv`. Rows whose slot is negative are left out. Raises `ValueError` where the last dimension of
    `key` or `value` is not contiguous."""
    rows, heads, width = key.shape
    value_width = value.shape[2]
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("expected keys and values whose last dimension is contiguous")
    if rows:
        _write_kernel[(rows,)](
            key, value, key_cache, value_cache, slots,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            HEADS=heads, D=width, DV=value_width, KEY_WIDTH=key_cache.stride(1) // heads,
            VALUE_WIDTH=value_cache.stride(1) // heads, BLOCK_HEADS=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(max(width, value_width)), num_warps=4,
        )  # fmt: skip
