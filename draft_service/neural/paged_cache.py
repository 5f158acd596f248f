"""Keys and values of a drafter's own sequences, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedCache:
    """Pools for each layer, and which pages are free.

    `keys[layer]` and `values[layer]` are [num_pages, page_size, kv_heads, head_dim]. A slot is
    `page * page_size + offset`. Attention on a CPU reads consecutive pages in place, so a sequence grows into the page
    after its last, and a new one starts in the middle of the longest free run.
    """

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
        self.page_size = page_size
        shape = (num_pages, page_size, kv_heads, head_dim)
        # On a CPU memory is taken as it is written; a GPU's kernels may read a masked slot, which must be a number.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.keys: list[Tensor] = [make(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values: list[Tensor] = [make(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._free = [True] * num_pages
        self.free_pages = num_pages

    @property
    def used_pages(self) -> int:
        return len(self._free) - self.free_pages

    def extend(self, pages: list[int], tokens: int) -> bool:
        """Let `pages`, which a sequence holds, grow to room for `tokens`. False, and nothing taken, when too few are
        free."""
        missing = -(-tokens // self.page_size) - len(pages)
        if missing > self.free_pages:
            return False
        for _ in range(missing):
            page = pages[-1] + 1 if pages else len(self._free)
            if page >= len(self._free) or not self._free[page]:
                page = self._middle_of_longest_run()
            self._free[page] = False
            self.free_pages -= 1
            pages.append(page)
        return True

    def release(self, pages: list[int]) -> None:
        """Take all pages back; the list is empty then."""
        for page in pages:
            self._free[page] = True
        self.free_pages += len(pages)
        pages.clear()

    def slots(self, pages: Sequence[int], start: int, count: int) -> list[int]:
        """The slots of tokens start .. start + count of a sequence that holds `pages`."""
        size = self.page_size
        return [pages[token // size] * size + token % size for token in range(start, start + count)]

    def _middle_of_longest_run(self) -> int:
        best = longest = run = 0
        for page, free in enumerate([*self._free, False]):
            if free:
                run += 1
                continue
            if run > longest:
                best, longest = page - run, run
            run = 0
        # A run at the very start has no neighbour to leave room for.
        return best + longest // 2 if best else 0
