"""The interface of a network that drafts, and the outputs that are kept between its passes.

Symbols: R rows of a pass, C the width of the state that a row passes on to its children (an EAGLE head's feature; 0 for
a language model), H the width of the lm_head's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.neural.tail_attention import TailPart
from tree_models.layers.paged import CacheShape, PagedPass


class RowOutput(NamedTuple):
    """The output of a pass for each row: the state for its children, [.., C], and the input of `logits`, [.., H]."""

    carried: Tensor
    lm_input: Tensor


class Network(Protocol):
    """A network that drafts: an EAGLE head, or a language model. `token_ids` [V'] are the target ids of its vocabulary,
    None if that is the target's; the other attributes describe its cache."""

    # Tokens behind a row's position that the row depends on: 1 for a head, whose rows read a state and the next token.
    successors: int
    cache_shapes: Sequence[CacheShape]  # by layer with keys and values
    dtype: torch.dtype
    device: torch.device
    token_ids: npt.NDArray[np.int32] | None

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,
        positions: Tensor,
        step: PagedPass,
        sources: Tensor | None = None,
    ) -> RowOutput:
        """One pass over R rows of integer `token_ids` [R] and `positions` [R], with the states [R, C] `carried` from
        the parents, None for a network without. With `sources` [R] int64 states are [any, C], and these the parents'
        places among them."""

    def logits(self, lm_input: Tensor) -> Tensor:
        """[R, H] -> [R, V']."""


class RootStates:
    """The output of the last committed row of every sequence, in tensors with fixed addresses. One more slot, `unused`,
    is for the free rows of a captured pass."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.unused = slots
        self._device = device
        # [slots + 1, C] and [slots + 1, H], allocated with the first output.
        self._table: RowOutput | None = None

    def write(self, slots: Tensor, output: RowOutput, rows: Tensor) -> None:
        """Store `rows` [n] of a pass's output in `slots` [n], both int64 on the device."""
        if self._table is None:
            self._table = RowOutput(*(part.new_zeros(self.unused + 1, part.shape[1]) for part in output))
        for kept, part in zip(self._table, output, strict=True):
            kept.index_copy_(0, slots, part.index_select(0, rows))

    def write_last(self, parts: Sequence[TailPart], output: RowOutput) -> None:
        """Store the output of each part's last row, of a pass in which all rows are new."""
        rows = torch.from_numpy(np.cumsum([part.rows for part in parts]) - 1).to(self._device)
        self.write(self._on_device([part.slot for part in parts]), output, rows)

    def outputs_in(self, slots: Tensor) -> RowOutput:
        """The outputs in `slots` [n] int64 on the device: [n, C] and [n, H]."""
        assert self._table is not None, "no sequence has an entry"
        return RowOutput(*(kept.index_select(0, slots) for kept in self._table))

    def read_of(self, slots: Sequence[int]) -> RowOutput:
        """The outputs in these slots: [n, C] and [n, H]."""
        return self.outputs_in(self._on_device(slots))

    def _on_device(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, device=self._device)
