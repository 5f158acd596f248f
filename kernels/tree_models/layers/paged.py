"""Attention of a pass's rows over the paged cache, as every kind of attention layer calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tree_kernels.attention import AttentionPlan
from tree_kernels.paging import write_kv


class PagedCache(Protocol):
    """Keys and values of each layer, [pages, page_size, heads, width]."""

    @property
    def keys(self) -> Sequence[Tensor]:
        """By layer."""

    @property
    def values(self) -> Sequence[Tensor]:
        """By layer."""


class PagedPass(Protocol):
    """What every layer of one pass needs."""

    # `tree_kernels.attention.TreeAttention`, or `tree_kernels.latent_attention.LatentAttention` where layers keep
    # latents.
    attention: Any
    plan: AttentionPlan
    slots: Tensor  # [R], where each row's key and value go
    cache: Any  # a `PagedCache`


# Not compiled: layers differ in their number, and not in the parts around it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, step: PagedPass) -> Tensor:
    """[R, Hq, Dv]: write keys and values [R, Hkv, D] of the rows into the cache, and attend with query [R, Hq, D]."""
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    write_kv(key, value, keys, values, step.slots)
    out: Tensor = step.attention.run(step.plan, query, keys, values, scaling)
    return out
