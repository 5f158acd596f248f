"""The rows that attention of a level computes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TailLevel(NamedTuple):
    """Rows of each of B tails of T rows: those of the root, or of the nodes that a level expands."""

    query_starts: Tensor  # [B + 1] int32, first rows of tails; a sequence without rows has no tail
    prefix_lengths: Tensor  # [B] int32, keys before a tail
    page_starts: Tensor  # [B] int32, where a sequence's pages begin in the table
    page_table: Tensor  # [any] int32
    parents: Tensor  # [B, T] int32 rows of a tail, each before its children; the root's is not read
    first: int  # row of each tail
    end: int  # row behind the last one; keys of the rows before it are in the cache
    depth: int  # most steps from these rows to the root
