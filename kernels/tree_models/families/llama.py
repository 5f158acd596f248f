"""Llama, and the families that differ from it in arguments only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tree_models.families.common import (
    Description,
    attention,
    counted,
    decoder,
    head_width,
    layer,
    mlp,
    rms_norm,
)
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import MLPSpec, PositionScale


def llama(config: Any, feeding: MLPSpec | None = None, **attending: Any) -> Description:
    """Llama 1 to 3.x, with another MLP or other attention if they are given."""
    norm, feeding = rms_norm(config), feeding or mlp(config)
    layers = [layer(attention(config, index, **attending), feeding, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())


def mistral(config: Any) -> Description:
    """Mistral and Ministral: no biases."""
    return llama(config, mlp(config, bias=False), windows=True, qkv_bias=False, out_bias=False)


def ministral3(config: Any) -> Description:
    """Ministral 3: queries grow with their position."""
    rope = config.rope_parameters
    beta = rope.get("llama_4_scaling_beta")
    scale = PositionScale(float(beta), int(rope["original_max_position_embeddings"])) if beta else None
    turning = replace(rotary(config, head_width(config)), query_scale=scale)
    return llama(config, mlp(config, bias=False), windows=True, qkv_bias=False, out_bias=False, rotary=turning)


def smollm3(config: Any) -> Description:
    """SmolLM3: every fourth layer embeds no positions."""
    norm, feeding = rms_norm(config), mlp(config)
    layers = []
    for index in counted(config):
        changes: dict[str, Any] = {} if config.no_rope_layers[index] else {"rotary": None}
        layers.append(layer(attention(config, index, windows=True, **changes), feeding, norm))
    return Description(decoder(config, layers, norm), WeightNames())


def seed_oss(config: Any) -> Description:
    """Seed-OSS: the last product of attention has a bias of its own."""
    return llama(config, out_bias=bool(config.attention_out_bias))


def arcee(config: Any) -> Description:
    """Arcee: an MLP without a gate."""
    return llama(config, mlp(config, gated=False))
