"""The paged KV cache: page allocation, and pools of keys and values per layer."""

from __future__ import annotations

import torch

from tree_kernels.lazy_memory import lazy_zeros
from tree_kernels.pages import Pages
from tree_kernels.recurrence import RecurrentStates


class KVCache(Pages):
    """Keys and values of all sequences, in pages of `page_size` tokens.

    `keys[layer]` is [num_pages, page_size, kv_heads, key_width], `values[layer]` the same with value_width, which is 0
    where values are a part of the keys; they are views of `key_pool` [layers, num_pages, ...] and `value_pool`.
    `tokens` [slots] int32 are the tokens of these keys, where passes are verified on the device.
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
        recurrent: RecurrentStates | None = None,
    ) -> None:
        """`recurrent` are the states of layers that have no keys and values; `layers` counts the others."""
        super().__init__(num_pages, page_size)
        self.recurrent = recurrent
        shape = (layers, num_pages, page_size, kv_heads)
        self.key_pool = lazy_zeros((*shape, key_width), dtype, device)
        self.value_pool = lazy_zeros((*shape, value_width), dtype, device)
        self.keys = list(self.key_pool)
        self.values = list(self.value_pool)
        self.tokens = torch.zeros(num_pages * page_size, dtype=torch.int32, device=device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return (self.key_pool.nbytes + self.value_pool.nbytes) // (self.num_pages * self.page_size)

    def __str__(self) -> str:
        tokens = self.num_pages * self.page_size
        kind = "keys and values" if self.value_pool.shape[-1] else "latents"
        size = f"{tokens:,} tokens, {kind} of {self.token_bytes:,} bytes each, {tokens * self.token_bytes:,} bytes"
        return size if self.recurrent is None else f"{size}, and {self.recurrent}"
