"""Decoders by the plan of GPT: LayerNorms and MLPs without, or with, gates. ModernBERT's decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tree_models.families.common import Description, attention, counted, decoder, layer, mlp, named_activation
from tree_models.names import WeightNames
from tree_models.spec import HeadTransformSpec, NormSpec

_MODERNBERT = WeightNames(
    embedding="model.embeddings.tok_embeddings",
    embedding_norm="model.embeddings.norm",
    final_norm="model.final_norm",
    head="decoder",
    before_attention="attn_norm",
    before_mlp="mlp_norm",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
)


def modernbert(config: Any) -> Description:
    """ModernBERT's decoder: embedded rows are normed, so the first layer does not; the head reads transformed rows."""
    norm = NormSpec("layer", float(config.norm_eps), bias=bool(config.norm_bias))
    heads = int(config.num_attention_heads)
    layers = [
        layer(attention(config, index, windows=True, kv_heads=heads), mlp(config), norm) for index in counted(config)
    ]
    layers[0] = replace(layers[0], before_attention=None)
    transform = HeadTransformSpec(named_activation(config.classifier_activation), norm, bool(config.classifier_bias))
    ends = {"embedding_norm": norm, "head_transform": transform, "head_bias": bool(config.decoder_bias)}
    return Description(decoder(config, layers, norm, **ends), _MODERNBERT)
