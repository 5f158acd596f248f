"""Phi 1 and 2; Phi-3 and 4, whose checkpoints have merged products; Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import replace
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
)
from tree_models.families.llama import llama
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import ExpertsSpec, HeadNormSpec, NormSpec, RouterSpec

_EXPERT = "block_sparse_moe.experts.{expert}."


def phi(config: Any) -> Description:
    """Phi 1, 1.5 and 2: attention and MLP side by side, LayerNorms, biases everywhere, a part of each head rotated."""
    norm = NormSpec("layer", float(config.layer_norm_eps), bias=True)
    attending: dict[str, Any] = {
        "head_norm": HeadNormSpec(norm) if config.qk_layernorm else None,
        "qkv_bias": True,
        "out_bias": True,
    }
    feeding = mlp(config, gated=False, bias=True)
    layers = [
        layer(attention(config, index, **attending), feeding, norm, before_mlp=None, parallel=True)
        for index in counted(config)
    ]
    names = WeightNames(
        final_norm="model.final_layernorm",
        out="self_attn.dense",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
    )
    return Description(decoder(config, layers, norm, head_bias=True), names)


def phi3(config: Any) -> Description:
    """Phi-3, 3.5 and 4."""
    found = llama(config, windows=True, qkv_bias=False, out_bias=False)
    return replace(found, names=replace(found.names, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)))


def phi4_multimodal(config: Any) -> Description:
    """The text of Phi-4-multimodal: Phi-4, beside what reads images and sound."""
    found = phi3(config)
    ignored = (*found.names.ignored, r"model\.embed_tokens_extend\..*")
    return replace(found, names=replace(found.names, ignored=ignored))


def phimoe(config: Any) -> Description:
    """Phi-3.5-MoE: LayerNorms, biases, two experts by sparsemixer."""
    norm = NormSpec("layer", float(config.rms_norm_eps), bias=True)
    router = RouterSpec("sparsemixer", jitter=float(config.router_jitter_noise))
    width = int(config.intermediate_size)
    experts = ExpertsSpec(int(config.num_local_experts), 2, width, router, activation(config))
    # Texts up to the original context have one scale and longer ones another.
    scaling = config.rope_parameters.get("short_mscale")
    turning = rotary(config, head_width(config), scaling=None if scaling is None else float(scaling))
    layers = [layer(attention(config, index, windows=True, rotary=turning), experts, norm) for index in counted(config)]
    names = WeightNames(
        router="block_sparse_moe.gate",
        expert_gate_up=(f"{_EXPERT}w1", f"{_EXPERT}w3"),
        expert_down=f"{_EXPERT}w2",
    )
    return Description(decoder(config, layers, norm, head_bias=bool(config.lm_head_bias)), names)
