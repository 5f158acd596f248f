"""The tensors of a step whose logits are shaped."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SequenceTexts(NamedTuple):
    """The texts of a step's B sequences, as their pages hold them beside the keys. All int32."""

    tokens: Tensor  # [slots of the cache], the token of each key, those of this pass included
    page_size: int
    query_starts: Tensor  # [B + 1], each sequence's first row
    prefix_lengths: Tensor  # [B], keys before the step
    page_starts: Tensor  # [B], where in the page table its pages begin
    page_table: Tensor  # [pages of all sequences]


class StepToShape(NamedTuple):
    """See `DeviceShaper.shape`."""

    logits: Tensor
    token_ids: Tensor
    parents: Tensor
    parameters: Tensor
    texts: SequenceTexts
    masks: Tensor
    mask_rows: Tensor
