"""Granite 3 and 4, dense and with experts; of Granite 4's hybrids those whose layers are all attention."""

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
from tree_models.spec import ExpertsSpec, FamilyRefused, MLPSpec, RouterSpec

_SHARED: dict[str, Any] = {"gate_up": ("shared_mlp.input_linear",), "down": "shared_mlp.output_linear"}
_EXPERTS: dict[str, Any] = {
    "router": "block_sparse_moe.router.layer",
    "expert_gate_up": ("block_sparse_moe.input_linear",),
    "expert_down": "block_sparse_moe.output_linear",
    "shared_gate_up": _SHARED["gate_up"],
    "shared_down": _SHARED["down"],
}
# Those of granitemoe_swa, which are named as transformers keeps them in memory.
_EXPERTS_SWA = _EXPERTS | {
    "router": "block_sparse_moe.router",
    "expert_gate_up": ("block_sparse_moe.experts.gate_up_proj",),
    "expert_down": "block_sparse_moe.experts.down_proj",
    "expert_suffix": "",
}


def granite(config: Any) -> Description:
    """Granite 3: scaled embeddings, scores, residuals and logits."""
    return _scaled(config, mlp(config), {})


def granitemoe(config: Any) -> Description:
    """Granite 3 with experts, and with one for every row."""
    return _scaled(config, _experts(config, int(getattr(config, "shared_intermediate_size", 0))), _EXPERTS)


def granite_swa(config: Any) -> Description:
    """Granite with windows, sinks, and rotary frequencies of each layer's own."""
    return _scaled(config, mlp(config), {}, windows=True, sinks=True)


def granitemoe_swa(config: Any) -> Description:
    """The same with experts."""
    experts = _experts(config, int(config.shared_intermediate_size))
    return _scaled(config, experts, _EXPERTS_SWA, windows=True, sinks=True)


def granitemoehybrid(config: Any) -> Description:
    """Granite 4 without Mamba layers."""
    if set(config.layer_types) - {"attention", "full_attention"}:
        raise FamilyRefused("layers that are not attention are not served")
    changes: dict[str, Any] = {} if config.position_embedding_type == "rope" else {"rotary": None}
    shared = int(config.shared_intermediate_size)
    if config.num_local_experts:
        return _scaled(config, _experts(config, shared), _EXPERTS, **changes)
    return _scaled(config, mlp(config, shared, bias=False), _SHARED, **changes)


def _experts(config: Any, shared: int) -> ExpertsSpec:
    return ExpertsSpec(
        count=int(config.num_local_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.intermediate_size),
        # A softmax over the chosen is one over all, renormalised.
        router=RouterSpec(rounded=True),
        activation=activation(config),
        shared=mlp(config, shared, bias=False) if shared else None,
    )


def _scaled(config: Any, feeding: MLPSpec | ExpertsSpec, names: dict[str, Any], **attending: Any) -> Description:
    norm = rms_norm(config)
    thetas = getattr(config, "layer_rope_theta", None)
    layers = []
    for index in counted(config):
        own = dict(attending)
        if thetas is not None:
            # Zero embeds no positions.
            theta = float(thetas[index])
            own["rotary"] = rotary(config, head_width(config), theta=theta) if theta else None
        heads = attention(config, index, scaling=float(config.attention_multiplier), **own)
        layers.append(layer(heads, feeding, norm, residual_scale=float(config.residual_multiplier)))
    scales = {
        "embedding_scale": float(config.embedding_multiplier),
        "logits_scale": 1.0 / float(config.logits_scaling),
    }
    return Description(decoder(config, layers, norm, **scales), WeightNames(**names))
