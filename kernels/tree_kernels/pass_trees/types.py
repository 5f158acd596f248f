"""The rows of a target's pass, and what a network reads that drafts behind it.

Symbols: R rows of the pass; B sequences of the pass; L levels of a tree, W nodes that a level expands; P pages of a
sequence at most. A sequence's *tail* are the rows behind its keys: the root's, which is the last of these, then W for
each level that is expanded.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tree_kernels.growth import GumbelMax
from tree_kernels.verification import Verdicts


class VerifiedRows(NamedTuple):
    """The rows of a pass that was verified, before the device turns it into the next one; all int32."""

    token_ids: Tensor  # [R]
    parameters: Tensor  # [any], as `verification.records.pack_parameters` lays them out
    query_starts: Tensor  # [B + 1]
    prefix_lengths: Tensor  # [B]
    page_starts: Tensor  # [B]
    page_table: Tensor  # [pages of all sequences]
    verdicts: Verdicts


class Tails(NamedTuple):
    """What `read_outcome` writes for the passes of a drafting network. All tensors keep their addresses."""

    next_tokens: Tensor  # [at least R] int32, the token that follows each row: of rows that are kept
    last_rows: Tensor  # [B] int64, the last row of the pass that is kept
    bases: Tensor  # [B] int32, tokens of the sequence with its tree's root; 0 where no tree is to be grown
    roots: Tensor  # [B] int32, that token
    prefix_lengths: Tensor  # [B] int32, keys before the tail
    page_table: Tensor  # [B, P] int32, pages of each sequence
    slots: Tensor  # [L - 1, B, W] int32, where the keys of each level go; -1 where there is no room
    positions: Tensor  # [L - 1, B, W] int32
    limits: Tensor  # [2, B] int32, most nodes and most depth of each tree
    temperatures: Tensor  # [B] float32
    gumbel_max: GumbelMax
