"""Granite 3 and 4, dense and with experts; HyperCLOVA X; Granite 4's hybrids with Mamba2, Bamba and Falcon-H1; Jamba,
with Mamba."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tree_models.families.common import (
    STATE_SPACES,
    Description,
    activation,
    attention,
    counted,
    decoder,
    head_width,
    layer,
    mlp,
    rms_norm,
    state_space,
)
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FamilyRefused,
    GateSpec,
    MLPSpec,
    RouterSpec,
    SelectiveSpec,
    StateSpaceSpec,
)

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


# Of Bamba and Falcon-H1.
_BAMBA = WeightNames(
    final_norm="model.final_layernorm",
    before_mlp="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    **STATE_SPACES,
)


_JAMBA_EXPERT = "feed_forward.experts.{expert}."
_JAMBA = WeightNames(
    final_norm="model.final_layernorm",
    before_mlp="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate_up=(f"{_JAMBA_EXPERT}gate_proj", f"{_JAMBA_EXPERT}up_proj"),
    expert_down=f"{_JAMBA_EXPERT}down_proj",
    **STATE_SPACES,
)


def granite(config: Any) -> Description:
    """Granite 3: scaled embeddings, scores, residuals and logits."""
    return _scaled(config, mlp(config), {})


def hyperclovax(config: Any) -> Description:
    """HyperCLOVA X: Granite with norms behind each half, and a factor of logits where Granite has a divisor."""
    found, norm = _scaled(config, mlp(config), {}), rms_norm(config)
    spec = replace(found.spec, logits_scale=float(config.logits_scaling))
    if not config.use_post_norm:
        return replace(found, spec=spec)
    layers = tuple(replace(one, after_attention=norm, after_mlp=norm) for one in spec.layers)
    names = replace(found.names, after_attention="post_norm1", after_mlp="post_norm2")
    return Description(replace(spec, layers=layers), names)


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
    """Granite 4: Mamba2 beside attention, or attention alone."""
    changes: dict[str, Any] = {} if config.position_embedding_type == "rope" else {"rotary": None}
    shared = int(config.shared_intermediate_size)
    if config.num_local_experts:
        return _scaled(config, _experts(config, shared), _EXPERTS | STATE_SPACES, **changes)
    return _scaled(config, mlp(config, shared, bias=False), _SHARED | STATE_SPACES, **changes)


def bamba(config: Any) -> Description:
    """Bamba: Mamba2 in most layers; half of each head of attention is rotated."""
    norm, layers = rms_norm(config), []
    for index in counted(config):
        mixing: AttentionSpec | StateSpaceSpec
        attends = config.layers_block_type[index] == "full_attention"
        mixing = attention(config, index) if attends else state_space(config)
        layers.append(layer(mixing, mlp(config), norm))
    return Description(decoder(config, layers, norm), _BAMBA)


def falcon_h1(config: Any) -> Description:
    """Falcon-H1: attention and Mamba2 side by side in every layer, and many fixed scales."""
    norm, (gate, down) = rms_norm(config), config.mlp_multipliers
    feeding = mlp(config, gate=GateSpec(scale=float(gate)), scale=float(down))
    beside = _falcon_space(config)
    layers = [layer(_falcon_attention(config, index), feeding, norm, beside=beside) for index in counted(config)]
    scales = {
        "embedding_scale": float(config.embedding_multiplier),
        "logits_scale": float(config.lm_head_multiplier),
    }
    return Description(decoder(config, layers, norm, **scales), _BAMBA)


def jamba(config: Any) -> Description:
    """Jamba 1 to 1.7, and Jamba Reasoning."""
    if activation(config) != "silu":
        raise FamilyRefused(f"the activation {config.hidden_act} of a selective scan is not served")
    norm, dense = rms_norm(config), mlp(config, bias=False)
    scan = SelectiveSpec(
        channels=int(config.mamba_expand * config.hidden_size),
        state_width=int(config.mamba_d_state),
        taps=int(config.mamba_d_conv),
        step_rank=int(config.mamba_dt_rank),
        norm=norm,
        bias=bool(config.mamba_proj_bias),
        convolution_bias=bool(config.mamba_conv_bias),
    )
    experts = ExpertsSpec(
        int(config.num_experts),
        int(config.num_experts_per_tok),
        int(config.intermediate_size),
        RouterSpec(renormalised=False, rounded=True),
    )
    layers = []
    for index in counted(config):
        mixing: AttentionSpec | SelectiveSpec = scan
        if config.layers_block_type[index] == "attention":
            mixing = attention(config, rotary=None, qkv_bias=False, out_bias=False)
        layers.append(layer(mixing, experts if config.layers_num_experts[index] > 1 else dense, norm))
    return Description(decoder(config, layers, norm), _JAMBA)


def _falcon_attention(config: Any, index: int) -> AttentionSpec:
    """Scales of rows, keys and outputs are those of scores and values."""
    rows, out = float(config.attention_in_multiplier), float(config.attention_out_multiplier)
    if config.attention_bias and (rows, out) != (1.0, 1.0):
        raise FamilyRefused("scaled attention with biases is not served")
    scaling = head_width(config) ** -0.5 * float(config.key_multiplier) * rows * rows
    return attention(config, index, scaling=scaling, value_scale=rows * out)


def _falcon_space(config: Any) -> StateSpaceSpec:
    rows = float(config.ssm_in_multiplier)
    if config.mamba_proj_bias != config.projectors_bias or (config.mamba_proj_bias and rows != 1.0):
        raise FamilyRefused("a state space with some biases, or scaled ones, is not served")
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise FamilyRefused("a state space whose output is normed before its gate is not served")
    gates, values, keys, queries, steps = (rows * float(scale) for scale in config.ssm_multipliers)
    return replace(
        state_space(config),
        normed=bool(config.mamba_rms_norm),
        norm_groups=int(config.mamba_n_groups),
        part_scales=(gates, values, keys, queries, steps),
        scale=float(config.ssm_out_multiplier),
    )


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
    thetas, kinds = getattr(config, "layer_rope_theta", None), [""] * int(config.num_hidden_layers)
    layers = []
    for index in counted(config):
        own = dict(attending)
        if thetas is not None:
            # Zero embeds no positions.
            theta = float(thetas[index])
            own["rotary"] = rotary(config, head_width(config), theta=theta) if theta else None
        mixing: AttentionSpec | StateSpaceSpec
        if getattr(config, "layers_block_type", kinds)[index] in ("mamba", "linear_attention"):
            mixing = state_space(config)
        else:
            mixing = attention(config, index, scaling=float(config.attention_multiplier), **own)
        layers.append(layer(mixing, feeding, norm, residual_scale=float(config.residual_multiplier)))
    scales = {
        "embedding_scale": float(config.embedding_multiplier),
        "logits_scale": 1.0 / float(config.logits_scaling),
    }
    return Description(decoder(config, layers, norm, **scales), WeightNames(**names))
