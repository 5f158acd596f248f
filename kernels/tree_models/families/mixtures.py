"""Mixtures of experts that stand by themselves: Mixtral, DBRX, the text of Aria, MiniMax-01 and M2, gpt-oss, MiMo-V2,
K-EXAONE, Laguna, Trinity, Step 3.7, Hunyuan, Hy 3, ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
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
    named_activation,
    rms_norm,
)
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FamilyRefused,
    GateSpec,
    HeadNormSpec,
    LightningSpec,
    NormedResidualSpec,
    NormSpec,
    OutputGateSpec,
    RotarySpec,
    RouterSpec,
)

# Added to the sum of the chosen experts' weights, as transformers has it.
_LEAST_SUM = 1e-20
# Of norms: PyTorch's, as transformers' DbrxNormAttentionNorm has it.
_DBRX_EPSILON = 1e-5
# Of the norm behind lightning attention: transformers' MiniMaxLightningAttention takes no other from configurations.
_LIGHTNING_EPSILON = 1e-6
_EXPERT = "block_sparse_moe.experts.{expert}."
# Of gate and up, and what is added to up: transformers' GptOssExperts, whose sigmoid has quick GELU's factor.
_LIMITS = GateSpec(limit=7.0, offset=1.0)
_FFN = "ffn.experts.mlp."
_DBRX = WeightNames(
    embedding="transformer.wte",
    final_norm="transformer.norm_f",
    layer="transformer.blocks.{layer}.",
    before_attention="norm_attn_norm.norm_1",
    before_mlp="norm_attn_norm.norm_2",
    qkv=("norm_attn_norm.attn.Wqkv",),
    out="norm_attn_norm.attn.out_proj",
    router="ffn.router.layer",
    expert_gate_up=(f"{_FFN}w1", f"{_FFN}v1"),
    expert_down=f"{_FFN}w2",
    expert_suffix="",
    experts_lie="flat",
)
_STEP = WeightNames(
    router="moe.gate",
    correction="moe.router_bias",
    expert_gate_up=("moe.gate_proj", "moe.up_proj"),
    expert_down="moe.down_proj",
    shared_gate_up=("share_expert.gate_proj", "share_expert.up_proj"),
    shared_down="share_expert.down_proj",
)
_ARIA = WeightNames(
    router="mlp.router", expert_gate_up=("mlp.experts.fc1",), expert_down="mlp.experts.fc2", experts_lie="by_columns"
)
_ERNIE = WeightNames(correction="mlp.moe_statics.e_score_correction_bias", correction_dimensions=2)
_HUNYUAN: dict[str, Any] = {"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"}
_TRANSPOSED = WeightNames(
    router="mlp.router",
    router_bias="mlp.router.bias",
    expert_gate_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
    expert_suffix="",
    experts_lie="by_neighbours",
)


def mixtral(config: Any) -> Description:
    """Mixtral."""
    return _experts(config, RouterSpec(), windows=True)


def dbrx(config: Any) -> Description:
    """DBRX: LayerNorms without biases, limited queries, keys and values."""
    of_attention, of_experts = config.attn_config, config.ffn_config
    power, limit = of_experts.moe_normalize_expert_weights, of_attention.clip_qkv
    if power not in (None, 1):
        raise FamilyRefused(f"weights of experts whose norm {power} is one are not served")
    norm, clip = NormSpec("layer", _DBRX_EPSILON), None if limit is None else float(limit)
    experts = ExpertsSpec(
        count=int(of_experts.moe_num_experts),
        top_k=int(of_experts.moe_top_k),
        width=int(of_experts.ffn_hidden_size),
        router=RouterSpec(renormalised=power is not None, rounded=True),
        activation=named_activation(of_experts.ffn_act_fn.get("name", "silu")),
    )
    layers = [layer(attention(config, index, clip=clip), experts, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), _DBRX)


def aria(config: Any) -> Description:
    """The text of Aria: experts, and some that every row goes to."""
    experts = ExpertsSpec(
        count=int(config.moe_num_experts),
        top_k=int(config.moe_topk),
        width=int(config.intermediate_size),
        # A softmax over the chosen is one over all, renormalised.
        router=RouterSpec(rounded=True),
        shared=mlp(config, int(config.intermediate_size) * int(config.moe_num_shared_experts)),
    )
    norm = rms_norm(config)
    layers = [layer(attention(config, index), experts, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), _ARIA)


def minimax_m2(config: Any) -> Description:
    """MiniMax M2: sigmoid scores, a bias for the choice, all queries and all keys normed together."""
    router = RouterSpec("sigmoid", correction=True, wide=True)
    return _experts(config, router, head_norm=HeadNormSpec(rms_norm(config), "all_heads"))


def minimax(config: Any) -> Description:
    """MiniMax-01 and M1: lightning attention beside attention, and normed residuals."""
    if config.sliding_window is not None:
        raise FamilyRefused("a sliding window beside lightning attention is not served")
    found = _experts(config, RouterSpec())
    lightning = LightningSpec(
        heads=int(config.num_attention_heads),
        width=head_width(config),
        epsilon=_LIGHTNING_EPSILON,
        layers=int(config.num_hidden_layers),
        all_heads=int(config.num_attention_heads),
    )
    mlp_factors = float(config.mlp_alpha_factor), float(config.mlp_beta_factor)
    layers = []
    for one, kind in zip(found.spec.layers, config.layer_types, strict=True):
        attends = kind == "full_attention"
        of = "full" if attends else "linear"
        kept, added = (float(getattr(config, f"{of}_attn_{name}_factor")) for name in ("alpha", "beta"))
        residual = NormedResidualSpec((kept, added), mlp_factors)
        layers.append(replace(one, attention=one.attention if attends else lightning, normed_residual=residual))
    names = replace(
        found.names,
        mixer_in=("self_attn.qkv_proj", "self_attn.output_gate"),
        mixer_norm="self_attn.norm",
        mixer_out="self_attn.out_proj",
        ignored=(*found.names.ignored, r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"),
    )
    return Description(replace(found.spec, layers=tuple(layers)), names)


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


def gpt_oss(config: Any) -> Description:
    """gpt-oss-20b and -120b."""
    norm = rms_norm(config)
    experts = ExpertsSpec(
        count=int(config.num_local_experts),
        top_k=int(config.num_experts_per_tok),
        width=int(config.intermediate_size),
        router=RouterSpec(bias=True, rounded=True),
        activation="quick_gelu",
        gate=_LIMITS,
        bias=True,
    )
    layers = [layer(attention(config, index, windows=True, sinks=True), experts, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), _TRANSPOSED)


def mimo_v2(config: Any) -> Description:
    """MiMo-V2-Flash: sinks and twice the key heads in layers with windows, values narrower than keys."""
    norm, dense = rms_norm(config), mlp(config, bias=False)
    experts = _mixture(config, config.n_routed_experts, _groups(config))
    layers = []
    for index in counted(config):
        windowed = config.layer_types[index] == "sliding_attention"
        attending = attention(
            config,
            index,
            windows=True,
            kv_heads=int(config.num_key_value_heads) * (2 if windowed else 1),
            value_width=int(config.v_head_dim),
            value_scale=1.0 if config.attention_value_scale is None else float(config.attention_value_scale),
            sinks=windowed,
            out_bias=False,
        )
        layers.append(layer(attending, experts if config.mlp_layer_types[index] == "sparse" else dense, norm))
    return Description(decoder(config, layers, norm), WeightNames(sinks="self_attn.attention_sink_bias"))


def exaone_moe(config: Any) -> Description:
    """K-EXAONE: normed heads; beside layers with windows, others embed no positions."""
    norm, dense = rms_norm(config), mlp(config, bias=False)
    shared = int(config.moe_intermediate_size) * int(config.num_shared_experts)
    experts = _mixture(config, config.num_experts, _groups(config), shared)
    layers = []
    for index in counted(config):
        turns = config.sliding_window is None or config.layer_types[index] == "sliding_attention"
        own: dict[str, Any] = {"head_norm": HeadNormSpec(norm), "qkv_bias": False, "out_bias": False}
        attending = attention(config, index, windows=True, **own, **({} if turns else {"rotary": None}))
        layers.append(layer(attending, experts if config.mlp_layer_types[index] == "sparse" else dense, norm))
    return Description(decoder(config, layers, norm), WeightNames(correction="mlp.e_score_correction_bias"))


def laguna(config: Any) -> Description:
    """Laguna: a gate of each head's output, more heads in layers with windows, sigmoid scores."""
    if config.moe_router_logit_softcapping:
        raise FamilyRefused("capped logits of the router are not served")
    norm, dense = rms_norm(config), mlp(config, bias=False)
    router = RouterSpec("sigmoid", correction=True, scaling=float(config.moe_routed_scaling_factor), rounded=True)
    experts = _mixture(config, config.num_experts, router, int(config.shared_expert_intermediate_size))
    gate = OutputGateSpec("softplus", per_head=config.gating is True or config.gating == "per-head")
    layers = []
    for index in counted(config):
        heads = int(config.num_attention_heads_per_layer[index])
        own = {"heads": heads, "head_norm": HeadNormSpec(norm), "output_gate": gate}
        feeding = experts if config.mlp_layer_types[index] == "sparse" else dense
        layers.append(layer(attention(config, index, windows=True, **own), feeding, norm))
    shared = "mlp.shared_expert."
    names = WeightNames(
        correction="mlp.experts.e_score_correction_bias",
        shared_gate_up=(f"{shared}gate_proj", f"{shared}up_proj"),
        shared_down=f"{shared}down_proj",
    )
    return Description(decoder(config, layers, norm), names)


