"""The integers of a step in device memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepIntegers:
    """The integers of a step in device memory, each an int32 view at a fixed address.

    Symbols: R rows, B sequences.
    """

    # [R] each.
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    # [any], as `verification.records.pack_parameters` lays them out, for at least B sequences.
    parameters: Tensor
    # [B + 1], [B] and [B].
    query_starts: Tensor
    prefix_lengths: Tensor
    page_starts: Tensor
    # [pages of all sequences]
    page_table: Tensor
    # [at least R], the part of `parameters` with the sequence that each row is verified for.
    owners: Tensor
    # Only where the device chooses the rows (`tree_kernels.node_table`): [R] parents, relative to each sequence's first
    # row, and [B], 1 where a sequence's rows are a causal chain.
    parents: Tensor | None = None
    causal: Tensor | None = None
