"""Attention of transformers' own layers over our caches, for families that have no layers of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tree_kernels.attention import AttentionVariant
from tree_kernels.attention.variant import PLAIN
from tree_models.layers.paged import CacheShape, PagedPass, UncachedPass, attend


@dataclass(frozen=True, slots=True)
class _Scaling:
    scaling: float


@dataclass(slots=True)
class _ForeignLayer:
    """One of transformers' layers, as `layers.paged.attend` takes it."""

    cache_layer: int
    spec: _Scaling
    variant: AttentionVariant = PLAIN


def attend_foreign(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, step: PagedPass | UncachedPass
) -> Tensor:
    """What transformers' attention interface returns, [1, R, Hq, Dv], of what it gives: a layer, its query
    [1, Hq, R, D], and its key and value [1, Hkv, R, D] after rotary embedding."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    layer = _ForeignLayer(int(module.layer_idx), _Scaling(query.shape[-1] ** -0.5 if scaling is None else scaling))
    return attend(layer, query, key, value, step).unsqueeze(0)


class SeenShapes(UncachedPass):
    """What each layer would cache of a token, of a pass that attends to nothing. Configurations name heads and widths
    in several ways, and families multiply them: JetMoE by its experts, GPT-BigCode by whether its heads share one
    key."""

    def __init__(self) -> None:
        self.by_layer: dict[int, CacheShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        self.by_layer[layer] = CacheShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