def step3(config: Any) -> Description:
    """The text of Step 3.7 Flash: a gate of each head's output, more heads in layers with windows, experts
    whose gates are limited once they are activated."""
    if config.use_bidirectional_attention or config.gating not in (True, "per-head"):
        raise FamilyRefused("gates of each number of a head, or tokens that see later ones, are not served")
    norm, layers = rms_norm(config, offset=1.0), []
    router = RouterSpec("sigmoid", correction=True, scaling=float(config.moe_router_scaling_factor))
    for index in counted(config):
        own = {"head_norm": HeadNormSpec(norm), "output_gate": OutputGateSpec("sigmoid", per_head=True)}
        scaling = float(config.query_pre_attn_scalar) ** -0.5
        # Of each layer by itself, as those with windows have other heads.
        attending = attention(config.per_layer_config[index], index, windows=True, scaling=scaling, **own)
        limited, shared = (_limit(limits, index) for limits in (config.swiglu_limits, config.swiglu_limits_shared))
        if config.mlp_layer_types[index] == "dense":
            layers.append(layer(attending, mlp(config, gate=shared), norm))
            continue
        experts = ExpertsSpec(
            count=int(config.n_routed_experts),
            top_k=int(config.num_experts_per_tok),
            width=int(config.moe_intermediate_size),
            router=router,
            activation=activation(config),
            gate=limited,
            shared=mlp(config, config.share_expert_dim, gate=shared),
        )
        layers.append(layer(attending, experts, norm))
    return Description(decoder(config, layers, norm), _STEP)


