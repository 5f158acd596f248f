"""OLMo 1 to 3, OLMo-hybrid, OLMoE and FlexOlmo."""

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
from tree_models.names import WeightNames
from tree_models.spec import (
    DeltaNetSpec,
    ExpertsSpec,
    FamilyRefused,
    HeadNormSpec,
    MLPSpec,
    NormSpec,
    RouterSpec,
)

# Names of norms that stand behind each half of a layer.
NORMS_BEHIND: dict[str, Any] = {
    "before_attention": "",
    "before_mlp": "",
    "after_attention": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
# transformers' OlmoLayerNorm.
_OLMO_EPSILON = 1e-5
_NET = "linear_attn."
# The norms before and behind are of different layers.
_HYBRID = WeightNames(
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
    mixer_in=(f"{_NET}q_proj", f"{_NET}k_proj", f"{_NET}v_proj", f"{_NET}g_proj"),
    convolution_parts=(f"{_NET}q_conv1d", f"{_NET}k_conv1d", f"{_NET}v_conv1d"),
    renamed=(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
    mixer_gates=(f"{_NET}b_proj", f"{_NET}a_proj"),
    mixer_norm=f"{_NET}o_norm",
    mixer_out=f"{_NET}o_proj",
)


def olmo(config: Any) -> Description:
    """OLMo 1: LayerNorms without weights, limited queries, keys and values."""
    norm = NormSpec("layer", _OLMO_EPSILON, weight=False)
    layers = [
        layer(attention(config, index, clip=config.clip_qkv), mlp(config, bias=False), norm)
        for index in counted(config)
    ]
    return Description(decoder(config, layers, norm), WeightNames())


def olmo3(config: Any) -> Description:
    """OLMo 3: OLMo 2 with windows."""
    return olmo2(config, windows=True)


def olmo2(config: Any, feeding: MLPSpec | ExpertsSpec | None = None, **attending: Any) -> Description:
    """OLMo 2, with experts or other attention if they are given: norms behind each half, and of all queries and keys
    together."""
    norm, fed = rms_norm(config), feeding or mlp(config, bias=False)
    behind = {"before_attention": None, "before_mlp": None, "after_attention": norm, "after_mlp": norm}
    heads = HeadNormSpec(norm, "all_heads")
    layers = [
        layer(attention(config, index, head_norm=heads, **attending), fed, norm, **behind) for index in counted(config)
    ]
    return Description(decoder(config, layers, norm), WeightNames(**NORMS_BEHIND))


def olmo_hybrid(config: Any) -> Description:
    """OLMo-hybrid: gated delta nets between norms before each half; OLMo 3's attention, which may embed no positions,
    between norms behind."""
    if activation(config) != "silu":
        raise FamilyRefused(f"the activation {config.hidden_act} of a delta net is not served")
    norm, fed = rms_norm(config), mlp(config, bias=False)
    behind = {"before_attention": None, "before_mlp": None, "after_attention": norm, "after_mlp": norm}
    delta = DeltaNetSpec(
        key_heads=int(config.linear_num_key_heads),
        heads=int(config.linear_num_value_heads),
        key_width=int(config.linear_key_head_dim),
        value_width=int(config.linear_value_head_dim),
        taps=int(config.linear_conv_kernel_dim),
        epsilon=_OLMO_EPSILON,
        beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
    )
    still: dict[str, Any] = {} if (config.rope_parameters or {}).get("rope_theta") is not None else {"rotary": None}
    layers = []
    for index in counted(config):
        if config.layer_types[index] == "full_attention":
            attending = attention(config, index, head_norm=HeadNormSpec(norm, "all_heads"), **still)
            layers.append(layer(attending, fed, norm, **behind))
        else:
            layers.append(layer(delta, fed, norm))
    return Description(decoder(config, layers, norm), _HYBRID)


def flex_olmo(config: Any) -> Description:
    """FlexOlmo: OLMo 2 with experts."""
    return olmo2(config, _experts(config))


def olmoe(config: Any) -> Description:
    """OLMoE."""
    norm, experts = rms_norm(config), _experts(config)
    attending = {"head_norm": HeadNormSpec(norm, "all_heads"), "clip": config.clip_qkv}
    layers = [layer(attention(config, index, **attending), experts, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())


def _experts(config: Any) -> ExpertsSpec:
    return ExpertsSpec(
        count=int(config.num_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.intermediate_size),
        router=RouterSpec(renormalised=bool(config.norm_topk_prob), rounded=True),
        activation=activation(config),
    )
