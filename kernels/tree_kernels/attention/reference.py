"""Tree attention in plain fp32 PyTorch: the definition that every backend is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan
from tree_kernels.attention.tree_mask import ancestor_mask
from tree_kernels.attention.variant import PLAIN, AttentionVariant
from tree_kernels.window_frames import WindowFrames


class ReferenceAttention:
    """Gathers every key, builds the whole mask, computes in fp32 (fp64 if the inputs are)."""

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return AttentionPlan(batch)

    def plan_in_frames(self, plan: AttentionPlan, frames: WindowFrames) -> AttentionPlan:
        return AttentionPlan(plan.batch.in_frames(frames))

    def run(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        batch = plan.batch
        output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
        for b in range(batch.sequences):
            start, end = batch.query_starts[b], batch.query_starts[b + 1]
            slots = sequence_slots(batch, b).to(query.device)
            mask = sequence_mask(batch, b, variant).to(query.device)
            keys, values = key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots]
            places = key_positions(batch, b).to(query.device)
            output[start:end] = attend(query[start:end], keys, values, mask, scale, variant, places)
        return output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    variant: AttentionVariant = PLAIN,
    places: Tensor | None = None,
) -> Tensor:
    """softmax(scale * query @ key^T, masked) @ value: [R, Hq, Dv] in fp32, or fp64 if query is.

    Keys that no row may attend to may hold anything, NaN too.

    Args:
        query: [R, Hq, D]; query head h reads key head h // (Hq / Hkv).
        key, value: [L, Hkv, D] and [L, Hkv, Dv].
        mask: [R, L] bool, true where the row may attend; at least one true per row.
        scale: factor of the scores.
        variant: of which the cap, the sinks and the slopes are applied here; a window is part of the mask.
        places: [L] positions of the keys, of which the rows' are the last; where there are slopes.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // key.shape[1]
    keys = key.to(dtype).repeat_interleave(group, dim=1)
    # 0 * NaN is NaN.
    unseen = ~mask.any(dim=0)[:, None, None]
    values = value.to(dtype).masked_fill(unseen, 0.0).repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,lhd->hrl", query.to(dtype), keys) * scale
    if variant.score_cap is not None:
        scores = variant.score_cap * (scores / variant.score_cap).tanh()
    if variant.slopes is not None:
        assert places is not None, "slopes go by position"
        own = places[len(places) - len(query) :, None]
        scores = scores - variant.slopes.to(dtype)[:, None, None] * (own - places)
    scores = scores.masked_fill(~mask, float("-inf"))
    if variant.sinks is None:
        return torch.einsum("hrl,lhd->rhd", scores.softmax(dim=-1), values)
    sinks = variant.sinks.to(dtype)[:, None, None].expand(-1, len(query), 1)
    probs = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)
    return torch.einsum("hrl,lhd->rhd", probs[..., :-1], values)


def sequence_slots(batch: AttentionBatch, b: int) -> Tensor:
    """[L] int64: the cache slot (page * page_size + offset) of every key of sequence b, tail included."""
    keys = torch.arange(batch.key_counts[b])
    pages = torch.tensor(batch.pages[b], dtype=torch.int64)
    return pages[keys // batch.page_size] * batch.page_size + keys % batch.page_size


def sequence_mask(batch: AttentionBatch, b: int, variant: AttentionVariant = PLAIN) -> Tensor:
    """[R_b, L] bool: the whole prefix, then the ancestors within the tail; of both what the window holds."""
    rows, prefix = batch.row_counts[b], batch.prefix_lengths[b]
    mask = torch.ones(rows, prefix, dtype=torch.bool)
    if not batch.queries_only:
        mask = torch.cat([mask, ancestor_mask(batch.parents[b], rows)], dim=1)
    window = variant.window
    if window is None:
        return mask
    places = key_positions(batch, b)
    own = torch.full((rows,), prefix) if batch.queries_only else places[prefix:]
    first = own - own % window if variant.chunked else own - window + 1
    return mask & (places >= first[:, None])


def key_positions(batch: AttentionBatch, b: int) -> Tensor:
    """[L] int64 of every key of sequence b: the prefix's in order, then those of the tail by their depths."""
    prefix = batch.prefix_lengths[b]
    if batch.queries_only:
        return torch.arange(prefix)
    depths = ancestor_mask(batch.parents[b], batch.row_counts[b]).sum(dim=1) - 1
    return torch.cat([torch.arange(prefix), prefix + depths])


def combined(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """[R, Hq, Dv] of `dtype`: what rows have of disjoint sets of keys, taken together. Each part is the softmax over
    its keys [R, Hq, Dv] fp32, and the logarithm of its sum, in base 2: [R, Hq] fp32, -inf where a row has none."""
    values = torch.stack([values for values, _ in parts])
    lse = torch.stack([lse for _, lse in parts])
    weights = torch.softmax(lse * math.log(2), 0)[..., None]
    return (weights * values.where(weights > 0, 0.0)).sum(0).to(dtype)
