"""The description of what one rank computes: the whole decoder's with fewer heads, narrower MLPs and fewer tokens.

Every rank's share is alike, so all ranks run the same shapes. Where there are fewer key heads than ranks, several ranks
have the same one. Norms of hidden rows, routers and gates are whole on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from tree_models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseAndExpertsSpec,
    ExpertsSpec,
    FamilyRefused,
    GatedConvolutionSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    RecurrentSpec,
    StateSpaceSpec,
)


def rank_share(spec: DecoderSpec, ranks: int) -> DecoderSpec:
    """What each of so many ranks computes. Raises `FamilyRefused` where the decoder cannot be divided so."""
    layers = {layer: _layer(layer, spec.hidden_size, ranks) for layer in dict.fromkeys(spec.layers)}
    return replace(
        spec,
        # The last rank's rows are filled up with zeros.
        vocabulary_size=-(-spec.vocabulary_size // ranks),
        layers=tuple(layers[layer] for layer in spec.layers),
    )


def kv_heads_of(heads: int, rank: int, ranks: int) -> range:
    """Which of the whole decoder's key heads a rank has."""
    if heads % ranks == 0:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    return range(rank * heads // ranks, rank * heads // ranks + 1)


def _layer(layer: LayerSpec, hidden_size: int, ranks: int) -> LayerSpec:
    kind = layer.attention
    if kind is None or layer.mlp is None:
        raise FamilyRefused(f"{ranks} ranks: layers of one half are not divided")
    mixing = _recurrent(kind, hidden_size, ranks) if isinstance(kind, RecurrentSpec) else _attention(kind, ranks)
    return replace(layer, attention=mixing, mlp=_mlp(layer.mlp, ranks))


def _recurrent(spec: RecurrentSpec, hidden_size: int, ranks: int) -> RecurrentSpec:
    if isinstance(spec, StateSpaceSpec):
        raise FamilyRefused(f"{ranks} ranks: outputs of Mamba2 are normed over all heads together")
    if isinstance(spec, GatedConvolutionSpec):
        return replace(spec, width=_divided(hidden_size, ranks, "numbers of a convolution"))
    # Heads of values stay with their head of keys.
    keys = _divided(spec.key_heads, ranks, "key heads of a delta net")
    return replace(spec, key_heads=keys, heads=spec.heads // ranks)


def _attention(spec: AttentionSpec | LatentSpec, ranks: int) -> AttentionSpec | LatentSpec:
    heads = _divided(spec.heads, ranks, "attention heads")
    if isinstance(spec, LatentSpec):
        return replace(spec, heads=heads)
    if spec.keys_are_values or spec.keys_of is not None:
        raise FamilyRefused(f"{ranks} ranks: layers that share keys are not divided")
    if spec.head_norm is not None and spec.head_norm.scope == "all_heads":
        raise FamilyRefused(f"{ranks} ranks: queries are normed over all heads together")
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise FamilyRefused(f"{ranks} ranks: {spec.kv_heads} key heads can neither be divided nor repeated")
    return replace(spec, heads=heads, kv_heads=len(kv_heads_of(spec.kv_heads, 0, ranks)))


def _mlp(spec: MLPSpec | ExpertsSpec | DenseAndExpertsSpec, ranks: int) -> MLPSpec | ExpertsSpec:
    if isinstance(spec, DenseAndExpertsSpec):
        raise FamilyRefused(f"{ranks} ranks: experts beside an MLP are not divided")
    if isinstance(spec, MLPSpec):
        return replace(spec, width=_divided(spec.width, ranks, "numbers of an MLP"))
    if spec.latent:
        raise FamilyRefused(f"{ranks} ranks: experts of a latent are not divided")
    shared = spec.shared
    if shared is not None:
        shared = replace(shared, width=_divided(shared.width, ranks, "numbers of the shared expert"))
    return replace(spec, width=_divided(spec.width, ranks, "numbers of an expert"), shared=shared)


def _divided(whole: int, ranks: int, what: str) -> int:
    if whole % ranks:
        raise FamilyRefused(f"{ranks} ranks: {whole} {what} cannot be divided by them")
    return whole // ranks
