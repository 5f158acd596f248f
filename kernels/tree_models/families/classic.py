"""Decoders by the plan of GPT, with LayerNorms and MLPs without gates: GPT-1, GPT-2, StarCoder 1, GPT-Neo, GPT-J,
CodeGen, GPT-NeoX and Pythia, OPT, BioGPT, XGLM, Falcon, BLOOM, MPT, Persimmon. ModernBERT's decoder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tree_models.decoder_spec import HeadTransformSpec, PositionTableSpec
from tree_models.families.common import Description, attention, counted, decoder, layer, mlp, named_activation
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import (
    AttentionSpec,
    FamilyRefused,
    HeadNormSpec,
    MLPSpec,
    NormSpec,
    RotarySpec,
)

# Of norms: PyTorch's, as transformers' OPTDecoderLayer and BioGptDecoderLayer have it.
_EPSILON = 1e-5
# Tokens that BLOOM was trained with (arXiv 2211.05100), where its configuration has no `seq_length`.
_BLOOM_CONTEXT = 2048
# Causal masks that older writers stored with the weights.
_IGNORED = (*WeightNames().ignored, r".*\.(attn|attention)\.(bias|causal_mask)")
_TRANSFORMER: dict[str, Any] = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "layer": "transformer.h.{layer}.",
    "before_attention": "ln_1",
    "before_mlp": "ln_2",
    "qkv": ("attn.c_attn",),
    "out": "attn.c_proj",
    "gate_up": ("mlp.c_fc",),
    "down": "mlp.c_proj",
    "ignored": _IGNORED,
}
_GPT = WeightNames(
    by_columns=True,
    **_TRANSFORMER
    | {"embedding": "transformer.tokens_embed", "positions": "transformer.positions_embed", "final_norm": ""}
    | {"before_attention": "", "before_mlp": "", "after_attention": "ln_1", "after_mlp": "ln_2"},
)
_GPT_NEO = WeightNames(
    **_TRANSFORMER | {"qkv": tuple(f"attn.attention.{part}_proj" for part in "qkv"), "out": "attn.attention.out_proj"}
)
_GPT_J = WeightNames(
    **_TRANSFORMER
    | {"qkv": tuple(f"attn.{part}_proj" for part in "qkv"), "out": "attn.out_proj"}
    | {"gate_up": ("mlp.fc_in",), "down": "mlp.fc_out"}
)
_CODEGEN = replace(_GPT_J, qkv=("attn.qkv_proj",))
_4H: dict[str, Any] = {"gate_up": ("mlp.dense_h_to_4h",), "down": "mlp.dense_4h_to_h", "ignored": _IGNORED}
_GPT_NEOX = WeightNames(
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{layer}.",
    qkv=("attention.query_key_value",),
    qkv_by_group=True,
    out="attention.dense",
    **_4H,
)
_JAPANESE = "gpt_neox_japanese."
_GPT_NEOX_JAPANESE = replace(
    _GPT_NEOX,
    embedding=f"{_JAPANESE}embed_in",
    final_norm=f"{_JAPANESE}final_layer_norm",
    layer=f"{_JAPANESE}layers.{{layer}}.",
    renamed=(("attention.dense_bias", "attention.dense.bias"),),
)
_FALCON = WeightNames(
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    layer="transformer.h.{layer}.",
    qkv=("self_attention.query_key_value",),
    qkv_by_group=True,
    out="self_attention.dense",
    **_4H,
)
_BLOOM = replace(_FALCON, embedding_norm="transformer.word_embeddings_layernorm")
_MPT = WeightNames(
    embedding="transformer.wte",
    final_norm="transformer.norm_f",
    layer="transformer.blocks.{layer}.",
    before_attention="norm_1",
    before_mlp="norm_2",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    gate_up=("ffn.up_proj",),
    down="ffn.down_proj",
)
_PERSIMMON = WeightNames(
    final_norm="model.final_layernorm",
    qkv=("self_attn.query_key_value",),
    qkv_by_group=True,
    out="self_attn.dense",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    **_4H,
)
_OPT: dict[str, Any] = {
    "before_attention": "self_attn_layer_norm",
    "before_mlp": "final_layer_norm",
    "out": "self_attn.out_proj",
    "gate_up": ("fc1",),
    "down": "fc2",
}
_MODERNBERT = WeightNames(
    embedding="model.embeddings.tok_embeddings",
    embedding_norm="model.embeddings.norm",
    final_norm="model.final_norm",
    head="decoder",
    before_attention="attn_norm",
    before_mlp="mlp_norm",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
)


def gpt2(config: Any) -> Description:
    """GPT-2 and GPT-SW3: products whose weights have inputs before outputs."""
    scaling = _width(config) ** -0.5 if config.scale_attn_weights else 1.0
    by_layer = bool(config.scale_attn_by_inverse_layer_idx)
    attending = [_attention(config, scaling=scaling / (index + 1 if by_layer else 1)) for index in counted(config)]
    return _gpt(config, attending, WeightNames(by_columns=True, **_TRANSFORMER), config.n_inner)


def openai_gpt(config: Any) -> Description:
    """GPT-1: a norm behind each sum, and none behind the layers."""
    norm = NormSpec("layer", float(config.layer_norm_epsilon), bias=True)
    # Its "gelu" is the approximation.
    of = "gelu_new" if config.afn == "gelu" else config.afn
    feeding = MLPSpec(4 * int(config.hidden_size), named_activation(of), gated=False, bias=True)
    changes = {"before_attention": None, "before_mlp": None, "after_attention": norm, "after_mlp": norm}
    layers = [layer(_attention(config), feeding, norm, norms_sums=True, **changes) for _ in counted(config)]
    positions = PositionTableSpec(int(config.max_position_embeddings))
    ends = NormSpec("none", 0.0, weight=False)
    return Description(decoder(config, layers, ends, positions=positions), _GPT)


def gpt_bigcode(config: Any) -> Description:
    """StarCoder 1 and SantaCoder: one key head for all."""
    heads, scaling = int(config.num_attention_heads), _width(config) ** -0.5 if config.scale_attn_weights else 1.0
    own = _attention(config, kv_heads=1 if config.multi_query else heads, scaling=scaling)
    names = WeightNames(qkv_by_group=True, **_TRANSFORMER)
    return _gpt(config, [own for _ in counted(config)], names, config.n_inner)


def gpt_neo(config: Any) -> Description:
    """GPT-Neo: scores that are not scaled, and windows in every second layer."""
    # Of transformers' two kinds.
    windows = {"global": None, "local": int(config.window_size)}
    attending = [
        _attention(config, scaling=1.0, qkv_bias=False, window=windows[kind]) for kind in config.attention_layers
    ]
    return _gpt(config, attending, _GPT_NEO, config.intermediate_size)


def _gpt(config: Any, attending: list[AttentionSpec], names: WeightNames, width: int | None) -> Description:
    norm, feeding = NormSpec("layer", float(config.layer_norm_epsilon), bias=True), _feeding(config, width)
    layers = [layer(own, feeding, norm) for own in attending]
    positions = PositionTableSpec(int(config.max_position_embeddings))
    return Description(decoder(config, layers, norm, positions=positions), names)


def codegen(config: Any) -> Description:
    """CodeGen: GPT-J, whose first product lies in the shards of the machine that trained it."""
    return gptj(config, _CODEGEN, shards=4)


def gptj(config: Any, names: WeightNames | None = None, **changes: Any) -> Description:
    """GPT-J: attention and MLP read the same rows, neighbouring pairs of a part of each head are rotated. With other
    names, and `changes` of attention."""
    if not config.rotary_dim:
        raise FamilyRefused("heads that are rotated by positions of all heads together are not served")
    norm, width = NormSpec("layer", float(config.layer_norm_epsilon), bias=True), int(config.rotary_dim)
    # transformers' create_sinusoidal_positions.
    frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    turning = RotarySpec(tuple(frequencies.tolist()), interleaved=True)
    own = _attention(config, qkv_bias=False, out_bias=False, rotary=turning, **changes)
    layers = [
        layer(own, _feeding(config, config.n_inner), norm, before_mlp=None, parallel=True) for _ in counted(config)
    ]
    return Description(decoder(config, layers, norm, head_bias=True), names or _GPT_J)


def gpt_neox(config: Any) -> Description:
    """GPT-NeoX and Pythia: attention and MLP side by side, each behind a norm of its own."""
    norm, bias = NormSpec("layer", float(config.layer_norm_eps), bias=True), bool(config.attention_bias)
    own = _attention(config, qkv_bias=bias, out_bias=bias, rotary=rotary(config, _width(config)))
    feeding, parallel = mlp(config, gated=False, bias=True), bool(config.use_parallel_residual)
    layers = [layer(own, feeding, norm, parallel=parallel) for _ in counted(config)]
    return Description(decoder(config, layers, norm), _GPT_NEOX)


def gpt_neox_japanese(config: Any) -> Description:
    """GPT-NeoX-Japanese: attention and MLP one after the other, and one bias, behind the last layer's attention."""
    norm = NormSpec("layer", float(config.layer_norm_eps), bias=True)
    own = _attention(config, qkv_bias=False, out_bias=False, rotary=rotary(config, _width(config)))
    feeding = mlp(config, int(config.hidden_size * config.intermediate_multiple_size), gated=False, bias=False)
    layers = [layer(own, feeding, norm) for _ in counted(config)]
    layers[-1] = layer(replace(own, out_bias=True), feeding, norm)
    return Description(decoder(config, layers, norm), _GPT_NEOX_JAPANESE)


