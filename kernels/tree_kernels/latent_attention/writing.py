"""Writes new latents and rotary keys into the paged cache.

A slot is `page * page_size + offset`.
"""

from __future__ import annotations

from torch import Tensor


def write_latents(latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write one layer's new rows into the cache, in place.

    Args:
        latents: [R, L].
        rotary: [R, P], rotated.
        cache: [pages, page_size, L + P], contiguous, of their dtype.
        slots: [R] int64, all different. On a GPU also int32, and rows whose slot is negative are left out.
    """
    if latents.is_cuda:
        # One launch, which can leave out the padding rows of a captured step.
        from tree_kernels.latent_attention.triton_writing import write_rows

        write_rows(latents, rotary, cache, slots)
        return
    vectors, width = cache.flatten(0, 1), latents.shape[1]
    vectors[:, :width].index_copy_(0, slots, latents)
    vectors[:, width:].index_copy_(0, slots, rotary)
