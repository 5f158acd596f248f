"""Keys and values of a drafter's own sequences, in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.pages import Pages


class PagedCache(Pages):
    """Pools for each layer: `keys[layer]` and `values[layer]` are [num_pages, page_size, kv_heads, head_dim]."""

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
        # On a CPU memory is taken as it is written; a GPU's kernels may read a masked slot, which must be a number.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.keys: list[Tensor] = [make(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values: list[Tensor] = [make(shape, dtype=dtype, device=device) for _ in range(layers)]

    def extend(self, pages: list[int], tokens: int) -> bool:
        """Let `pages`, which a sequence holds, grow to room for `tokens`. False, and nothing taken, when too few are
        free."""
        missing = self.pages_for(tokens) - len(pages)
        if missing > self.free_pages:
            return False
        if missing > 0:
            pages += self.allocate(missing, after=pages[-1] if pages else None)
        return True