def _limit(limits: Any, index: int) -> GateSpec:
    """A layer's own of a list, in which nothing and zero are no limit."""
    limit = limits[index] if limits else None
    return GateSpec(float(limit), limits_activated=True) if limit else GateSpec()


def afmoe(config: Any) -> Description:
    """Trinity: gated attention that embeds positions where it has a window, norms before and behind each half."""
    norm, dense = rms_norm(config), mlp(config, bias=False)
    router = RouterSpec("sigmoid", least_sum=_LEAST_SUM, correction=True, scaling=float(config.route_scale))
    shared = int(config.moe_intermediate_size) * int(config.num_shared_experts)
    experts = _mixture(config, config.num_experts, router, shared)
    layers = []
    for index in counted(config):
        own: dict[str, Any] = {} if config.layer_types[index] == "sliding_attention" else {"rotary": None}
        own |= {"head_norm": HeadNormSpec(norm), "output_gate": OutputGateSpec("sigmoid")}
        attending = attention(config, index, windows=True, **own)
        feeding = experts if index >= config.num_dense_layers else dense
        layers.append(layer(attending, feeding, norm, after_attention=norm, after_mlp=norm))
    names = WeightNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_mlp_layernorm",
        after_mlp="post_mlp_layernorm",
        output_gate="self_attn.gate_proj",
        router="mlp.router.gate",
        correction="mlp.expert_bias",
    )
    scale = float(config.hidden_size) ** 0.5 if config.mup_enabled else 1.0
    return Description(decoder(config, layers, norm, embedding_scale=scale), names)


def hunyuan_dense(config: Any) -> Description:
    """Hunyuan, dense: queries and keys are normed once they are rotated."""
    norm, feeding = rms_norm(config), mlp(config, bias=False)
    layers = [layer(_hunyuan_attention(config), feeding, norm) for _ in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames(**_HUNYUAN))


def hunyuan_moe(config: Any) -> Description:
    """Hunyuan with experts, and one for every row."""
    norm, layers = rms_norm(config), []
    for index in counted(config):
        count, chosen = (_own(number, index) for number in (config.num_experts, config.moe_topk))
        experts = ExpertsSpec(
            count=count,
            top_k=chosen,
            width=int(config.intermediate_size),
            router=RouterSpec(wide=True),
            activation=activation(config),
            shared=mlp(config, bias=False),
        )
        layers.append(layer(_hunyuan_attention(config), experts, norm))
    names: dict[str, Any] = {
        "router": "mlp.gate.wg",
        "shared_gate_up": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        "shared_down": "mlp.shared_mlp.down_proj",
    }
    return Description(decoder(config, layers, norm), WeightNames(**_HUNYUAN, **names))


