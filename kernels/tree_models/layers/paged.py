"""Attention of a pass's rows, as every kind of attention layer calls it: over the paged cache, or without a cache; and
what of a model's layers the cache has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard

from torch import Tensor

from tree_kernels.attention import AttentionPlan, AttentionVariant
from tree_kernels.compiled_layers import uncompiled
from tree_kernels.paging import write_kv
from tree_models.spec import AttentionSpec, LatentSpec, LayerSpec, RecurrentSpec


@dataclass(eq=False)
class PagedPass:
    """What every layer of one pass needs. Not frozen: the compiler looks into frozen dataclasses, and whatever it read
    here it would compile layers and passes separately for."""

    # `tree_kernels.attention.TreeAttention`, or `tree_kernels.latent_attention.LatentAttention` where layers keep
    # latents.
    attention: Any
    plan: AttentionPlan
    slots: Tensor  # [R], where each row's key and value go
    cache: Any  # its `keys` and `values`: of each layer that has some, [pages, page_size, heads, width]
    recurrent: Any = None  # a `tree_kernels.recurrence.RecurrentPass` where layers keep states
    windowed: PagedPass | None = None  # the same for layers with a window, where those keep keys and values elsewhere
    # [R, Hq, D], where a layer may leave its queries, so that `attention` finds them in place.
    queries: Tensor | None = None


class UncachedPass:
    """A pass whose keys and values no cache holds, as in training."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[R, Hq, Dv]: attention of query [R, Hq, D] to key and value [R, Hkv, D] of the rows of one layer, counted
        among those with keys and values."""
        raise NotImplementedError


class AttendingLayer(Protocol):
    """Whose keys and values they are."""

    cache_layer: int  # among those with keys and values
    variant: AttentionVariant

    @property
    def spec(self) -> Any:
        """Has `scaling`."""


def pass_of(variant: AttentionVariant, step: PagedPass) -> PagedPass:
    """The pass as a layer of this kind has it."""
    return step if variant.window is None or step.windowed is None else step.windowed


def attend(owner: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, step: PagedPass | UncachedPass) -> Tensor:
    """[R, Hq, Dv]: attention of the rows' query [R, Hq, D], with their key and value [R, Hkv, D]."""
    if isinstance(step, UncachedPass):
        attended: Tensor = step.attend(owner.cache_layer, query, key, value, owner.spec.scaling)
        return attended
    out: Tensor = _attend_cached(owner, query, key, value, step)
    return out


# Not compiled: layers differ in their number, which is read here alone, and not in the parts around it.
@uncompiled
def _attend_cached(owner: AttendingLayer, query: Tensor, key: Tensor, value: Tensor, step: PagedPass) -> Tensor:
    """Write keys and values of the rows into the cache, if there are some of their own, and attend."""
    cache_keys(owner, key, value, step)
    step = pass_of(owner.variant, step)
    keys, values = step.cache.keys[owner.cache_layer], step.cache.values[owner.cache_layer]
    out: Tensor = step.attention.run(step.plan, query, keys, values, owner.spec.scaling, owner.variant)
    return out


@uncompiled
def cache_keys(owner: AttendingLayer, key: Tensor, value: Tensor, step: PagedPass) -> None:
    """Write the rows' key [R, Hkv, D] and value [R, Hkv, Dv] into the cache, if they are the layer's own."""
    step = pass_of(owner.variant, step)
    if key.shape[1]:
        write_kv(key, value, step.cache.keys[owner.cache_layer], step.cache.values[owner.cache_layer], step.slots)


class CacheShape(NamedTuple):
    """What one layer caches of one token. A latent is key and value in one, and has no separate value."""

    heads: int
    key_width: int
    value_width: int


def expanded_shape(spec: AttentionSpec | LatentSpec) -> CacheShape:
    """What a layer caches as keys and values of heads, or what the layer does whose they are."""
    if isinstance(spec, AttentionSpec):
        return CacheShape(spec.kv_heads, spec.width_of_keys, spec.width_of_cached_values)
    return CacheShape(spec.heads, spec.query_width, spec.value)


def keeps_own(spec: AttentionSpec | LatentSpec | RecurrentSpec | None) -> TypeGuard[AttentionSpec | LatentSpec]:
    """Whether a layer keeps keys and values, or latents, of its own."""
    return isinstance(spec, LatentSpec) or (isinstance(spec, AttentionSpec) and spec.has_keys)


def kept_places(layers: Sequence[LayerSpec]) -> list[tuple[int, int]]:
    """The place of each layer's keys and values among those that are kept, or of its state among states, and of the
    state beside its attention, or of it; layers with neither count among neither, nor do those that read another
    model's."""
    places: list[tuple[int, int]] = []
    counts = {True: 0, False: 0}
    for layer in layers:
        spec = layer.attention
        kind = isinstance(spec, RecurrentSpec)
        if isinstance(spec, AttentionSpec) and spec.keys_of is not None:
            own = places[spec.keys_of][0]
        elif isinstance(spec, AttentionSpec) and spec.keys_in is not None:
            own = spec.keys_in
        else:
            own = counts[kind]
            counts[kind] += spec is not None
        places.append((own, counts[True]))
        counts[True] += layer.beside is not None or (isinstance(spec, AttentionSpec) and bool(spec.compressed))
    return places
