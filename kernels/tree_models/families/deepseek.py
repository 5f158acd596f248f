"""DeepSeek V2, V3 and R1, Kimi K2, and the families with their latent attention: GLM-4.7-Flash, A.X-K1, Youtu,
MiniCPM3, Kimi Linear, LongCat-Flash, Mistral 4."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tree_models.families.common import Description, activation, counted, decoder, layer, mlp, rms_norm
from tree_models.families.rotary import rotary, yarn_softness
from tree_models.names import WeightNames
from tree_models.spec import (
    ExpertsSpec,
    FamilyRefused,
    KimiDeltaSpec,
    LatentSpec,
    PositionScale,
    RotarySpec,
    RouterSpec,
)

# Added to the sum of the chosen experts' weights: transformers' DeepseekV3TopkRouter.
_LEAST_SUM = 1e-20
_DELTA, _EXPERTS = "self_attn.", "block_sparse_moe."
_KIMI = WeightNames(
    mixer_in=tuple(f"{_DELTA}{name}_proj" for name in ("q", "k", "v", "f_a", "g_a", "b")),
    mixer_gates=(f"{_DELTA}f_b_proj", f"{_DELTA}g_b_proj"),
    convolution=f"{_DELTA}conv1d",
    convolution_parts=(f"{_DELTA}q_conv1d", f"{_DELTA}k_conv1d", f"{_DELTA}v_conv1d"),
    # Of dense layers as transformers writes them.
    renamed=tuple((f"{_EXPERTS}{name}_proj", f"mlp.{name}_proj") for name in ("gate", "up", "down")),
    decay=f"{_DELTA}A_log",
    decay_bias=f"{_DELTA}dt_bias",
    mixer_norm=f"{_DELTA}o_norm",
    mixer_out=f"{_DELTA}o_proj",
    router=f"{_EXPERTS}gate",
    correction=f"{_EXPERTS}gate.e_score_correction_bias",
    expert_gate_up=(f"{_EXPERTS}experts.{{expert}}.w1", f"{_EXPERTS}experts.{{expert}}.w3"),
    expert_down=f"{_EXPERTS}experts.{{expert}}.w2",
    shared_gate_up=(f"{_EXPERTS}shared_experts.gate_proj", f"{_EXPERTS}shared_experts.up_proj"),
    shared_down=f"{_EXPERTS}shared_experts.down_proj",
)
_HALF = "self_attn.{half}."
_LONGCAT = WeightNames(
    before_attention="input_layernorm.{half}",
    before_mlp="post_attention_layernorm.{half}",
    query_latent=f"{_HALF}q_a_proj",
    query_latent_norm=f"{_HALF}q_a_layernorm",
    query_expanding=f"{_HALF}q_b_proj",
    latent=f"{_HALF}kv_a_proj_with_mqa",
    latent_norm=f"{_HALF}kv_a_layernorm",
    expanding=f"{_HALF}kv_b_proj",
    out=f"{_HALF}o_proj",
    gate_up=("mlps.{half}.gate_proj", "mlps.{half}.up_proj"),
    down="mlps.{half}.down_proj",
    router="mlp.router.classifier",
    correction="mlp.router.e_score_correction_bias",
)


def deepseek_v2(config: Any) -> Description:
    """DeepSeek V2 and V2-Lite: softmax over all experts, or those of the best groups."""
    grouped = config.topk_method == "group_limited_greedy"
    router = RouterSpec(
        renormalised=False,
        groups=int(config.n_group) if grouped else 1,
        top_groups=int(config.topk_group) if grouped else 1,
        scaling=float(config.routed_scaling_factor),
        wide=True,
    )
    return _latent_experts(config, _experts(config, router), latent_attention(config, interleaved=True))


def deepseek_v3(config: Any) -> Description:
    """DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash: sigmoid scores, a bias that balances load."""
    attending = latent_attention(config, interleaved=bool(config.rope_interleave))
    return _latent_experts(config, sigmoid_experts(config), attending)


def axk1(config: Any) -> Description:
    """A.X-K1: DeepSeek V3 with a norm behind experts."""
    found, norm = deepseek_v3(config), rms_norm(config)
    layers = (replace(one, after_mlp=norm) if isinstance(one.mlp, ExpertsSpec) else one for one in found.spec.layers)
    return Description(replace(found.spec, layers=tuple(layers)), WeightNames(after_mlp="post_mlp_layernorm"))


def youtu(config: Any) -> Description:
    """Youtu-LLM: latent attention and dense layers."""
    norm, feeding = rms_norm(config), mlp(config, bias=False)
    attending = latent_attention(config, interleaved=bool(config.rope_interleave))
    return Description(decoder(config, [layer(attending, feeding, norm)] * len(counted(config)), norm), WeightNames())


def minicpm3(config: Any) -> Description:
    """MiniCPM3: latent attention, scaled embeddings, residuals and logits."""
    norm, feeding = rms_norm(config), mlp(config, bias=False)
    count = len(counted(config))
    one = layer(
        latent_attention(config, interleaved=False),
        feeding,
        norm,
        residual_scale=float(config.scale_depth) / math.sqrt(count),
    )
    scales = {"embedding_scale": float(config.scale_emb), "logits_scale": 1.0 / float(config.logits_scaling)}
    return Description(decoder(config, [one] * count, norm, **scales), WeightNames())


def mistral4(config: Any) -> Description:
    """Mistral Small 4's text: latent attention whose queries grow with their position, softmax scores."""
    plain, turned, rope = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim), config.rope_parameters
    beta = rope.get("llama_4_scaling_beta")
    scale = PositionScale(float(beta), int(rope["original_max_position_embeddings"])) if beta else None
    # Its share of a whole head is what is rotated.
    interleaved = bool(config.rope_interleave)
    turning = replace(rotary(config, plain + turned, interleaved=interleaved), query_scale=scale)
    attending = replace(latent_attention(config, interleaved=interleaved), rotary=turning)
    experts = _experts(config, _of_best_groups(config, rounded=True))
    return _latent_experts(config, experts, attending)


