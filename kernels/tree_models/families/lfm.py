"""LFM2 and 2.5, dense and with experts: short convolutions beside attention."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import Description, attention, counted, decoder, layer, mlp
from tree_models.names import WeightNames
from tree_models.spec import (
    AttentionSpec,
    ExpertsSpec,
    GatedConvolutionSpec,
    HeadNormSpec,
    MLPSpec,
    NormSpec,
    RouterSpec,
)

_NAMES: dict[str, Any] = {
    "final_norm": "model.embedding_norm",
    "before_attention": "operator_norm",
    "before_mlp": "ffn_norm",
    "out": "self_attn.out_proj",
    "query_norm": "self_attn.q_layernorm",
    "key_norm": "self_attn.k_layernorm",
    "mixer_in": ("conv.in_proj",),
    "convolution": "conv.conv",
    "mixer_out": "conv.out_proj",
    "gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "down": "feed_forward.w2",
}


def lfm2(config: Any) -> Description:
    """LFM2: most layers are short convolutions; the MLP's width follows a rule of its own."""
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width, step = int(2 * width / 3), int(config.block_multiple_of)
        width = -(-int(config.block_ffn_dim_multiplier * width) // step) * step
    feeding = MLPSpec(width)
    return _lfm(config, [feeding for _ in counted(config)], WeightNames(**_NAMES))


def lfm2_moe(config: Any) -> Description:
    """LFM2 with experts behind the first layers, chosen by sigmoids and a bias."""
    router = RouterSpec(
        scores="sigmoid",
        renormalised=bool(config.norm_topk_prob),
        least_sum=1e-6,
        correction=bool(config.use_expert_bias),
        scaling=float(config.routed_scaling_factor),
    )
    experts = ExpertsSpec(
        int(config.num_experts), int(config.num_experts_per_tok), int(config.moe_intermediate_size), router
    )
    feeding = [mlp(config) if index < config.num_dense_layers else experts for index in counted(config)]
    names: dict[str, Any] = {
        "router": "feed_forward.gate",
        "correction": "feed_forward.expert_bias",
        "expert_gate_up": ("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
        "expert_down": "feed_forward.experts.{expert}.w2",
    }
    return _lfm(config, feeding, WeightNames(**_NAMES, **names))


def _lfm(config: Any, feeding: list[MLPSpec] | list[MLPSpec | ExpertsSpec], names: WeightNames) -> Description:
    norm = NormSpec("rms", float(config.norm_eps))
    convolution = GatedConvolutionSpec(int(config.conv_L_cache), bool(config.conv_bias))
    layers = []
    for index, fed in enumerate(feeding):
        mixing: AttentionSpec | GatedConvolutionSpec = convolution
        if config.layer_types[index] == "full_attention":
            mixing = attention(config, index, head_norm=HeadNormSpec(norm), qkv_bias=False, out_bias=False)
        layers.append(layer(mixing, fed, norm))
    return Description(decoder(config, layers, norm), names)
