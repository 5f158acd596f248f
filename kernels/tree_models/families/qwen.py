"""Qwen2, 2.5 and 3, dense and with experts; MiMo, which is Qwen2 with modules that predict more tokens."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import (
    Description,
    activation,
    attention,
    counted,
    decoder,
    layer,
    mlp,
    rms_norm,
)
from tree_models.families.llama import llama
from tree_models.names import WeightNames
from tree_models.spec import ExpertsSpec, HeadNormSpec, MLPSpec, RouterSpec


def qwen2(config: Any) -> Description:
    """Qwen2, 2.5 and MiMo: biases of queries, keys and values."""
    return llama(config, mlp(config, bias=False), windows=True, qkv_bias=True, out_bias=False)


def qwen3(config: Any) -> Description:
    """Qwen3: queries and keys of each head are normed."""
    return llama(config, mlp(config, bias=False), windows=True, head_norm=HeadNormSpec(rms_norm(config)))


def qwen2_moe(config: Any) -> Description:
    """Qwen1.5 and 2 with experts: a shared one is weighed by a gate."""
    bias = bool(getattr(config, "qkv_bias", True))
    shared = mlp(config, config.shared_expert_intermediate_size, bias=False)
    names = {
        "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared_down": "mlp.shared_expert.down_proj",
    }
    return _experts(config, shared, names, qkv_bias=bias, out_bias=False)


def qwen3_moe(config: Any) -> Description:
    """Qwen3 with experts; Mellum 2, which has windows."""
    return _experts(config, None, {}, head_norm=HeadNormSpec(rms_norm(config)))


def _experts(config: Any, shared: MLPSpec | None, names: dict[str, Any], **attending: Any) -> Description:
    norm, dense = rms_norm(config), mlp(config, bias=False)
    router = RouterSpec(renormalised=bool(config.norm_topk_prob), rounded=True)
    experts = ExpertsSpec(
        count=int(config.num_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.moe_intermediate_size),
        router=router,
        activation=activation(config),
        shared=shared,
        shared_gate=shared is not None,
    )
    layers = []
    for index in counted(config):
        kinds = getattr(config, "mlp_layer_types", None)
        if kinds is not None:
            sparse = kinds[index] == "sparse"
        else:
            sparse = index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
        feeding = experts if sparse and experts.count else dense
        layers.append(layer(attention(config, index, windows=True, **attending), feeding, norm))
    return Description(decoder(config, layers, norm), WeightNames(**names))
