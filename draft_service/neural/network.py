"""What drafts, and what is kept of its output between passes.

Symbols: R rows of a pass, C the width of what a network carries from a row to its children (an EAGLE head's feature; 0
for a language model), H the width of what its logits are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.neural.tail_attention import Attend


class RowOutput(NamedTuple):
    """What a pass makes of each row: what its children are given, [R, C], and what `Network.logits` reads, [R, H]."""

    carried: Tensor
    lm_input: Tensor


class Network(Protocol):
    """What drafts: an EAGLE head, or a language model. `token_ids` [V'] are the target's ids of what it says, None
    when they are the same; the other attributes are those of its cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    token_ids: npt.NDArray[np.int32] | None

    def read(self, token_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> RowOutput:
        """One pass over R rows: token_ids [R] integers, carried [R, C] or None for a network that needs none, positions
        [R] integers."""

    def logits(self, lm_input: Tensor) -> Tensor:
        """[R, H] -> [R, V']."""


class RootStates:
    """The output of the last certain row of every sequence, in tensors that stay where they are.

    A sequence's place is the number of its first page, which is its own while it lives. One place more is nobody's:
    `nobody`, for rows that a captured pass leaves free.
    """

    def __init__(self, pages: int, device: torch.device) -> None:
        self.nobody = pages
        self._device = device
        # [pages + 1, C] and [pages + 1, H], made with the first output.
        self._table: RowOutput | None = None

    def write(self, places: Tensor, output: RowOutput, rows: Tensor) -> None:
        """Keep `rows` [n] of a pass's output at `places` [n], both int64 on the device."""
        if self._table is None:
            self._table = RowOutput(*(part.new_zeros(self.nobody + 1, part.shape[1]) for part in output))
        for kept, part in zip(self._table, output, strict=True):
            kept.index_copy_(0, places, part.index_select(0, rows))

    def read(self, places: Tensor) -> RowOutput:
        """The outputs at `places` [n] int64 on the device: [n, C] and [n, H]."""
        assert self._table is not None, "a tree is wanted, and no sequence has an entry"
        return RowOutput(*(kept.index_select(0, places) for kept in self._table))

    def places(self, pages: Sequence[Sequence[int]]) -> Tensor:
        """[n] int64 on the device: where sequences that hold these pages have their places."""
        return torch.tensor([own[0] for own in pages], device=self._device)