def falcon(config: Any) -> Description:
    """Falcon 7B, 40B, 180B and Falcon 2: attention and MLP side by side, behind one norm or one each. Falcon-RW: scores
    that fall with distance (ALiBi), and no rotation."""
    grouped, aside = bool(config.new_decoder_architecture), bool(config.parallel_attn)
    if grouped and not aside:
        raise FamilyRefused("grouped key heads without parallel attention are not served")
    heads, bias = int(config.num_attention_heads), bool(config.bias)
    keys = int(config.num_kv_heads) if grouped else 1 if config.multi_query else heads
    if config.alibi and keys != heads:
        raise FamilyRefused("scores that fall with distance (alibi) over keys that heads share are not served")
    turning = RotarySpec((), place_slopes=_octaves(heads)) if config.alibi else rotary(config, _width(config))
    own = _attention(config, kv_heads=keys, qkv_bias=bias, out_bias=bias, rotary=turning)
    feeding = MLPSpec(int(config.ffn_hidden_size), named_activation(config.activation), gated=False, bias=bias)
    norm, names = NormSpec("layer", float(config.layer_norm_epsilon), bias=True), _FALCON
    norms, changes = config.num_ln_in_parallel_attn or (2 if grouped else 1), dict[str, Any](parallel=aside)
    if grouped and norms == 2:
        names = replace(names, before_attention="ln_attn", before_mlp="ln_mlp")
    elif aside:
        changes["before_mlp"] = None
    layers = [layer(own, feeding, norm, **changes) for _ in counted(config)]
    return Description(decoder(config, layers, norm), names)


