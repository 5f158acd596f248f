"""Attention of a level in PyTorch, by the definition of tree attention: what the launch is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.attention import PLAIN, AttentionVariant, ancestor_mask, attend
from tree_kernels.level_attention.types import TailLevel


def attend_level(
    level: TailLevel,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> Tensor:
    """What `LevelAttention.run` computes, a sequence after the other."""
    rows, page_size = level.end - level.first, key_cache.shape[1]
    output = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    for b, prefix in enumerate(level.prefix_lengths.tolist()):
        if level.query_starts[b] == level.query_starts[b + 1]:
            continue
        keys = torch.arange(prefix + level.end, device=query.device)
        slots = level.page_table[level.page_starts[b] + keys // page_size] * page_size + keys % page_size
        seen = ancestor_mask(level.parents[b, : level.end].tolist(), level.end)[level.first :].to(query.device)
        mask = torch.cat([seen.new_ones(rows, prefix), seen], dim=1)
        own = slice(b * rows, (b + 1) * rows)
        held, values = (cache.flatten(0, 1)[slots] for cache in (key_cache, value_cache))
        output[own] = attend(query[own], held, values, mask, scale, variant).to(query.dtype)
    return output
