"""The integers of a step in device memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepIntegers:
    """The integers of a step of R rows and B sequences in device memory, each an int32 view at a fixed address."""

    token_ids: Tensor  # [R]
    positions: Tensor  # [R]
    slots: Tensor  # [R]
    parameters: Tensor  # [any], as `verification.records.pack_parameters` lays them out, for at least B sequences
    query_starts: Tensor  # [B + 1]
    prefix_lengths: Tensor  # [B]
    page_starts: Tensor  # [B]
    page_table: Tensor  # [pages of all sequences]
    owners: Tensor  # [at least R], the part of `parameters` with the sequence that each row is verified for
    parents: Tensor  # [R], relative to each sequence's first row
    causal: Tensor  # [B], 1 where a sequence's rows are a causal chain
