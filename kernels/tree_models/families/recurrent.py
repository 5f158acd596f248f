"""LFM2 and 2.5, dense and with experts: short convolutions beside attention. RecurrentGemma: gated linear recurrences
beside it. Mamba 1 and 2 and Falcon-Mamba: layers of states alone, without attention and without MLPs."""

from __future__ import annotations

from typing import Any

import torch

from tree_models.families.common import Description, activation, attention, counted, decoder, layer, mlp
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FamilyRefused,
    GatedConvolutionSpec,
    GriffinSpec,
    HeadNormSpec,
    LayerSpec,
    MatrixMemorySpec,
    MLPSpec,
    NormSpec,
    RouterSpec,
    SelectiveSpec,
    StateSpaceSpec,
)

_LFM: dict[str, Any] = {
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

_BLOCK = "temporal_block."
_GRIFFIN = WeightNames(
    final_norm="model.final_norm",
    before_attention="temporal_pre_norm",
    before_mlp="channel_pre_norm",
    qkv=(f"{_BLOCK}q_proj", f"{_BLOCK}k_proj", f"{_BLOCK}v_proj"),
    out=f"{_BLOCK}o_proj",
    mixer_in=(f"{_BLOCK}linear_x", f"{_BLOCK}linear_y"),
    convolution=f"{_BLOCK}conv_1d",
    mixer_gates=(f"{_BLOCK}rg_lru.input_gate", f"{_BLOCK}rg_lru.recurrent_gate"),
    decay=f"{_BLOCK}rg_lru.recurrent_param",
    mixer_out=f"{_BLOCK}linear_out",
    gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
    down="mlp_block.down_proj",
)

_MIXER = "mixer."
# Of a layer of one half, whatever it is, as NVIDIA's hybrids have them too.
STATE_LAYERS: dict[str, Any] = {
    "embedding": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "layer": "backbone.layers.{layer}.",
    "before_attention": "norm",
    "mixer_in": (f"{_MIXER}in_proj",),
    "convolution": f"{_MIXER}conv1d",
    "decay": f"{_MIXER}A_log",
    "decay_bias": f"{_MIXER}dt_bias",
    "skip": f"{_MIXER}D",
    "mixer_norm": f"{_MIXER}norm",
    "mixer_out": f"{_MIXER}out_proj",
}
_MAMBA = WeightNames(**STATE_LAYERS, selection=f"{_MIXER}x_proj", steps=f"{_MIXER}dt_proj")


_MEMORY = "mlstm_layer."
_XLSTM = WeightNames(
    embedding="backbone.embeddings",
    final_norm="backbone.out_norm",
    layer="backbone.blocks.{layer}.",
    before_attention="norm_mlstm",
    before_mlp="norm_ffn",
    mixer_in=tuple(f"{_MEMORY}{name}" for name in ("q", "k", "v", "ogate_preact")),
    mixer_gates=(f"{_MEMORY}igate_preact", f"{_MEMORY}fgate_preact"),
    mixer_norm=f"{_MEMORY}multihead_norm",
    mixer_out=f"{_MEMORY}out_proj",
    gate_up=("ffn.proj_up_gate", "ffn.proj_up"),
    down="ffn.proj_down",
)


def lfm2(config: Any) -> Description:
    """LFM2: most layers are short convolutions; the MLP's width follows a rule of its own."""
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width, step = int(2 * width / 3), int(config.block_multiple_of)
        width = -(-int(config.block_ffn_dim_multiplier * width) // step) * step
    feeding = MLPSpec(width)
    return _lfm(config, [feeding for _ in counted(config)], WeightNames(**_LFM))


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
    return _lfm(config, feeding, WeightNames(**_LFM, **names))


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


def recurrent_gemma(config: Any) -> Description:
    """RecurrentGemma: two recurrent layers for each of attention, which has a window."""
    norm, turning = NormSpec("rms", float(config.rms_norm_eps), offset=1.0), rotary(config, config.head_dim)
    feeding = mlp(config, config.intermediate_size // 2, bias=True)
    of_channels = int(config.lru_width), int(config.num_attention_heads), int(config.conv1d_width)
    unit = GriffinSpec(*of_channels, feeding.activation, turning)
    attending = attention(config, window=int(config.attention_window_size), out_bias=True, rotary=turning)
    layers = [layer(unit if kind == "recurrent" else attending, feeding, norm) for kind in config.layers_block_type]
    scale = float(torch.tensor(config.hidden_size**0.5).bfloat16())
    cap = {"logits_cap": float(config.logits_soft_cap), "embedding_scale": scale}
    return Description(decoder(config, layers, norm, **cap), _GRIFFIN)


def mamba(config: Any) -> Description:
    """Mamba: a selective scan in each layer."""
    return _states(config, _selective(config, None))


def falcon_mamba(config: Any) -> Description:
    """Falcon-Mamba: Mamba with norms without weights of steps, keys and queries."""
    return _states(config, _selective(config, NormSpec("rms", float(config.mixer_rms_eps), weight=False)))


def mamba2(config: Any) -> Description:
    """Mamba2, Codestral Mamba: one norm of all heads' gated outputs."""
    least, most = config.time_step_limit
    space = StateSpaceSpec(
        groups=int(config.n_groups),
        heads=int(config.num_heads),
        state_width=int(config.state_size),
        value_width=int(config.head_dim),
        taps=int(config.conv_kernel),
        epsilon=float(config.layer_norm_epsilon),
        bias=bool(config.use_bias),
        convolution_bias=bool(config.use_conv_bias),
        step_limits=(float(least), float(most)),
    )
    return _states(config, space)


def xlstm(config: Any) -> Description:
    """xLSTM: matrix memories."""
    if config.use_bias or config.weight_mode != "single":
        raise FamilyRefused("matrix memories with biases, or with merged products, are not served")
    hidden, heads, step = int(config.hidden_size), int(config.num_heads), int(config.ffn_round_up_to_multiple_of)
    norm = NormSpec("rms", float(config.norm_eps))
    memory = MatrixMemorySpec(
        heads=heads,
        key_width=int(hidden * config.qk_dim_factor) // heads,
        value_width=int(hidden * config.v_dim_factor) // heads,
        epsilon=float(config.norm_eps),
        gate_cap=float(config.gate_soft_cap),
    )
    feeding = MLPSpec(int((hidden * config.ffn_proj_factor + step - 1) // step) * step)
    layers = [layer(memory, feeding, norm) for _ in range(int(config.num_blocks))]
    return Description(decoder(config, layers, norm, logits_cap=float(config.output_logit_soft_cap)), _XLSTM)


def _selective(config: Any, norm: NormSpec | None) -> SelectiveSpec:
    return SelectiveSpec(
        channels=int(config.intermediate_size),
        state_width=int(config.state_size),
        taps=int(config.conv_kernel),
        step_rank=int(config.time_step_rank),
        norm=norm,
        bias=bool(config.use_bias),
        convolution_bias=bool(config.use_conv_bias),
    )


def _states(config: Any, mixing: SelectiveSpec | StateSpaceSpec) -> Description:
    if activation(config) != "silu":
        raise FamilyRefused(f"the activation {config.hidden_act} of a state space is not served")
    norm = NormSpec("rms", float(config.layer_norm_epsilon))
    layers = [LayerSpec(mixing, None, norm, None) for _ in counted(config)]
    return Description(decoder(config, layers, norm), _MAMBA)
