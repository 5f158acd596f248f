"""OLMo 1 to 3, OLMoE and FlexOlmo."""

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
from tree_models.spec import ExpertsSpec, HeadNormSpec, MLPSpec, NormSpec, RouterSpec

# Names of norms that stand behind each half of a layer.
NORMS_BEHIND: dict[str, Any] = {
    "before_attention": "",
    "before_mlp": "",
    "after_attention": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
# transformers' OlmoLayerNorm.
_OLMO_EPSILON = 1e-5


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
