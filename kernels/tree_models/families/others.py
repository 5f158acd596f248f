"""Families that stand by themselves: Cohere, EXAONE, Apertus, StarCoder2, Nemotron and its hybrids, Zamba, ZAYA."""

from __future__ import annotations

from collections.abc import Sequence
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
)
from tree_models.families.olmo import NORMS_BEHIND
from tree_models.families.recurrent import STATE_LAYERS
from tree_models.families.rotary import rope_parameters, rotary
from tree_models.names import WeightNames
from tree_models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FamilyRefused,
    HeadNormSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RotarySpec,
    RouterMLPSpec,
    RouterSpec,
    SelectiveSpec,
    SharedBlockSpec,
    StateSpaceSpec,
)

_BLOCK = "shared_transformer."
_ZAMBA2 = WeightNames(
    **STATE_SPACES,
    final_norm="model.final_layernorm",
    before_mlp=f"{_BLOCK}pre_ff_layernorm",
    qkv=tuple(f"{_BLOCK}self_attn.{part}_proj" for part in "qkv"),
    out=f"{_BLOCK}self_attn.o_proj",
    qkv_adapters=tuple(f"{_BLOCK}self_attn.linear_{part}_adapter_list.{{expert}}" for part in "qkv"),
    gate_up=(f"{_BLOCK}feed_forward.gate_up_proj",),
    down=f"{_BLOCK}feed_forward.down_proj",
    gate_up_adapters=(f"{_BLOCK}feed_forward.gate_up_proj_adapter_list.{{expert}}",),
    renamed=(("mamba_decoder.mamba", "mamba"), ("mamba_decoder.input_layernorm", "input_layernorm")),
)
_BLOCK1 = "shared_transf."
_ZAMBA = WeightNames(
    **STATE_SPACES,
    final_norm="model.final_layernorm",
    before_mlp=f"{_BLOCK1}pre_ff_layernorm",
    shared_norm=f"{_BLOCK1}input_layernorm",
    qkv=tuple(f"{_BLOCK1}self_attn.{part}_proj" for part in "qkv"),
    out=f"{_BLOCK1}self_attn.o_proj",
    gate_up=tuple(f"{_BLOCK1}feed_forward.{part}_proj" for part in ("gate", "up")),
    down=f"{_BLOCK1}feed_forward.down_proj",
    renamed=_ZAMBA2.renamed,
)


def cohere(config: Any) -> Description:
    """Command R: attention and MLP side by side, neighbouring pairs rotated, scaled logits."""
    norm = NormSpec("layer", float(config.layer_norm_eps))
    heads = HeadNormSpec(norm, "each_head") if config.use_qk_norm else None
    turning = rotary(config, head_width(config), interleaved=True)
    return _cohere(
        config, norm, [attention(config, index, rotary=turning, head_norm=heads) for index in counted(config)]
    )


def cohere2(config: Any) -> Description:
    """Command A and R7B: layers with windows, and layers that embed no positions."""
    turning = rotary(config, head_width(config), interleaved=True)
    attending = []
    for index in counted(config):
        windowed = config.layer_types[index] == "sliding_attention" and config.sliding_window is not None
        attending.append(attention(config, index, windows=True, rotary=turning if windowed else None))
    return _cohere(config, NormSpec("layer", float(config.layer_norm_eps)), attending)


def cohere_compass(config: Any) -> Description:
    """The text of North Micro Vision: Command R's layers, of which some have windows and some embed no positions."""
    attending = []
    for index in counted(config):
        # By kinds of layers, of which some may have none.
        turns = rope_parameters(config, index) is not None
        attending.append(attention(config, index, windows=True, rotary=_compass(config, index) if turns else None))
    scale = 1.0 if config.logit_scale is None else float(config.logit_scale)
    return _cohere(config, NormSpec("layer", float(config.layer_norm_eps)), attending, logits_scale=scale)


def _compass(config: Any, index: int) -> RotarySpec:
    """Height and width have frequencies in turn, and pairs stand in the order of height, width and time."""
    turning, parameters = rotary(config, head_width(config), layer=index), rope_parameters(config, index)
    if parameters.get("rope_type", "default") != "default":
        return turning
    # As transformers has it where a configuration does not.
    *_, time = parameters.get("mrope_section", (22, 22, 20))
    plane = turning.frequencies[:-time]
    return replace(turning, frequencies=(*plane[::2], *plane[1::2], *turning.frequencies[-time:]))


