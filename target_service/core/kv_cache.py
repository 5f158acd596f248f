"""The paged KV cache: page allocation, and pools of keys and values per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    `keys[layer]` is [num_pages, page_size, heads, key width], `values[layer]` the same with the value width, which is 0
    where values are a part of the keys. Layers with a window have `frames` and one more in place of pages. They are
    views of `pools`: keys [layers, num_pages, ...] and values of the layers of one shape without a window, or with one.
    `tokens` [slots] int32 are the tokens of these keys, where passes are verified on the device.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        recurrent: RecurrentStates | None = None,
        windowed: WindowedLayers | None = None,
    ) -> None:
        """`shapes` are heads, key width and value width of each layer with keys and values, if there are some;
        `recurrent` are the states of the others."""
        super().__init__(num_pages, page_size)
        self.recurrent = recurrent
        self.shapes, self.dtype, self.windowed = tuple(shapes), dtype, windowed
        self.frames: WindowFrames | None = None
        within: tuple[int, ...] = ()
        if windowed is not None:
            within, frames = windowed.layers, windowed.frames(num_pages, page_size)
            self.frames = WindowFrames(num_pages, frames, page_size, windowed.window, device)
        layers = range(len(self.shapes))
        # Those without a window first.
        by_kind: dict[tuple[bool, tuple[int, int, int]], list[int]] = {}
        for layer in sorted(layers, key=lambda layer: layer in within):
            by_kind.setdefault((layer in within, self.shapes[layer]), []).append(layer)
        self.pools: list[tuple[Tensor, Tensor]] = []
        self._in_frames: list[bool] = []
        by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        for (in_frames, (heads, *widths)), own in by_kind.items():
            places = frames + 1 if in_frames else num_pages
            keys, values = (lazy_zeros((len(own), places, page_size, heads, one), dtype, device) for one in widths)
            self.pools.append((keys, values))
            self._in_frames.append(in_frames)
            by_layer.update(zip(own, zip(keys, values, strict=True), strict=True))
        self.keys, self.values = ([by_layer[layer][part] for layer in layers] for part in range(2))
        self.tokens = torch.zeros(num_pages * page_size, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.pools)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers; of layers with a window the share of it that they have room for."""
        within, share = ((), 1.0) if self.windowed is None else (self.windowed.layers, self.windowed.share)
        numbers = [heads * (key_width + value_width) for heads, key_width, value_width in self.shapes]
        whole = sum(one * (share if layer in within else 1.0) for layer, one in enumerate(numbers))
        return int(whole * self.dtype.itemsize)

    def slots_of(self, slots: Tensor) -> list[Tensor]:
        """For each of the `pools`, where it keeps these slots [..]."""
        within = slots if self.frames is None else self.frames.slots(slots)
        return [within if in_frames else slots for in_frames in self._in_frames]

    def like(self, num_pages: int) -> KVCache:
        """An empty cache of the same layers with so many pages."""
        device = self.tokens.device
        return KVCache(num_pages, self.page_size, self.shapes, self.dtype, device, self.recurrent, self.windowed)

    def __str__(self) -> str:
        tokens, frames = self.num_pages * self.page_size, self.frames
        size = f"{tokens:,} tokens, without keys and values"
        if self.shapes:
            kind = "keys and values" if self.shapes[0][-1] else "latents"
            size = f"{tokens:,} tokens, {kind} of {self.token_bytes:,} bytes each, {self.nbytes:,} bytes"
        if frames is not None:
            size += f"; layers with windows keep {frames.frames * self.page_size:,} tokens"
        return size if self.recurrent is None else f"{size}, and {self.recurrent}"

    def _give(self, start: int, end: int) -> None:
        super()._give(start, end)
        if self.frames is not None:
            self.frames.forget(range(start, end))
