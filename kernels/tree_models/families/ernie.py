"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import (
    Description,
    activation,
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
from tree_models.spec import AttentionSpec, ExpertsSpec, RouterSpec


def ernie4_5(config: Any) -> Description:
    """ERNIE 4.5, dense."""
    norm, feeding = rms_norm(config), mlp(config, bias=bool(config.use_bias))
    layers = [layer(_attention(config, index), feeding, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())


def ernie4_5_moe(config: Any) -> Description:
    """ERNIE 4.5 with experts: softmax scores, a bias for the choice."""
    norm, bias = rms_norm(config), bool(config.use_bias)
    dense, width = mlp(config, bias=bias), int(config.moe_intermediate_size)
    shared = int(config.moe_num_shared_experts)
    experts = ExpertsSpec(
        count=int(config.moe_num_experts),
        top_k=int(config.moe_k),
        width=width,
        router=RouterSpec(correction=True, clamped_sum=float(config.moe_norm_min), wide=True, rounded=True),
        activation=activation(config),
        shared=mlp(config, width * shared, bias=bias) if shared else None,
    )
    layers = []
    for index in counted(config):
        within = config.moe_layer_start_index <= index <= config.moe_layer_end_index
        sparse = within and (index + 1) % config.moe_layer_interval == 0
        layers.append(layer(_attention(config, index), experts if sparse else dense, norm))
    names = WeightNames(correction="mlp.moe_statics.e_score_correction_bias", correction_dimensions=2)
    return Description(decoder(config, layers, norm), names)


def _attention(config: Any, index: int) -> AttentionSpec:
    turning, bias = rotary(config, head_width(config), interleaved=True), bool(config.use_bias)
    return attention(config, index, rotary=turning, qkv_bias=bias, out_bias=bias)
