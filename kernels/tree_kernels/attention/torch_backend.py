"""Tree attention through PyTorch's scaled_dot_product_attention, one call per sequence: the fast path on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan
from tree_kernels.attention.reference import key_positions, sequence_mask
from tree_kernels.attention.variant import PLAIN, AttentionVariant
from tree_kernels.window_frames import WindowFrames

# Scores that are held at a time where PyTorch's operation does not take the variant: 64 MB in fp32.
MOST_SCORES = 1 << 24


@dataclass
class SequencePlan:
    """One sequence's share of a plan, for all layers of one window."""

    start: int
    end: int
    keys: int  # from the first that a row sees
    first_slot: int
    page_index: Tensor | None  # None where its pages lie in one run, so that keys are a view; else they are gathered
    skipped: int  # keys of the first page before the first that a row sees
    # [rows, keys]; None where every row sees every key, or where the tail is all there is and causal.
    mask: Tensor | None
    causal: bool
    # The mask as SDPA takes it: 0 or -inf in the query's dtype. Made by the first layer of a step.
    bias: Tensor | None = None
    number: int = 0  # in the batch
    places: Tensor | None = None  # [keys] their positions. Made by the first layer with slopes.


@dataclass
class TorchPlan(AttentionPlan):
    """What each sequence that has rows reads, in the order of the batch."""

    sequences: list[SequencePlan]
    # Made by the first layer of a window, or of chunks.
    windowed: dict[tuple[int, bool], list[SequencePlan]] = field(default_factory=dict)


class TorchPlanner:
    """Plans views instead of gathers where a sequence's pages are consecutive; no mask for a single row."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return TorchPlan(batch, self._planned(batch, PLAIN))

    def plan_in_frames(self, plan: AttentionPlan, frames: WindowFrames) -> AttentionPlan:
        # What sees all keys is never asked for.
        return TorchPlan(plan.batch.in_frames(frames), [])

    def _planned(self, batch: AttentionBatch, variant: AttentionVariant) -> list[SequencePlan]:
        return [self._plan_one(batch, b, variant) for b in range(batch.sequences) if batch.row_counts[b]]

    def _plan_one(self, batch: AttentionBatch, b: int, variant: AttentionVariant) -> SequencePlan:
        prefix, rows, size = batch.prefix_lengths[b], batch.row_counts[b], batch.page_size
        # No row stands before the root.
        first, end = variant.first_key(prefix), batch.key_counts[b]
        # Pages beyond the last key are reserved, not read.
        pages = batch.pages[b][first // size : -(-end // size)]
        # Pages may be any sequence: an array equals no range.
        consecutive = list(pages) == list(range(pages[0], pages[0] + len(pages)))
        narrow = variant.window is not None and variant.window < rows
        causal = rows > 1 and prefix == 0 and batch.parents[b] is None and not narrow
        mask = None
        # Rows without keys all see the same ones.
        if rows > 1 and not causal and not batch.queries_only:
            mask = sequence_mask(batch, b, variant)[:, first:].to(self._device)
        return SequencePlan(
            start=batch.query_starts[b],
            end=batch.query_starts[b + 1],
            keys=end - first,
            first_slot=pages[0] * size + first % size,
            page_index=None if consecutive else torch.tensor(pages, device=self._device),
            skipped=first % size,
            mask=mask,
            causal=causal,
            number=b,
        )


class TorchAttention(TorchPlanner):
    """See `tree_kernels.attention.TreeAttention`."""

    def run(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        assert isinstance(plan, TorchPlan)
        sequences = self._sequences(plan, variant)
        if len(sequences) == 1:
            return _run_one(sequences[0], query, key_cache, value_cache, scale, variant)
        output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
        for one in sequences:
            rows = query[one.start : one.end]
            output[one.start : one.end] = _run_one(one, rows, key_cache, value_cache, scale, variant)
        return output

    def _sequences(self, plan: TorchPlan, variant: AttentionVariant) -> list[SequencePlan]:
        sequences = plan.sequences
        if variant.window is not None:
            kind = variant.window, variant.chunked
            if kind not in plan.windowed:
                plan.windowed[kind] = self._planned(plan.batch, variant)
            sequences = plan.windowed[kind]
        for one in sequences if variant.slopes is not None else ():
            if one.places is None:
                one.places = key_positions(plan.batch, one.number)[-one.keys :].to(self._device)
        return sequences


def _run_one(
    one: SequencePlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, variant: AttentionVariant
) -> Tensor:
    """[rows, Hq, Dv] of one sequence."""
    keys, values = keys_of(one, key_cache), keys_of(one, value_cache)
    if variant.score_cap is not None or variant.sinks is not None or variant.slopes is not None:
        return _by_scores(one, query, keys[0], values[0], scale, variant)
    if one.mask is not None and (one.bias is None or one.bias.dtype != query.dtype):
        one.bias = torch.zeros(one.mask.shape, dtype=query.dtype, device=query.device)
        one.bias.masked_fill_(~one.mask, float("-inf"))
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


def _by_scores(
    one: SequencePlan, query: Tensor, keys: Tensor, values: Tensor, scale: float, variant: AttentionVariant
) -> Tensor:
    """[rows, Hq, Dv] of keys and values [Hkv, keys, width], with a cap, sinks or slopes, as PyTorch's has none."""
    rows, heads, width = query.shape
    kv_heads, count, _ = keys.shape
    group, wide = heads // kv_heads, torch.promote_types(query.dtype, torch.float32)
    keys, values = keys.to(wide).transpose(1, 2), values.to(wide)
    mask = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril_() if one.causal else one.mask
    output = query.new_empty(rows, heads, values.shape[-1])
    each = max(1, MOST_SCORES // (heads * count))
    for first in range(0, rows, each):
        block = query[first : first + each]
        packed = block.to(wide).view(-1, kv_heads, group, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
        scores = (packed @ keys).view(heads, len(block), count) * scale
        if variant.score_cap is not None:
            scores = variant.score_cap * (scores / variant.score_cap).tanh_()
        if variant.slopes is not None and one.places is not None:
            distances = one.places[count - rows :][first : first + each, None] - one.places
            scores -= variant.slopes.to(wide)[:, None, None] * distances
        if mask is not None:
            scores = scores.masked_fill_(~mask[first : first + each], float("-inf"))
        if variant.sinks is not None:
            scores = torch.cat([scores, variant.sinks.to(wide)[:, None, None].expand(-1, len(block), 1)], dim=-1)
        probs = scores.softmax(dim=-1)[..., :count].reshape(kv_heads, -1, count)
        output[first : first + each] = (probs @ values).view(heads, len(block), -1).transpose(0, 1)
    return output


def keys_of(one: SequencePlan, cache: Tensor) -> Tensor:
    """[1, Hkv, keys, width] of one sequence, a view where its pages allow."""
    if one.page_index is None:
        rows = cache.flatten(0, 1)[one.first_slot : one.first_slot + one.keys]
    else:
        rows = cache.index_select(0, one.page_index).flatten(0, 1)[one.skipped : one.skipped + one.keys]
    return rows.transpose(0, 1)[None]
