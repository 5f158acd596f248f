"""The paged KV cache: page allocation, and pools of keys and values per layer."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from tree_kernels.pages import Pages


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [shape]. On a CPU they take memory only once they are written, so a large cache costs nothing at start."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


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
    ) -> None:
        super().__init__(num_pages, page_size)
        shape = (layers, num_pages, page_size, kv_heads)
        self.key_pool = _zeros((*shape, key_width), dtype, device)
        self.value_pool = _zeros((*shape, value_width), dtype, device)
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
        return f"{tokens:,} tokens, {kind} of {self.token_bytes:,} bytes each, {tokens * self.token_bytes:,} bytes"
