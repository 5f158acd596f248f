"""Qwen2 to 3.5, dense and with experts, and the text of Qwen2-VL to 3-VL; MiMo, which is Qwen2 with modules that
predict more tokens."""

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
from tree_models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FamilyRefused,
    HeadNormSpec,
    MLPSpec,
    RouterSpec,
)

_SHARED: dict[str, Any] = {
    "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": "mlp.shared_expert.down_proj",
}


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
    return _experts(config, shared, _SHARED, qkv_bias=bias, out_bias=False)


def qwen3_moe(config: Any) -> Description:
    """Qwen3 with experts; Mellum 2, which has windows."""
    return _experts(config, None, {}, head_norm=HeadNormSpec(rms_norm(config)))


def qwen2_vl(config: Any) -> Description:
    """The text of Qwen2-VL and 2.5-VL: Qwen2. Its rotary embedding has three positions, which are equal in texts."""
    return llama(config, mlp(config, bias=False), windows=True, qkv_bias=True, out_bias=False)


def qwen3_vl(config: Any) -> Description:
    """The text of Qwen3-VL: Qwen3, with three positions as Qwen2-VL."""
    return llama(config, mlp(config, bias=False), head_norm=HeadNormSpec(rms_norm(config)))


def qwen3_omni_moe(config: Any) -> Description:
    """The text of Qwen3-Omni: Qwen3-VL's with experts."""
    found = qwen3_vl_moe(config, renormalised=bool(config.norm_topk_prob))
    return Description(found.spec, WeightNames())


def qwen3_vl_moe(config: Any, *, renormalised: bool = True) -> Description:
    """The same with experts."""
    norm, experts = rms_norm(config), _mixture(config, None, renormalised=renormalised)
    layers = []
    for index in counted(config):
        dense = index in (config.mlp_only_layers or ()) or (index + 1) % config.decoder_sparse_step
        attending = attention(config, index, head_norm=HeadNormSpec(norm))
        feeding = mlp(config, bias=False) if dense or not experts.count else experts
        layers.append(layer(attending, feeding, norm))
    return Description(decoder(config, layers, norm), WeightNames(experts_by_columns=True))


def qwen3_next(config: Any) -> Description:
    """Qwen3-Next: gated delta nets beside gated attention; experts with a shared one."""
    names: dict[str, Any] = {"mixer_in": ("linear_attn.in_proj_qkvz",), "mixer_gates": ("linear_attn.in_proj_ba",)}
    return _with_delta_nets(config, WeightNames(**_SHARED, **names))


def qwen3_5(config: Any) -> Description:
    """The text of Qwen3.5, 3.6 and 3.8: Qwen3-Next's layers under other names, dense or with experts."""
    return _with_delta_nets(config, WeightNames(**_SHARED))


def _with_delta_nets(config: Any, names: WeightNames) -> Description:
    if activation(config) != "silu":
        raise FamilyRefused(f"the activation {config.hidden_act} of a delta net is not served")
    norm = rms_norm(config, offset=1.0)
    delta = DeltaNetSpec(
        key_heads=int(config.linear_num_key_heads),
        heads=int(config.linear_num_value_heads),
        key_width=int(config.linear_key_head_dim),
        value_width=int(config.linear_value_head_dim),
        taps=int(config.linear_conv_kernel_dim),
        epsilon=float(config.rms_norm_eps),
    )
    layers = []
    for index in counted(config):
        mixing: AttentionSpec | DeltaNetSpec = delta
        if config.layer_types[index] == "full_attention":
            mixing = attention(config, index, head_norm=HeadNormSpec(norm), gated=True)
        layers.append(layer(mixing, _feeding(config, index), norm))
    return Description(decoder(config, layers, norm), names)


def _feeding(config: Any, index: int) -> MLPSpec | ExpertsSpec:
    """Of a layer of Qwen3-Next or 3.5."""
    if not getattr(config, "num_experts", 0) or index in (getattr(config, "mlp_only_layers", None) or ()):
        return mlp(config, bias=False)
    if (index + 1) % (getattr(config, "decoder_sparse_step", None) or 1):
        return mlp(config, bias=False)
    shared = mlp(config, config.shared_expert_intermediate_size, bias=False)
    return _mixture(config, shared, renormalised=bool(getattr(config, "norm_topk_prob", True)))


def _mixture(config: Any, shared: MLPSpec | None, *, renormalised: bool) -> ExpertsSpec:
    return ExpertsSpec(
        count=int(config.num_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.moe_intermediate_size),
        router=RouterSpec(renormalised=renormalised, rounded=True),
        activation=activation(config),
        shared=shared,
        shared_gate=shared is not None,
    )


def _experts(config: Any, shared: MLPSpec | None, names: dict[str, Any], **attending: Any) -> Description:
    norm, dense = rms_norm(config), mlp(config, bias=False)
    experts = _mixture(config, shared, renormalised=bool(config.norm_topk_prob))
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
