"""A drafter's paged cache of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tree_kernels.pages import Pages

if TYPE_CHECKING:
    from draft_service.neural.network import Network


def cached_bytes(network: Network) -> int:
    """Bytes of a token's keys and values in all layers."""
    return network.dtype.itemsize * sum(heads * sum(widths) for heads, *widths in network.cache_shapes)


class DraftCache(Pages):
    """`keys[layer]` and `values[layer]` are [num_pages, page_size, heads, width]. See `tree_models.layers.paged`."""

    def __init__(self, num_pages: int, page_size: int, network: Network) -> None:
        super().__init__(num_pages, page_size)
        # A CPU commits memory when it is written. A GPU's kernels may read a masked slot, which must not be NaN.
        make = torch.empty if network.device.type == "cpu" else torch.zeros
        self.keys, self.values = list[Tensor](), list[Tensor]()
        for heads, *widths in network.cache_shapes:
            for width, pools in zip(widths, (self.keys, self.values), strict=True):
                shape = num_pages, page_size, heads, width
                pools.append(make(shape, dtype=network.dtype, device=network.device))

    def extend(self, pages: list[int], tokens: int) -> bool:
        """Grow a sequence's `pages` to hold `tokens`. Returns False, and allocates nothing, if too few are free."""
        missing = self.pages_for(tokens) - len(pages)
        if missing > self.free_pages:
            return False
        if missing > 0:
            pages += self.allocate(missing, after=pages[-1] if pages else None)
        return True
