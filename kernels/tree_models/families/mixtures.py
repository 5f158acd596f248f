"""Mixtures of experts that stand by themselves: Mixtral, MiniMax M2, gpt-oss."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import (
    Description,
    activation,
    attention,
    counted,
    decoder,
    layer,
    rms_norm,
)
from tree_models.names import WeightNames
from tree_models.spec import ExpertsSpec, GateSpec, HeadNormSpec, RouterSpec

_EXPERT = "block_sparse_moe.experts.{expert}."
# Of gate and up, and what is added to up: transformers' GptOssExperts, whose sigmoid has quick GELU's factor.
_LIMITS = GateSpec(limit=7.0, offset=1.0)
_TRANSPOSED = WeightNames(
    router="mlp.router",
    router_bias="mlp.router.bias",
    expert_gate_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
    expert_suffix="",
    experts_transposed=True,
)


def mixtral(config: Any) -> Description:
    """Mixtral."""
    return _experts(config, RouterSpec(), windows=True)


def minimax_m2(config: Any) -> Description:
    """MiniMax M2: sigmoid scores, a bias for the choice, all queries and all keys normed together."""
    router = RouterSpec("sigmoid", correction=True, wide=True)
    return _experts(config, router, head_norm=HeadNormSpec(rms_norm(config), "all_heads"))


def _experts(config: Any, router: RouterSpec, **attending: Any) -> Description:
    norm = rms_norm(config)
    count, top_k = int(config.num_local_experts), int(config.num_experts_per_tok)
    experts = ExpertsSpec(count, top_k, int(config.intermediate_size), router, activation(config))
    attending |= {"qkv_bias": False, "out_bias": False}
    layers = [layer(attention(config, index, **attending), experts, norm) for index in counted(config)]
    names = WeightNames(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        expert_gate_up=(f"{_EXPERT}w1", f"{_EXPERT}w3"),
        expert_down=f"{_EXPERT}w2",
    )
    return Description(decoder(config, layers, norm), names)


def gpt_oss(config: Any) -> Description:
    """gpt-oss-20b and -120b."""
    norm = rms_norm(config)
    experts = ExpertsSpec(
        count=int(config.num_local_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.intermediate_size),
        router=RouterSpec(bias=True, rounded=True),
        activation="quick_gelu",
        gate=_LIMITS,
        bias=True,
    )
    layers = [layer(attention(config, index, windows=True, sinks=True), experts, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), _TRANSPOSED)
