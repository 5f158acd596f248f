"""GLM-4 and GLM-4-0414, dense; GLM-4.5 to 4.7, with experts."""

from __future__ import annotations

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
from tree_models.families.deepseek import sigmoid_experts
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import HeadNormSpec


def glm(config: Any, **norms: Any) -> Description:
    """GLM-4: neighbouring pairs of a part of each head are rotated, gate and up are one tensor."""
    norm, turning = rms_norm(config), rotary(config, head_width(config), interleaved=True)
    feeding = mlp(config, bias=False)
    layers = [
        layer(attention(config, index, rotary=turning, out_bias=False), feeding, norm, **norms)
        for index in counted(config)
    ]
    names: dict[str, Any] = (
        {"after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"} if norms else {}
    )
    return Description(decoder(config, layers, norm), WeightNames(gate_up=("mlp.gate_up_proj",), **names))


def glm4(config: Any) -> Description:
    """GLM-4-0414: norms before and after each half."""
    norm = rms_norm(config)
    return glm(config, after_attention=norm, after_mlp=norm)


def glm4_moe(config: Any) -> Description:
    """GLM-4.5 to 4.7."""
    norm = rms_norm(config)
    heads = HeadNormSpec(norm) if config.use_qk_norm else None
    experts, dense = sigmoid_experts(config), mlp(config, bias=False)
    layers = [
        layer(
            attention(config, index, head_norm=heads, out_bias=False),
            experts if index >= config.first_k_dense_replace else dense,
            norm,
        )
        for index in counted(config)
    ]
    return Description(decoder(config, layers, norm), WeightNames())
