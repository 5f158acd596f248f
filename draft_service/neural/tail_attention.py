"""Tree attention for a drafter that adds rows to a tree whose earlier rows are already in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from draft_service.neural.paged_cache import DraftCache
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.paging import write_kv

# (layer, query [.., Hq, D], key [.., Hkv, D], value [.., Hkv, D]) -> [.., Hq, D], after rotary embedding: stores keys
# and values, and attends.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


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


class TailAttention:
    """Stores the new rows' keys and values, and attends. One object for one pass, called once per layer.

    `TreeAttention` takes a query for every row of a tail. Rows of earlier passes get a query of zeros and their output
    is dropped, which costs a little arithmetic and no projection, MLP or logits.
    """

    def __init__(self, attention: TreeAttention, cache: DraftCache, parts: Sequence[TailPart]) -> None:
        batch = AttentionBatch(
            query_starts=tuple(accumulate((part.rows for part in parts), initial=0)),
            prefix_lengths=tuple(part.prefix for part in parts),
            pages=tuple(tuple(part.pages) for part in parts),
            page_size=cache.page_size,
            parents=tuple(part.parents for part in parts),
        )
        fresh = fresh_rows(parts)
        self._attention, self._cache, self._rows = attention, cache, batch.rows
        self._plan = attention.plan(batch)
        self._slots = torch.tensor(fresh_slots(parts, cache), device=attention.device)
        self._fresh = None if len(fresh) == batch.rows else torch.tensor(fresh, device=attention.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [R, Hq, D], key and value [R, Hkv, D] of the R new rows -> [R, Hq, D]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        write_kv(key, value, keys, values, self._slots)
        scale = query.shape[-1] ** -0.5
        if self._fresh is None:
            return self._attention.run(self._plan, query, keys, values, scale)
        queries = query.new_zeros(self._rows, *query.shape[1:]).index_copy_(0, self._fresh, query)
        return self._attention.run(self._plan, queries, keys, values, scale).index_select(0, self._fresh)


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
