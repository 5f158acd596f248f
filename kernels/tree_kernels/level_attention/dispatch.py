"""Attention of the rows of one level of growing trees, over the tails that `tree_kernels.growth` writes.

A level has few rows, of which each sees its tail's ancestors and all keys before; only where tails begin changes from
tree to tree. So no plan has to divide the work: one launch reads where the tails are, and attends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tree_kernels.attention import PLAIN, AttentionVariant
from tree_kernels.attention.tree_mask import WORD_BITS
from tree_kernels.level_attention.reference import attend_level
from tree_kernels.level_attention.types import TailLevel

if TYPE_CHECKING:
    from tree_kernels.level_attention.triton_backend import TritonLevelAttention

# Of keys, for which a program's tiles were laid out.
_MAX_WIDTH = 256


class LevelAttention:
    """Attends to a paged cache for levels of trees. Launches of one object must not run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._launched: TritonLevelAttention | None = None
        if device.type == "cuda":
            # Only here: Triton may be absent.
            from tree_kernels.level_attention.triton_backend import TritonLevelAttention

            self._launched = TritonLevelAttention(device)

    def takes(self, tail: int, variant: AttentionVariant, width: int) -> bool:
        """Whether a launch attends for tails of so many rows, in layers of this kind with keys of `width` numbers."""
        plain = variant.window is None and variant.slopes is None
        return self._launched is not None and plain and tail <= WORD_BITS and width <= _MAX_WIDTH

    def run(
        self,
        level: TailLevel,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        """[B * W, Hq, Dv] in query's dtype, of the W rows of every tail; undefined for sequences without a tail.

        Query [B * W, Hq, D] has a contiguous last dimension, caches [pages, page_size, Hkv, D] and [.., Dv] are
        contiguous, `scale` is positive, and `variant` has no window and no slopes."""
        own = query, key_cache, value_cache, scale, variant
        return attend_level(level, *own) if self._launched is None else self._launched.run(level, *own)
