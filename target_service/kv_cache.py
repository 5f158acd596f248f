"""The paged KV cache: pools per layer, and who may use which page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class OutOfPages(Exception):
    """Fewer pages are free than were asked for. Nothing was allocated."""


class KVCache:
    """Keys and values of all sequences, in pages of `page_size` tokens.

    `keys[layer]` is [num_pages, page_size, kv_heads, key_width], `values[layer]` likewise with value_width.
    A slot is `page * page_size + offset`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: int,
        kv_heads: int,
        key_width: int,
        value_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"expected at least one page of at least one token, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages, page_size, kv_heads)
        self.keys = [torch.zeros(*shape, key_width, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(*shape, value_width, dtype=dtype, device=device) for _ in range(layers)]
        # A stack: pages freed last are used first, while the CPU's caches may still hold them.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, or raise `OutOfPages` and take none."""
        if count > len(self._free):
            raise OutOfPages(f"expected {count} free pages, have {len(self._free)}")
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Each must have been allocated and not yet released."""
        self._free.extend(reversed(pages))

    def slots(self, pages: Sequence[int], start: int, count: int) -> list[int]:
        """The slots of tokens start .. start + count of a sequence that holds `pages`."""
        size = self.page_size
        return [pages[t // size] * size + t % size for t in range(start, start + count)]

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is free or owned, and exactly once."""
        pages = [*self._free, *(page for sequence in owned for page in sequence)]
        assert len(pages) == self.num_pages, f"{len(pages)} pages accounted for, of {self.num_pages}"
        assert sorted(pages) == list(range(self.num_pages)), "a page is accounted for twice"
