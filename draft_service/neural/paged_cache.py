"""A drafter's paged cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.pages import Pages


class PagedCache(Pages):
    """`keys[layer]` and `values[layer]` are [num_pages, page_size, kv_heads, head_dim]."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_pages, page_size)
        shape = (num_pages, page_size, kv_heads, head_dim)
        # A CPU commits memory when it is written. A GPU's kernels may read a masked slot, which must not be NaN.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.keys: list[Tensor] = [make(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values: list[Tensor] = [make(shape, dtype=dtype, device=device) for _ in range(layers)]

    def extend(self, pages: list[int], tokens: int) -> bool:
        """Grow a sequence's `pages` to hold `tokens`. Returns False, and allocates nothing, if too few are free."""
        missing = self.pages_for(tokens) - len(pages)
        if missing > self.free_pages:
            return False
        if missing > 0:
            pages += self.allocate(missing, after=pages[-1] if pages else None)
        return True
