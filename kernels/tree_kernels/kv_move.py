"""Keys and values into the paged cache, and the accepted path's to where it belongs.

A slot is `page * page_size + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write one layer's new rows into the cache, in place.

    Args:
        key: [R, Hkv, D].
        value: [R, Hkv, Dv].
        key_cache: [pages, page_size, Hkv, D], contiguous, of key's dtype.
        value_cache: [pages, page_size, Hkv, Dv], contiguous, of value's dtype.
        slots: [R] int64, all different. On a GPU also int32, and rows whose slot is negative are left out.
    """
    if key.is_cuda:
        # In one launch instead of two, and able to leave out the rows that fill up a captured step.
        from tree_kernels._triton_kv import write_rows

        write_rows(key, value, key_cache, value_cache, slots)
        return
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)


def move_kv(
    caches: Sequence[Tensor], source_slots: Tensor | Sequence[int], target_slots: Tensor | Sequence[int]
) -> None:
    """Copy slot `source_slots[i]` onto `target_slots[i]` in every cache, in place.

    All sources are read before any target is written, so the two may overlap.

    Args:
        caches: [pages, page_size, Hkv, width] each, contiguous; keys and values of every layer.
        source_slots: [n] slots to read.
        target_slots: [n] slots to write, all different.

    Raises:
        ValueError: the two do not have the same length.
    """
    if len(source_slots) != len(target_slots):
        raise ValueError(f"expected {len(source_slots)} target slots, got {len(target_slots)}")
    if not caches or not len(source_slots):
        return
    source = torch.as_tensor(source_slots, dtype=torch.int64, device=caches[0].device)
    target = torch.as_tensor(target_slots, dtype=torch.int64, device=caches[0].device)
    for cache in caches:
        slots = cache.view(-1, *cache.shape[2:])
        slots.index_copy_(0, target, slots.index_select(0, source))