def hy_v3(config: Any) -> Description:
    """Hy 3: sigmoid scores, a bias for the choice, normed heads."""
    norm, dense = rms_norm(config), mlp(config)
    width = int(config.moe_intermediate_size)
    router = RouterSpec(
        "sigmoid", least_sum=_LEAST_SUM, correction=True, scaling=float(config.router_scaling_factor), wide=True
    )
    experts = ExpertsSpec(
        count=int(config.num_experts),
        top_k=int(config.num_experts_per_tok),
        width=width,
        router=router,
        activation=activation(config),
        shared=mlp(config, width * int(config.num_shared_experts)),
    )
    layers = [
        layer(attention(config, index, head_norm=HeadNormSpec(norm)), experts if kind == "sparse" else dense, norm)
        for index, kind in enumerate(config.mlp_layer_types)
    ]
    names = WeightNames(
        router="mlp.router.gate",
        correction="mlp.expert_bias",
        shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    )
    return Description(decoder(config, layers, norm), names)


def _hunyuan_attention(config: Any) -> AttentionSpec:
    return attention(
        config, rotary=_hunyuan_rotary(config), head_norm=HeadNormSpec(rms_norm(config), after_rotary=True)
    )


def _hunyuan_rotary(config: Any) -> RotarySpec:
    """With `alpha` the base is larger, whatever the context."""
    rope, width = config.rope_parameters, head_width(config)
    alpha = rope.get("alpha")
    if rope.get("rope_type") != "dynamic" or not alpha:
        return rotary(config, width)
    stretched = {"rope_type": "default", "rope_theta": rope["rope_theta"] * alpha ** (width / (width - 2))}
    plain = SimpleNamespace(rope_parameters=stretched, max_position_embeddings=config.max_position_embeddings)
    return rotary(plain, width)


def _own(number: Any, layer: int) -> int:
    """A layer's own number, of one for all or a list."""
    found = number if isinstance(number, int) else number[layer]
    if not found:
        raise FamilyRefused("a layer without experts among those with some is not served")
    return int(found)


def _groups(config: Any) -> RouterSpec:
    """Sigmoid scores and a bias for the choice, of the best groups."""
    return RouterSpec(
        "sigmoid",
        renormalised=bool(config.norm_topk_prob),
        least_sum=_LEAST_SUM,
        correction=True,
        groups=int(config.n_group),
        top_groups=int(config.topk_group),
        group_score="top2",
        scaling=float(config.routed_scaling_factor),
        wide=True,
    )


def _mixture(config: Any, count: int, router: RouterSpec, shared: int = 0) -> ExpertsSpec:
    return ExpertsSpec(
        count=int(count),
        top_k=int(config.num_experts_per_tok),
        width=int(config.moe_intermediate_size),
        router=router,
        activation=activation(config),
        shared=mlp(config, shared, bias=False) if shared else None,
    )


def ernie4_5(config: Any) -> Description:
    """ERNIE 4.5, dense."""
    norm, feeding = rms_norm(config), mlp(config, bias=bool(config.use_bias))
    layers = [layer(_ernie_attention(config, index), feeding, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())


def ernie4_5_moe(config: Any) -> Description:
    """ERNIE 4.5 with experts: softmax scores, a bias for the choice."""
    kinds = []
    for index in counted(config):
        within = config.moe_layer_start_index <= index <= config.moe_layer_end_index
        kinds.append("sparse" if within and (index + 1) % config.moe_layer_interval == 0 else "dense")
    return _ernie_experts(config, int(config.moe_intermediate_size), kinds, _ERNIE)


def ernie4_5_vl(config: Any) -> Description:
    """The text of ERNIE 4.5 VL: that of ERNIE 4.5, beside experts for images. Its rotary embedding has three positions,
    which are equal in texts."""
    count = int(config.moe_num_experts)
    seeing = "|".join(str(expert) for expert in range(count, 2 * count))
    of_images = rf"model\.layers\.\d+\.mlp\.(gate\.weight_1|experts\.({seeing})\..*|vision_moe\..*)"
    names = replace(_ERNIE, routers_see=True, ignored=(*_ERNIE.ignored, of_images))
    return _ernie_experts(config, int(config.moe_intermediate_size[0]), config.mlp_layer_types, names)


def _ernie_experts(config: Any, width: int, kinds: Sequence[str], names: WeightNames) -> Description:
    norm, bias, shared = rms_norm(config), bool(config.use_bias), int(config.moe_num_shared_experts)
    dense = mlp(config, bias=bias)
    experts = ExpertsSpec(
        count=int(config.moe_num_experts),
        top_k=int(config.moe_k),
        width=width,
        router=RouterSpec(correction=True, clamped_sum=float(config.moe_norm_min), wide=True, rounded=True),
        activation=activation(config),
        shared=mlp(config, width * shared, bias=bias) if shared else None,
    )
    layers = [
        layer(_ernie_attention(config, index), experts if kind == "sparse" else dense, norm)
        for index, kind in enumerate(kinds)
    ]
    return Description(decoder(config, layers, norm), names)


def _ernie_attention(config: Any, index: int) -> AttentionSpec:
    turning, bias = rotary(config, head_width(config), interleaved=True), bool(config.use_bias)
    return attention(config, index, rotary=turning, qkv_bias=bias, out_bias=bias)