def _octaves(heads: int) -> tuple[float, ...]:
    """transformers' build_alibi_tensor: powers of one base, and of its root for heads above a power of two."""
    whole = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * power / whole) for power in range(1, whole + 1)]
    return (*slopes, *[2.0 ** (-4 * power / whole) for power in range(1, 2 * (heads - whole), 2)])


def bloom(config: Any) -> Description:
    """BLOOM: scores that fall with distance (ALiBi), and embedded rows that are normed."""
    if config.apply_residual_connection_post_layernorm:
        raise FamilyRefused("residuals of normed rows are not served")
    norm, heads = NormSpec("layer", float(config.layer_norm_epsilon), bias=True), int(config.num_attention_heads)
    own = _attention(config, slopes=_octaves(heads))
    feeding = MLPSpec(4 * int(config.hidden_size), "gelu_tanh", gated=False, bias=True)
    layers = [layer(own, feeding, norm) for _ in counted(config)]
    # No position is embedded, so texts have no longest one but what the model was trained with.
    longest = int(getattr(config, "seq_length", 0) or _BLOOM_CONTEXT)
    return Description(decoder(config, layers, norm, embedding_norm=norm, max_positions=longest), _BLOOM)


def mpt(config: Any) -> Description:
    """MPT: scores that fall with distance (ALiBi), and no biases."""
    of_attention, heads, width = config.attn_config, int(config.n_heads), _width(config)
    if of_attention.qk_ln or of_attention.attn_type != "multihead_attention":
        raise FamilyRefused("normed heads, or one key head for all, are not served")
    if not of_attention.alibi or of_attention.alibi_bias_max != 8:
        # transformers' model computes as if it were so.
        raise FamilyRefused("slopes of scores that are not of 8 octaves are not served")
    # transformers' build_mpt_alibi_tensor: of more heads than there are, every second one first.
    whole = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8 * power / whole) for power in range(1, whole + 1)]
    if whole != heads:
        slopes = [*slopes[1::2], *slopes[::2]][:heads]
    own = _attention(
        config,
        scaling=float(of_attention.softmax_scale or width**-0.5),
        qkv_bias=False,
        out_bias=False,
        clip=float(of_attention.clip_qkv) if of_attention.clip_qkv else None,
        slopes=tuple(slopes),
    )
    norm = NormSpec("layer", float(config.layer_norm_epsilon))
    feeding = MLPSpec(4 * int(config.hidden_size), "gelu", gated=False)
    layers = [layer(own, feeding, norm) for _ in counted(config)]
    return Description(decoder(config, layers, norm, max_positions=int(config.max_seq_len)), _MPT)


