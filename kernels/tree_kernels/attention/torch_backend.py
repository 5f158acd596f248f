"""Tree attention through PyTorch's scaled_dot_product_attention, one call per sequence: the fast path on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan
from tree_kernels.attention.reference import sequence_mask


@dataclass
class SequencePlan:
    """One sequence's share of a plan."""

    start: int
    end: int
    keys: int
    first_slot: int
    page_index: Tensor | None  # None where its pages lie in one run, so that keys are a view; else they are gathered
    # [rows, keys]; None where every row sees every key, or where the tail is all there is and causal.
    mask: Tensor | None
    causal: bool
    # The mask as SDPA takes it: 0 or -inf in the query's dtype. Made by the first layer of a step.
    bias: Tensor | None = None


@dataclass
class TorchPlan(AttentionPlan):
    """What each sequence that has rows reads, in the order of the batch."""

    sequences: list[SequencePlan]


class TorchPlanner:
    """Plans views instead of gathers where a sequence's pages are consecutive; no mask for a single row."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return TorchPlan(batch, [self._plan_one(batch, b) for b in range(batch.sequences) if batch.row_counts[b]])

    def _plan_one(self, batch: AttentionBatch, b: int) -> SequencePlan:
        prefix, rows = batch.prefix_lengths[b], batch.row_counts[b]
        keys = prefix + rows
        # Pages beyond the last key are reserved, not read.
        pages = batch.pages[b][: -(-keys // batch.page_size)]
        # Pages may be any sequence: an array equals no range.
        consecutive = list(pages) == list(range(pages[0], pages[0] + len(pages)))
        causal = rows > 1 and prefix == 0 and batch.parents[b] is None
        masked = rows > 1 and not causal
        return SequencePlan(
            start=batch.query_starts[b],
            end=batch.query_starts[b + 1],
            keys=keys,
            first_slot=pages[0] * batch.page_size,
            page_index=None if consecutive else torch.tensor(pages, device=self._device),
            mask=sequence_mask(batch, b).to(self._device) if masked else None,
            causal=causal,
        )


class TorchAttention(TorchPlanner):
    """See `tree_kernels.attention.TreeAttention`."""

    def run(self, plan: AttentionPlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        assert isinstance(plan, TorchPlan)
        if len(plan.sequences) == 1:
            return self._run_one(plan.sequences[0], query, key_cache, value_cache, scale)
        output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
        for one in plan.sequences:
            rows = query[one.start : one.end]
            output[one.start : one.end] = self._run_one(one, rows, key_cache, value_cache, scale)
        return output

    def _run_one(
        self, one: SequencePlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
    ) -> Tensor:
        if one.mask is not None and (one.bias is None or one.bias.dtype != query.dtype):
            one.bias = torch.zeros(one.mask.shape, dtype=query.dtype, device=query.device)
            one.bias.masked_fill_(~one.mask, float("-inf"))
        keys, values = keys_of(one, key_cache), keys_of(one, value_cache)
        dtype = query.dtype
        if len(query) == 1 and dtype.itemsize == 2:
            # So PyTorch takes a quarter to a third of the time for one row in bfloat16, from 1,000 keys on (0.6 of it
            # at 64; two EPYC cores). 8 rows take as long either way.
            query, keys, values = query.float(), keys.float(), values.float()
        heads_first, mask = query.transpose(0, 1)[None], one.bias
        output = functional.scaled_dot_product_attention(
            heads_first, keys, values, attn_mask=mask, is_causal=one.causal, scale=scale, enable_gqa=True
        )
        return output[0].transpose(0, 1).to(dtype)


def keys_of(one: SequencePlan, cache: Tensor) -> Tensor:
    """[1, Hkv, keys, width] of one sequence, a view where its pages allow."""
    if one.page_index is None:
        rows = cache.flatten(0, 1)[one.first_slot : one.first_slot + one.keys]
    else:
        rows = cache.index_select(0, one.page_index).flatten(0, 1)[: one.keys]
    return rows.transpose(0, 1)[None]