def cohere2_moe(config: Any) -> Description:
    """Command A with experts, and perhaps one for every row, whose outputs may be averaged."""
    norm = NormSpec("layer", float(config.layer_norm_eps)) if config.rms_norm_eps is None else rms_norm(config)
    turning = rotary(config, head_width(config), interleaved=True)
    experts, attending, feeding = _cohere_experts(config), [], []
    for index in counted(config):
        dense = config.mlp_layer_types[index] == "dense"
        windowed = config.layer_types[index] == "sliding_attention" and config.sliding_window is not None
        turns = windowed or (dense and config.prefix_dense_sliding_window_pattern == 1)
        attending.append(attention(config, index, windows=True, rotary=turning if turns else None))
        feeding.append(mlp(config, config.prefix_dense_intermediate_size, bias=False) if dense else experts)
    return _cohere(config, norm, attending, feeding)


def _cohere_experts(config: Any) -> ExpertsSpec:
    shared = int(config.intermediate_size) * int(config.num_shared_experts)
    share = 0.5 if shared and config.shared_expert_combination_strategy == "average" else 1.0
    # A softmax over the chosen is one over all, renormalised.
    softmax = config.expert_selection_fn == "softmax"
    router = RouterSpec(
        "softmax" if softmax else "sigmoid",
        renormalised=softmax or bool(config.norm_topk_prob),
        scaling=share,
        rounded=True,
    )
    return ExpertsSpec(
        count=int(config.num_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.intermediate_size),
        router=router,
        activation=activation(config),
        shared=mlp(config, shared, bias=False, scale=share) if shared else None,
    )


def _cohere(
    config: Any,
    norm: NormSpec,
    attending: Sequence[AttentionSpec],
    feeding: Sequence[MLPSpec | ExpertsSpec] | None = None,
    logits_scale: float | None = None,
) -> Description:
    feeding = feeding or [mlp(config, bias=False)] * len(attending)
    layers = [
        layer(one, fed, norm, before_mlp=None, parallel=True) for one, fed in zip(attending, feeding, strict=True)
    ]
    scale = float(config.logit_scale) if logits_scale is None else logits_scale
    return Description(decoder(config, layers, norm, logits_scale=scale), WeightNames())


def exaone4(config: Any) -> Description:
    """EXAONE 4: norms behind each half, normed heads; beside layers with windows, others embed no positions."""
    norm = rms_norm(config)
    layers = []
    for index in counted(config):
        turns = config.sliding_window is None or config.layer_types[index] == "sliding_attention"
        changes: dict[str, Any] = {} if turns else {"rotary": None}
        attending = attention(config, index, windows=True, head_norm=HeadNormSpec(norm), **changes)
        layers.append(LayerSpec(attending, mlp(config, bias=False), None, None, after_attention=norm, after_mlp=norm))
    return Description(decoder(config, layers, norm), WeightNames(**NORMS_BEHIND))


