"""Tree attention for a drafter that adds a few rows at a time to a tree whose earlier rows are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.neural.paged_cache import PagedCache
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.kv_move import write_kv


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
        starts: list[int] = [0]
        slots: list[int] = []
        fresh: list[int] = []
        for part in parts:
            starts.append(starts[-1] + part.rows)
            slots += cache.slots(part.pages, part.prefix + part.rows - part.new, part.new)
            fresh += range(starts[-1] - part.new, starts[-1])
        self._attention, self._cache, self._rows = attention, cache, starts[-1]
        self._plan = attention.plan(
            AttentionBatch(
                query_starts=tuple(starts),
                prefix_lengths=tuple(part.prefix for part in parts),
                pages=tuple(tuple(part.pages) for part in parts),
                page_size=cache.page_size,
                parents=tuple(part.parents for part in parts),
            )
        )
        self._slots = torch.tensor(slots, device=attention.device)
        self._fresh = None if len(fresh) == self._rows else torch.tensor(fresh, device=attention.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [R, Hq, D], key and value [R, Hkv, D] of the R new rows -> [R, Hq, D]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        write_kv(key, value, keys, values, self._slots)
        scale = query.shape[-1] ** -0.5
        if self._fresh is None:
            return self._attention.run(self._plan, query, keys, values, scale)
        queries = query.new_zeros(self._rows, *query.shape[1:]).index_copy_(0, self._fresh, query)
        return self._attention.run(self._plan, queries, keys, values, scale).index_select(0, self._fresh)
