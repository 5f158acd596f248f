"""The paged KV cache: page allocation, and pools of keys and values per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels.lazy_memory import lazy_zeros
from tree_kernels.pages import Pages
from tree_kernels.recurrence import RecurrentStates
from tree_kernels.window_frames import WindowFrames


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """The layers of a model that see a window only, and how many frames their pages have."""

    layers: tuple[int, ...]  # among those with keys and values
    window: int  # the longest, in tokens
    share: float = 1.0  # frames, of the number of pages
    rows: int = 0  # rows of a sequence that passes under way may have: with its window they always find frames

    def frames(self, num_pages: int, page_size: int) -> int:
        """Frames beside so many pages."""
        # Window and rows begin and end within pages.
        least = -(-(self.window + self.rows) // page_size) + 2
        return min(num_pages, max(least, math.ceil(num_pages * self.share)))


class KVCache(Pages):
    """Keys and values of all sequences, in pages of `page_size` tokens.

    `keys[layer]` is [num_pages, page_size, kv_heads, key_width], `values[layer]` the same with value_width, which is 0
    where values are a part of the keys. Layers with a window have `frames` and one more in place of pages. They are
    views of `pools`: keys [layers, num_pages, ...] and values of the layers without a window, and those of the others.
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
        windowed: WindowedLayers | None = None,
    ) -> None:
        """`recurrent` are the states of layers that have no keys and values; `layers` counts the others."""
        super().__init__(num_pages, page_size)
        self.recurrent = recurrent
        self.shape, self.dtype, self.windowed = (layers, kv_heads, key_width, value_width), dtype, windowed
        self.frames: WindowFrames | None = None
        within = () if windowed is None else windowed.layers
        whole = [layer for layer in range(layers) if layer not in within]
        by_kind = [(whole, num_pages)]
        if windowed is not None:
            count = windowed.frames(num_pages, page_size)
            self.frames = WindowFrames(num_pages, count, page_size, windowed.window, device)
            by_kind.append(([*within], count + 1))
        self.pools: list[tuple[Tensor, Tensor]] = []
        by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        for own, places in by_kind:
            shape = (len(own), places, page_size, kv_heads)
            pool = lazy_zeros((*shape, key_width), dtype, device), lazy_zeros((*shape, value_width), dtype, device)
            self.pools.append(pool)
            by_layer.update(zip(own, zip(*pool, strict=True), strict=True))
        self.keys, self.values = ([by_layer[layer][part] for layer in range(layers)] for part in range(2))
        self.tokens = torch.zeros(num_pages * page_size, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.pools)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers; of layers with a window the share of it that they have room for."""
        layers, kv_heads, key_width, value_width = self.shape
        whole = layers if self.windowed is None else layers - (1 - self.windowed.share) * len(self.windowed.layers)
        return int(whole * kv_heads * (key_width + value_width) * self.dtype.itemsize)

    def slots_of(self, slots: Tensor) -> list[Tensor]:
        """For each of the `pools`, where it keeps these slots [..]."""
        return [slots] if self.frames is None else [slots, self.frames.slots(slots)]

    def like(self, num_pages: int) -> KVCache:
        """An empty cache of the same layers with so many pages."""
        device = self.tokens.device
        return KVCache(num_pages, self.page_size, *self.shape, self.dtype, device, self.recurrent, self.windowed)

    def __str__(self) -> str:
        tokens, frames = self.num_pages * self.page_size, self.frames
        kind = "keys and values" if self.shape[-1] else "latents"
        size = f"{tokens:,} tokens, {kind} of {self.token_bytes:,} bytes each, {self.nbytes:,} bytes"
        if frames is not None:
            size += f"; layers with windows keep {frames.frames * self.page_size:,} tokens"
        return size if self.recurrent is None else f"{size}, and {self.recurrent}"

    def _give(self, start: int, end: int) -> None:
        super()._give(start, end)
        if self.frames is not None:
            self.frames.forget(range(start, end))