def persimmon(config: Any) -> Description:
    """Persimmon: heads are normed with biases, and a part of each is rotated."""
    norm = NormSpec("layer", float(config.layer_norm_eps), bias=True)
    normed = HeadNormSpec(norm) if config.qk_layernorm else None
    own = _attention(config, rotary=rotary(config, _width(config)), head_norm=normed)
    feeding = mlp(config, gated=False, bias=True)
    layers = [layer(own, feeding, norm) for _ in counted(config)]
    return Description(decoder(config, layers, norm), _PERSIMMON)


def opt(config: Any) -> Description:
    """OPT, but for the 350M model, whose norms are behind its halves."""
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        raise FamilyRefused("norms behind attention and MLP are not served")
    if config.word_embed_proj_dim != config.hidden_size:
        raise FamilyRefused("embeddings of another width than the layers' are not served")
    stored, bias = bool(config.layer_norm_elementwise_affine), bool(config.enable_bias)
    norm = NormSpec("layer", _EPSILON, weight=stored, bias=stored)
    body = "model.decoder."
    names = WeightNames(
        embedding=f"{body}embed_tokens",
        positions=f"{body}embed_positions",
        final_norm=f"{body}final_layer_norm",
        layer=f"{body}layers.{{layer}}.",
        **_OPT,
    )
    return _opt(
        config,
        norm,
        MLPSpec(int(config.ffn_dim), named_activation(config.activation_function), gated=False, bias=bias),
        bias,
        names,
    )


def biogpt(config: Any) -> Description:
    """BioGPT: OPT's layers behind embeddings that are scaled."""
    norm = NormSpec("layer", _EPSILON, bias=True)
    feeding = mlp(config, gated=False, bias=True)
    names = WeightNames(
        embedding="biogpt.embed_tokens",
        positions="biogpt.embed_positions",
        final_norm="biogpt.layer_norm",
        head="output_projection",
        layer="biogpt.layers.{layer}.",
        **_OPT,
    )
    scale = float(config.hidden_size**0.5) if config.scale_embedding else 1.0
    return _opt(config, norm, feeding, True, names, embedding_scale=scale)


def xglm(config: Any) -> Description:
    """XGLM: BioGPT's layers behind a table of sines."""
    norm = NormSpec("layer", _EPSILON, bias=True)
    feeding = MLPSpec(int(config.ffn_dim), named_activation(config.activation_function), gated=False, bias=True)
    scale = float(config.hidden_size**0.5) if config.scale_embedding else 1.0
    found = _opt(config, norm, feeding, True, WeightNames(final_norm="model.layer_norm", **_OPT), embedding_scale=scale)
    positions = PositionTableSpec(int(config.max_position_embeddings) + 2, 2, sines=True)
    return replace(found, spec=replace(found.spec, positions=positions))


def _opt(config: Any, norm: NormSpec, feeding: MLPSpec, bias: bool, names: WeightNames, **ends: Any) -> Description:
    own = _attention(config, qkv_bias=bias, out_bias=bias)
    layers = [layer(own, feeding, norm) for _ in counted(config)]
    # Two rows in front are of padding, as fairseq has them.
    positions = PositionTableSpec(int(config.max_position_embeddings) + 2, 2)
    return Description(decoder(config, layers, norm, positions=positions, **ends), names)


def modernbert(config: Any) -> Description:
    """ModernBERT's decoder: embedded rows are normed, so the first layer does not; the head reads transformed rows."""
    norm = NormSpec("layer", float(config.norm_eps), bias=bool(config.norm_bias))
    heads = int(config.num_attention_heads)
    layers = [
        layer(attention(config, index, windows=True, kv_heads=heads), mlp(config), norm) for index in counted(config)
    ]
    layers[0] = replace(layers[0], before_attention=None)
    transform = HeadTransformSpec(named_activation(config.classifier_activation), norm, bool(config.classifier_bias))
    ends = {"embedding_norm": norm, "head_transform": transform, "head_bias": bool(config.decoder_bias)}
    return Description(decoder(config, layers, norm, **ends), _MODERNBERT)


def _width(config: Any) -> int:
    return int(config.hidden_size) // int(config.num_attention_heads)


def _attention(config: Any, **changes: Any) -> AttentionSpec:
    """Attention of as many key heads as queries have, with biases and without positions, with `changes`."""
    heads, width = int(config.num_attention_heads), _width(config)
    usual: dict[str, Any] = {"heads": heads, "kv_heads": heads, "head_width": width, "scaling": width**-0.5}
    return AttentionSpec(**(usual | {"rotary": None, "qkv_bias": True, "out_bias": True} | changes))


def _feeding(config: Any, width: int | None) -> MLPSpec:
    """An MLP of this width, or of four times the hidden size."""
    activation = named_activation(config.activation_function)
    return MLPSpec(int(width or 4 * config.hidden_size), activation, gated=False, bias=True)
