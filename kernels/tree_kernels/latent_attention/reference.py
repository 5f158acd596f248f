"""Latent attention in plain PyTorch: the expanded form, which is the definition, and the absorbed one in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.attention import AttentionBatch, AttentionPlan, attend, sequence_mask, sequence_slots
from tree_kernels.attention.reference import ReferenceAttention
from tree_kernels.latent_attention.projections import HeadProjections


def attend_expanded(
    plain: Tensor, rotary: Tensor, cache: Tensor, projections: HeadProjections, batch: AttentionBatch, scale: float
) -> Tensor:
    """Attention over keys and values that every head makes of the latents: the result that absorbing must equal,
    [R, H, V] in fp32, or fp64 if the queries are.

    Args:
        plain, rotary: [R, H, N] and [R, H, P] queries without and with rotary embedding.
        cache: [pages, page_size, L + P].
        scale: factor of the scores, usually (N + P) ** -0.5.
    """
    dtype = torch.float64 if plain.dtype == torch.float64 else torch.float32
    heads, latent = plain.shape[1], projections.keys.shape[2]
    query = torch.cat([plain, rotary], dim=-1).to(dtype)
    key_of, value_of = (part.to(dtype) for part in projections)
    output = query.new_empty(len(query), heads, value_of.shape[1])
    for b in range(batch.sequences):
        start, end = batch.query_starts[b], batch.query_starts[b + 1]
        vectors = cache.flatten(0, 1)[sequence_slots(batch, b).to(cache.device)].to(dtype)
        latents, rotary_keys = vectors[:, :latent], vectors[:, None, latent:].expand(-1, heads, -1)
        keys = torch.cat([torch.einsum("hnl,kl->khn", key_of, latents), rotary_keys], dim=-1)
        values = torch.einsum("hvl,kl->khv", value_of, latents)
        mask = sequence_mask(batch, b).to(cache.device)
        output[start:end] = attend(query[start:end], keys, values, mask, scale)
    return output


class ReferenceLatentAttention:
    """Tree attention's reference, with one key head: the vectors are its keys, their latents its values."""

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return AttentionPlan(batch)

    def run(self, plan: AttentionPlan, query: Tensor, cache: Tensor, latent: int, scale: float) -> Tensor:
        keys = cache.unsqueeze(2)
        return ReferenceAttention().run(plan, query, keys, keys[..., :latent], scale)
