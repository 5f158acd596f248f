"""Attention of a pass's rows over the paged cache, as every kind of attention layer calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tree_kernels.attention import AttentionPlan, AttentionVariant
from tree_kernels.paging import write_kv


class PagedCache(Protocol):
    """Keys and values of each layer that has some, [pages, page_size, heads, width]."""

    @property
    def keys(self) -> Sequence[Tensor]:
        """Of each layer, [pages, page_size, heads, width]."""

    @property
    def values(self) -> Sequence[Tensor]:
        """Of each layer, [pages, page_size, heads, width]."""


class PagedPass(Protocol):
    """What every layer of one pass needs."""

    # `tree_kernels.attention.TreeAttention`, or `tree_kernels.latent_attention.LatentAttention` where layers keep
    # latents.
    attention: Any
    plan: AttentionPlan
    slots: Tensor  # [R], where each row's key and value go
    cache: Any  # a `PagedCache`
    recurrent: Any  # a `tree_kernels.recurrence.RecurrentPass` where layers keep states, else None
    windowed: Any  # the `PagedPass` of layers with a window, where those keep keys and values elsewhere; else None


class AttendingLayer(Protocol):
    """Whose keys and values they are."""

    cache_layer: int  # among those with keys and values
    variant: AttentionVariant

    @property
    def spec(self) -> Any:
        """Has `scaling`."""


def pass_of(variant: AttentionVariant, step: PagedPass) -> PagedPass:
    """The pass as a layer of this kind has it."""
    if variant.window is None or step.windowed is None:
        return step
    within: PagedPass = step.windowed
    return within


# Not compiled: layers differ in their number, which is read here alone, and not in the parts around it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(owner: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, step: PagedPass) -> Tensor:
    """[R, Hq, Dv]: write keys and values [R, Hkv, D] of the rows into the cache, and attend with query [R, Hq, D]."""
    step = pass_of(owner.variant, step)
    keys, values = step.cache.keys[owner.cache_layer], step.cache.values[owner.cache_layer]
    write_kv(key, value, keys, values, step.slots)
    out: Tensor = step.attention.run(step.plan, query, keys, values, owner.spec.scaling, owner.variant)
    return out
