"""Tree attention for a drafter that adds a few rows at a time to a tree whose earlier rows are in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.neural.paged_cache import PagedCache
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.paging import write_kv

# (layer, query [.., Hq, D], key [.., Hkv, D], value [.., Hkv, D]) -> [.., Hq, D]; rotary positions are applied. Stores
# keys and values, and attends.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TailPart:
    """One sequence's part of a pass.

    Attributes:
        pages: of the sequence, for prefix and tail.
        prefix: keys that every row sees.
        rows: of the tail; they sit in the slots after the prefix.
        new: how many rows, at the end of the tail, are computed now. The keys of the others are in the cache.
        parents: [rows] of the tail; None for a causal tail.
    """

    pages: Sequence[int]
    prefix: int
    rows: int
    new: int
    parents: tuple[int, ...] | None = None


class TailAttention:
    """Stores the new rows' keys and values, and attends; one object for one pass, called once per layer.

    `TreeAttention` takes a query for every row of a tail. Rows of earlier passes get a query of zeros, and what comes
    out for them is dropped: it costs a little arithmetic, and no projection, MLP or logits of theirs.
    """

    def __init__(self, attention: TreeAttention, cache: PagedCache, parts: Sequence[TailPart]) -> None:
        batch, fresh = attention_batch(parts, cache.page_size), fresh_rows(parts)
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


def attention_batch(parts: Sequence[TailPart], page_size: int) -> AttentionBatch:
    """What a pass asks of attention."""
    starts: list[int] = [0]
    for part in parts:
        starts.append(starts[-1] + part.rows)
    return AttentionBatch(
        query_starts=tuple(starts),
        prefix_lengths=tuple(part.prefix for part in parts),
        pages=tuple(tuple(part.pages) for part in parts),
        page_size=page_size,
        parents=tuple(part.parents for part in parts),
    )


def fresh_rows(parts: Sequence[TailPart]) -> list[int]:
    """Places of the new rows among the rows of all tails."""
    rows: list[int] = []
    end = 0
    for part in parts:
        end += part.rows
        rows += range(end - part.new, end)
    return rows


def fresh_slots(parts: Sequence[TailPart], cache: PagedCache) -> list[int]:
    """Cache slots of the new rows."""
    slots: list[int] = []
    for part in parts:
        slots += cache.slots(part.pages, part.prefix + part.rows - part.new, part.new)
    return slots
