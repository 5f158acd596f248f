"""GLM-4 and GLM-4-0414, dense; GLM-4.5 to 4.7, with experts, the text of their
vision models, and those that are like them: dots.llm1, Solar Open."""

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


def glm(config: Any, *, qkv_bias: bool | None = None, **norms: Any) -> Description:
    """GLM-4: neighbouring pairs of a part of each head are rotated, gate and up are one tensor. `qkv_bias` in place of
    the configuration's."""
    norm, turning = rms_norm(config), rotary(config, head_width(config), interleaved=True)
    feeding = mlp(config, bias=False)
    own: dict[str, Any] = {"rotary": turning, "out_bias": False} | ({} if qkv_bias is None else {"qkv_bias": qkv_bias})
    layers = [layer(attention(config, index, **own), feeding, norm, **norms) for index in counted(config)]
    names: dict[str, Any] = (
        {"after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"} if norms else {}
    )
    return Description(decoder(config, layers, norm), WeightNames(gate_up=("mlp.gate_up_proj",), **names))


def glm4(config: Any) -> Description:
    """GLM-4-0414: norms before and after each half."""
    norm = rms_norm(config)
    return glm(config, after_attention=norm, after_mlp=norm)


def glm4v(config: Any) -> Description:
    """The text of GLM-4.1V and 4.6V-Flash: GLM-4-0414 with biases; its three positions are equal in texts."""
    norm = rms_norm(config)
    return glm(config, qkv_bias=True, after_attention=norm, after_mlp=norm)


def glm4v_moe(config: Any) -> Description:
    """The text of GLM-4.5V and 4.6V: GLM-4.5 without norms of heads."""
    return _with_experts(config, int(config.first_k_dense_replace), out_bias=False)


def glm4_moe(config: Any) -> Description:
    """GLM-4.5 to 4.7."""
    norm = rms_norm(config)
    heads = HeadNormSpec(norm) if config.use_qk_norm else None
    return _with_experts(config, int(config.first_k_dense_replace), head_norm=heads, out_bias=False)


def solar_open(config: Any) -> Description:
    """Solar Open: experts in every layer."""
    return _with_experts(config, 0, out_bias=False)


def dots1(config: Any) -> Description:
    """dots.llm1: normed queries and keys."""
    heads = HeadNormSpec(rms_norm(config))
    return _with_experts(config, int(config.first_k_dense_replace), head_norm=heads, windows=True)


def _with_experts(config: Any, dense: int, **attending: Any) -> Description:
    """Behind so many `dense` layers, DeepSeek-V3's experts."""
    norm, experts = rms_norm(config), sigmoid_experts(config)
    feeding = [mlp(config, bias=False) if index < dense else experts for index in counted(config)]
    layers = [layer(attention(config, index, **attending), fed, norm) for index, fed in enumerate(feeding)]
    return Description(decoder(config, layers, norm), WeightNames())