def apertus(config: Any) -> Description:
    """Apertus: xIELU without a gate, normed queries and keys."""
    norm = rms_norm(config)
    layers = [
        layer(
            attention(config, index, head_norm=HeadNormSpec(norm)),
            mlp(config, gated=False, bias=False),
            norm,
        )
        for index in counted(config)
    ]
    names = WeightNames(before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
    return Description(decoder(config, layers, norm), names)


def starcoder2(config: Any) -> Description:
    """StarCoder2: LayerNorms, biases, an MLP without a gate."""
    norm, bias = NormSpec("layer", float(config.norm_epsilon), bias=True), bool(config.use_bias)
    layers = [
        layer(
            attention(config, index, windows=True, qkv_bias=bias, out_bias=bias),
            mlp(config, gated=False, bias=bias),
            norm,
        )
        for index in counted(config)
    ]
    return Description(decoder(config, layers, norm), WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"))


def nemotron(config: Any) -> Description:
    """Nemotron and Minitron: LayerNorms whose weights are less one, squared ReLU, a part of each head rotated."""
    norm = NormSpec("layer", float(config.norm_eps), offset=1.0, bias=True)
    layers = [layer(attention(config, index), mlp(config, gated=False), norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())


def stablelm(config: Any) -> Description:
    """StableLM: LayerNorms, a part of each head rotated; attention and MLP perhaps side by side."""
    if config.qk_layernorm:
        raise FamilyRefused("norms of each head by itself are not served")
    norm = NormSpec("layer", float(config.layer_norm_eps), bias=True)
    aside: dict[str, Any] = {"before_mlp": None, "parallel": True} if config.use_parallel_residual else {}
    own = {"qkv_bias": bool(config.use_qkv_bias), "out_bias": False}
    layers = [
        layer(attention(config, index, **own), mlp(config, bias=False), norm, **aside) for index in counted(config)
    ]
    return Description(decoder(config, layers, norm), WeightNames())


def jais2(config: Any) -> Description:
    """Jais 2: LayerNorms, squared ReLU."""
    norm = NormSpec("layer", float(config.layer_norm_eps), bias=True)
    layers = [layer(attention(config, index), mlp(config, gated=False), norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())


# Of a layer of one half, whatever it is.
_MIXER = "mixer."
_HYBRID = WeightNames(
    **STATE_LAYERS,
    before_mlp="norm",
    qkv=(f"{_MIXER}q_proj", f"{_MIXER}k_proj", f"{_MIXER}v_proj"),
    out=f"{_MIXER}o_proj",
    gate_up=(f"{_MIXER}up_proj",),
    down=f"{_MIXER}down_proj",
    router=f"{_MIXER}gate",
    correction=f"{_MIXER}gate.e_score_correction_bias",
    expert_gate_up=(f"{_MIXER}experts.{{expert}}.up_proj",),
    expert_down=f"{_MIXER}experts.{{expert}}.down_proj",
    shared_gate_up=(f"{_MIXER}shared_experts.up_proj",),
    shared_down=f"{_MIXER}shared_experts.down_proj",
)


def nemotron_h(config: Any) -> Description:
    """Nemotron 2 and 3: layers of one half, which are Mamba2, attention without positions, an MLP or experts without
    gates."""
    if config.mlp_bias and config.moe_latent_size:
        raise FamilyRefused("biases of latents are not served")
    norm = NormSpec("rms", float(config.layer_norm_epsilon))
    if config.mlp_hidden_act not in ("relu2", "silu"):
        raise FamilyRefused(f"the activation {config.mlp_hidden_act} is not served")
    unlike = {"activation": config.mlp_hidden_act, "gated": False, "bias": bool(config.mlp_bias)}
    layers = []
    for kind in config.layers_block_type:
        if kind == "linear_attention":
            layers.append(LayerSpec(_nemotron_space(config), None, norm, None))
        elif kind == "full_attention":
            attending = attention(config, rotary=None, qkv_bias=False, out_bias=False)
            layers.append(LayerSpec(attending, None, norm, None))
        else:
            width = int(config.intermediate_size)
            feeding = MLPSpec(width, **unlike) if kind == "mlp" else _nemotron_experts(config, unlike)
            layers.append(LayerSpec(None, feeding, None, norm))
    return Description(decoder(config, layers, norm), _HYBRID)


def _nemotron_space(config: Any) -> StateSpaceSpec:
    if config.mamba_hidden_act != "silu":
        raise FamilyRefused(f"the activation {config.mamba_hidden_act} of a state space is not served")
    return StateSpaceSpec(
        groups=int(config.n_groups),
        heads=int(config.mamba_num_heads),
        state_width=int(config.ssm_state_size),
        value_width=int(config.mamba_head_dim),
        taps=int(config.conv_kernel),
        epsilon=float(config.layer_norm_epsilon),
        bias=bool(config.use_bias),
        convolution_bias=bool(config.use_conv_bias),
        step_limits=(float(config.time_step_min), float("inf")),
        norm_groups=int(config.n_groups),
    )


def _nemotron_experts(config: Any, unlike: dict[str, Any]) -> ExpertsSpec:
    router = RouterSpec(
        "sigmoid",
        renormalised=bool(config.norm_topk_prob),
        least_sum=1e-20,
        correction=True,
        groups=int(config.n_group),
        top_groups=int(config.topk_group),
        group_score="top2",
        scaling=float(config.routed_scaling_factor),
        wide=True,
    )
    return ExpertsSpec(
        count=int(config.n_routed_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.moe_intermediate_size),
        router=router,
        activation=config.mlp_hidden_act,
        gated=False,
        latent=int(config.moe_latent_size or 0),
        shared=MLPSpec(int(config.moe_shared_expert_intermediate_size), **unlike),
    )


def zamba(config: Any) -> Description:
    """Zamba 1: selective scans of several heads in each layer, and in front of some a block of attention and an MLP
    that they share."""
    if config.hidden_mamba_act != "silu":
        raise FamilyRefused(f"the activation {config.hidden_mamba_act} of a selective scan is not served")
    scan = SelectiveSpec(
        channels=int(config.mamba_expand * config.hidden_size),
        state_width=int(config.mamba_d_state),
        taps=int(config.mamba_d_conv),
        step_rank=int(config.mamba_dt_rank),
        norm=None,
        bias=bool(config.mamba_proj_bias),
        convolution_bias=bool(config.mamba_conv_bias),
        heads=int(config.n_mamba_heads),
    )
    hybrids = [index for index, kind in enumerate(config.layers_block_type) if kind == "hybrid"]
    return _with_blocks(config, scan, _ZAMBA, hybrids, hybrids[:1], mlp(config, bias=False))


def zamba2(config: Any) -> Description:
    """Zamba 2: Mamba2 in each layer, and in front of some a block of attention and an MLP, one of few that they share.
    Adapters to its products are a layer's own."""
    rank, hybrids = int(config.adapter_rank), list(config.hybrid_layer_ids)
    adapters = rank if config.use_shared_attention_adapter else 0, rank
    turning = rotary(config, config.attention_head_dim) if config.use_mem_rope else None
    feeding, firsts = mlp(config, bias=bool(config.add_bias_linear)), hybrids[: config.num_mem_blocks]
    return _with_blocks(config, _zamba_space(config), _ZAMBA2, hybrids, firsts, feeding, turning, adapters)


def _with_blocks(
    config: Any,
    space: StateSpaceSpec | SelectiveSpec,
    names: WeightNames,
    hybrids: Sequence[int],
    firsts: Sequence[int],
    feeding: MLPSpec,
    turning: RotarySpec | None = None,
    adapters: tuple[int, int] = (0, 0),
) -> Description:
    """Layers of states, of which `hybrids` have blocks in front, whose weights are those of `firsts` in turn. Widths of
    adapters are attention's and the MLP's."""
    norm = rms_norm(config)
    if not config.tie_word_embeddings and len(hybrids) > len(firsts):
        # transformers ties the blocks' weights where it ties the embedding to the head.
        raise FamilyRefused("blocks whose weights are not shared are not served")
    scaling = (config.attention_head_dim / 2) ** -0.5
    attending = attention(config, rotary=turning, scaling=scaling, qkv_bias=False, out_bias=False)
    layers = []
    for index in counted(config):
        if index not in hybrids:
            layers.append(LayerSpec(space, None, norm, None))
            continue
        place = hybrids.index(index)
        block = SharedBlockSpec(firsts[place % len(firsts)], place, adapters[0], norm, norm, feeding, adapters[1])
        layers.append(LayerSpec(attending, None, norm, None, beside=space, shared=block))
    # Of layers behind the first ones of each block, where a checkpoint has its weights again.
    again, part = "|".join(str(index) for index in hybrids[len(firsts) :]), names.shared_norm.partition(".")[0]
    ignored = (*names.ignored, *([rf"model\.layers\.({again})\.{part}\..*"] if again else []))
    return Description(decoder(config, layers, norm), replace(names, ignored=ignored))


def _zamba_space(config: Any) -> StateSpaceSpec:
    groups = int(config.mamba_ngroups)
    return StateSpaceSpec(
        groups=groups,
        heads=int(config.n_mamba_heads),
        state_width=int(config.mamba_d_state),
        value_width=int(config.mamba_headdim),
        taps=int(config.mamba_d_conv),
        epsilon=1e-5,
        bias=bool(config.add_bias_linear),
        step_limits=(float(config.time_step_min), float("inf")),
        norm_groups=groups,
    )


_QKV, _ROUTER = "self_attn.qkv_proj.", "mlp.gate.router_mlp."
_ZAYA1 = WeightNames(
    embedding_norm="model.input_hidden_states",
    after_attention="post_attention_residual_scale.hidden_states",
    after_mlp="post_mlp_residual_scale.hidden_states",
    qkv=tuple(f"{_QKV}{name}" for name in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")),
    convolution=f"{_QKV}conv_qk_depthwise",
    key_norm="self_attn.qk_norm.temp",
    router=f"{_ROUTER}out_proj",
    correction="mlp.gate.balancing_biases",
    # What rows are multiplied by, and what is added to them before.
    renamed=tuple(
        (f"{of}_{published}", f"{of}.{own}")
        for of in ("input_hidden_states", "hidden_states", "residual")
        for published, own in (("scale", "weight"), ("bias", "bias"))
    ),
)
_WEIGHED = NormSpec("affine", 0.0, bias=True)


def zaya(config: Any) -> Description:
    """ZAYA1: compressed attention, weighed residuals, and a router that reads what the one of the layer before read. A
    token goes to one expert, or to none."""
    if (config.cca_time0, config.cca_time1) != (2, 2):
        raise FamilyRefused("compressed attention over more than two tokens each is not served")
    norm, count, last = rms_norm(config), int(config.num_experts), int(config.num_hidden_layers) - 1
    layers = []
    for index in counted(config):
        windowed = config.layer_types[index] == "hybrid_sliding"
        window = int(config.sliding_window) if windowed else None
        read = RouterMLPSpec(int(config.router_hidden_size), norm, index > 0, index < last)
        experts = ExpertsSpec(
            count=count,
            top_k=int(config.num_experts_per_tok),
            width=int(config.moe_intermediate_size),
            router=RouterSpec(renormalised=False, correction=True, rounded=True, mlp=read),
            activation=activation(config),
            idle=1,
            idle_returns=False,
        )
        attending = attention(config, index, compressed="halves", window=window)
        layers.append(
            layer(attending, experts, norm, after_attention=_WEIGHED, after_mlp=_WEIGHED, residual_norm=_WEIGHED)
        )
    spec = decoder(config, layers, norm, embedding_norm=_WEIGHED, head_bias=bool(config.lm_head_bias))
    return Description(spec, _ZAYA1)
