"""Mixtral, and MiniMax M2, whose experts have Mixtral's names."""

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
from tree_models.spec import ExpertsSpec, HeadNormSpec, RouterSpec

_EXPERT = "block_sparse_moe.experts.{expert}."


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