def longcat_flash(config: Any) -> Description:
    """LongCat-Flash: each layer is two, and experts beside the first one's MLP are added behind the second. Some
    experts give back what they read."""
    norm, hidden, count = rms_norm(config), int(config.hidden_size), int(config.n_routed_experts)
    # Of the latents of queries, which scores grow with, and of keys and values.
    of_queries, of_keys = ((hidden / int(width)) ** 0.5 for width in (config.q_lora_rank, config.kv_lora_rank))
    attending = latent_attention(config, interleaved=True)
    attending = replace(attending, scaling=attending.scaling * of_queries, latent_scale=of_keys)
    experts = ExpertsSpec(
        count=count,
        top_k=int(config.moe_topk),
        width=int(config.expert_ffn_hidden_size),
        router=RouterSpec(renormalised=False, correction=True, scaling=float(config.routed_scaling_factor), wide=True),
        activation=activation(config),
        idle=int(config.zero_expert_num or 0),
    )
    second = layer(attending, mlp(config, int(config.ffn_hidden_size), bias=False), norm)
    layers = [replace(second, ahead=experts), second] * int(config.num_layers)
    idle = "|".join(str(expert) for expert in range(count, count + experts.idle))
    names = replace(_LONGCAT, numbers=tuple(index // 2 for index in range(len(layers))))
    if idle:
        # transformers writes weights for them.
        names = replace(names, ignored=(*names.ignored, rf"model\.layers\.\d+\.mlp\.experts\.({idle})\..*"))
    return Description(decoder(config, layers, norm), names)


def kimi_linear(config: Any) -> Description:
    """Kimi Linear: Kimi Delta Attention beside latent attention without positions."""
    if activation(config) != "silu":
        raise FamilyRefused(f"the activation {config.hidden_act} of a delta net is not served")
    norm, dense, experts = rms_norm(config), mlp(config, bias=False), sigmoid_experts(config)
    delta = KimiDeltaSpec(
        heads=int(config.linear_num_heads),
        width=int(config.linear_head_dim),
        taps=int(config.linear_conv_kernel_dim),
        epsilon=float(config.rms_norm_eps),
    )
    plain, shared = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)
    # Its part of the keys that all heads share is not turned: all angles are zero.
    still = RotarySpec((0.0,) * (shared // 2))
    attending = _latents(config, (plain + shared) ** -0.5, still)
    layers = []
    for index in counted(config):
        mixing: LatentSpec | KimiDeltaSpec = attending if config.layer_types[index] == "full_attention" else delta
        layers.append(layer(mixing, experts if config.mlp_layer_types[index] == "sparse" else dense, norm))
    return Description(decoder(config, layers, norm), _KIMI)


def latent_attention(config: Any, *, interleaved: bool) -> LatentSpec:
    """The attention of a configuration with latents. Under YaRN with `mscale_all_dim`, scores are larger."""
    plain, turned = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)
    scaling, rope = (plain + turned) ** -0.5, config.rope_parameters
    every = float(rope.get("mscale_all_dim") or 0.0)
    if rope.get("rope_type", "default") != "default" and every:
        scaling *= yarn_softness(float(rope["factor"]), every) ** 2
    return _latents(config, scaling, rotary(config, turned, interleaved=interleaved))


def _latents(config: Any, scaling: float, turning: RotarySpec) -> LatentSpec:
    return LatentSpec(
        heads=int(config.num_attention_heads),
        latent=int(config.kv_lora_rank),
        plain=int(config.qk_nope_head_dim),
        value=int(config.v_head_dim),
        scaling=scaling,
        rotary=turning,
        query_latent=None if config.q_lora_rank is None else int(config.q_lora_rank),
        bias=bool(getattr(config, "attention_bias", False)),
    )


def sigmoid_experts(config: Any) -> ExpertsSpec:
    """DeepSeek V3's experts: of the best groups, by sigmoid scores and a bias."""
    return _experts(config, _of_best_groups(config, scores="sigmoid", correction=True, wide=True))


def _of_best_groups(config: Any, **more: Any) -> RouterSpec:
    """Experts of the groups whose two best have most."""
    return RouterSpec(
        renormalised=bool(config.norm_topk_prob),
        least_sum=_LEAST_SUM,
        groups=int(config.n_group),
        top_groups=int(config.topk_group),
        group_score="top2",
        scaling=float(config.routed_scaling_factor),
        **more,
    )


def _experts(config: Any, router: RouterSpec) -> ExpertsSpec:
    width = int(config.moe_intermediate_size)
    shared = int(config.n_shared_experts or 0)
    return ExpertsSpec(
        count=int(getattr(config, "n_routed_experts", 0) or config.num_local_experts),
        top_k=int(config.num_experts_per_tok),
        width=width,
        router=router,
        activation=activation(config),
        shared=mlp(config, width * shared, bias=False) if shared else None,
    )


def _latent_experts(config: Any, experts: ExpertsSpec, attending: LatentSpec) -> Description:
    norm, dense = rms_norm(config), mlp(config, bias=False)
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is None:
        kinds = ["sparse" if index >= config.first_k_dense_replace else "dense" for index in counted(config)]
    layers = [layer(attending, experts if kind == "sparse" else dense, norm) for kind in kinds]
    return Description(decoder(config, layers, norm), WeightNames())
