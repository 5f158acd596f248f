"""Tree attention for a drafter that adds rows to a tree whose earlier rows are already in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from draft_service.neural.paged_cache import DraftCache
from tree_kernels.attention import AttentionBatch, AttentionPlan, AttentionVariant, TreeAttention
from tree_models.layers.paged import PagedPass


@dataclass(frozen=True, slots=True)
class TailPart:
    """One sequence's part of a pass."""

    pages: Sequence[int]  # of the sequence, for prefix and tail
    prefix: int  # keys that every row attends to
    rows: int  # rows of the tail, in the slots after the prefix
    new: int  # rows at the end of the tail that are computed now; the keys of the others are in the cache
    parents: tuple[int, ...] | None = None  # [rows] of the tail; None for a causal tail
    slot: int = 0  # of the sequence in `RootStates`


@dataclass(slots=True)
class PassRows:
    """The rows of a pass, one sequence after another: `token_ids` and `positions` of the new rows of all parts."""

    parts: list[TailPart] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, part: TailPart, token_ids: Iterable[int], positions: Iterable[int]) -> None:
        self.parts.append(part)
        self.token_ids.extend(token_ids)
        self.positions.extend(positions)


class NewRowsAttention:
    """Attention of the new rows of tails, in place of `tree_kernels.attention.TreeAttention`, which takes a query for
    every row of a tail. Rows of earlier passes get a query of zeros and their output is dropped, which costs a little
    arithmetic and no projection, MLP or logits."""

    def __init__(self, attention: Any, places: Tensor, rows: int) -> None:
        """`places` [R] int64 of the new rows among the `rows` of all tails; `rows` for those that are not there."""
        self._attention, self._places, self._rows = attention, places, rows

    def run(
        self, plan: AttentionPlan, query: Tensor, keys: Tensor, values: Tensor, scale: float, variant: AttentionVariant
    ) -> Tensor:
        """See `TreeAttention.run`: [R, Hq, D] -> [R, Hq, Dv] of the new rows."""
        queries = query.new_zeros(self._rows + 1, *query.shape[1:]).index_copy_(0, self._places, query)
        output: Tensor = self._attention.run(plan, queries[: self._rows], keys, values, scale, variant)
        return output.index_select(0, self._places.clamp(max=self._rows - 1))


def pass_over(attention: TreeAttention, cache: DraftCache, parts: Sequence[TailPart]) -> PagedPass:
    """A pass over the new rows of these parts."""
    batch = AttentionBatch(
        query_starts=tuple(accumulate((part.rows for part in parts), initial=0)),
        prefix_lengths=tuple(part.prefix for part in parts),
        pages=tuple(tuple(part.pages) for part in parts),
        page_size=cache.page_size,
        parents=tuple(part.parents for part in parts),
    )
    fresh, device = fresh_rows(parts), attention.device
    slots = torch.tensor(fresh_slots(parts, cache), device=device)
    whole = len(fresh) == batch.rows
    own = attention if whole else NewRowsAttention(attention, torch.tensor(fresh, device=device), batch.rows)
    return PagedPass(own, attention.plan(batch), slots, cache)


def fresh_rows(parts: Sequence[TailPart]) -> list[int]:
    """Indices of the new rows among the rows of all tails."""
    ends = accumulate(part.rows for part in parts)
    return [row for part, end in zip(parts, ends, strict=True) for row in range(end - part.new, end)]


def fresh_slots(parts: Sequence[TailPart], cache: DraftCache) -> list[int]:
    """Cache slots of the new rows."""
    slots: list[int] = []
    for part in parts:
        slots += cache.slots(part.pages, part.prefix + part.rows - part.new, part.new)
    return slots
