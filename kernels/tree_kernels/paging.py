"""Writes new keys and values into the paged cache.

A slot is `page * page_size + offset`.
"""

from __future__ import annotations

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write one layer's new rows into the cache, in place.

    Args:
        key: [R, Hkv, D].
        value: [R, Hkv, Dv].
        key_cache: [pages, page_size, Hkv, D], of key's dtype, contiguous, or so much of the columns of such a cache.
        value_cache: [pages, page_size, Hkv, Dv], of value's dtype, likewise.
        slots: [R] int64, all different. On a GPU also int32, and rows whose slot is negative are left out.
    """
    if key.is_cuda:
        # One launch instead of two, which can leave out the padding rows of a captured step.
        from tree_kernels.triton_paging import write_rows

        write_rows(key, value, key_cache, value_cache, slots)
        return
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)
