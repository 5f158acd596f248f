"""Gemma 1 to 4 and 3n, Gemma 4's assistant, VaultGemma, and the text of Muse-Glimmer, whose layers are Gemma 2's with
gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
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
from tree_models.names import WeightNames
from tree_models.spec import (
    AddedInputSpec,
    AttentionSpec,
    DenseAndExpertsSpec,
    ExpertsSpec,
    FamilyRefused,
    HeadNormSpec,
    LaurelSpec,
    LayerInputsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    OutputGateSpec,
    RouterSpec,
    StreamsSpec,
)

_BETWEEN: dict[str, Any] = {"before_mlp": "pre_feedforward_layernorm"}
_BEHIND: dict[str, Any] = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}


def gemma(config: Any) -> Description:
    """Gemma 1: scaled embeddings, weights of norms less one."""
    return _gemma(config, _norm(config), WeightNames())


def gemma2(config: Any) -> Description:
    """Gemma 2: windows in every other layer, capped scores and logits, norms before and behind each half."""
    norm = _norm(config)
    behind = {"after_attention": norm, "after_mlp": norm}
    return _gemma(config, norm, WeightNames(**_BETWEEN, **_BEHIND), behind, **_scores(config))


def vaultgemma(config: Any) -> Description:
    """VaultGemma: Gemma 2 without the norms behind."""
    return _gemma(config, _norm(config), WeightNames(**_BETWEEN), **_scores(config))


def gemma3(config: Any) -> Description:
    """Gemma 3's text: normed queries and keys, other rotary frequencies in layers with windows."""
    norm = _norm(config)
    behind = {"after_attention": norm, "after_mlp": norm}
    attending = _scores(config) | {"head_norm": HeadNormSpec(norm), "score_cap": None}
    return _gemma(config, norm, WeightNames(**_BETWEEN, **_BEHIND), behind, **attending)


def gemma3n(config: Any) -> Description:
    """Gemma 3n's text: streams of hidden rows and augmented residuals, vectors of each token for each layer, gates
    below a cutoff that are zero, last layers that attend to the keys of layers before them."""
    if config.altup_active_idx != 0:
        raise FamilyRefused("layers that compute another stream than the first are not served")
    norm = rms_norm(config)
    count, shared = int(config.num_hidden_layers), int(config.num_kv_shared_layers)
    width = int(config.hidden_size_per_layer_input)
    streams = StreamsSpec(int(config.altup_num_inputs), norm, scaled=bool(config.altup_correct_scale))
    norms: dict[str, Any] = {
        "after_attention": norm,
        "after_mlp": norm,
        "added_input": AddedInputSpec(width, activation(config), norm),
        "streams": streams,
        "laurel": LaurelSpec(int(config.laurel_rank), norm),
    }
    layers = []
    for index in counted(config):
        sparsity = float(config.activation_sparsity_pattern[index])
        feeding = mlp(
            config,
            int(config.intermediate_size[index]),
            bias=False,
            cutoff=NormalDist().inv_cdf(sparsity) if sparsity > 0.0 else None,
        )
        layers.append(layer(_sharing(config, config, index, count - shared), feeding, norm, **norms))
    tokens = int(config.vocab_size_per_layer_input)
    inputs = LayerInputsSpec(tokens, count, width, norm, tokens if tokens < int(config.vocab_size) else None)
    spec = decoder(config, layers, norm, layer_inputs=inputs, streams=streams, **_ends(config))
    names = WeightNames(**_BETWEEN, **_BEHIND, ignored=(*WeightNames().ignored, *_unread(config)))
    return Description(spec, names)


def gemma4(config: Any) -> Description:
    """Gemma 4's text: vectors of each token for each layer, last layers that attend to the keys of layers before them,
    wider heads where there is no window, experts beside an MLP."""
    if config.use_bidirectional_attention == "all":
        raise FamilyRefused("its tokens see later ones")
    if getattr(config, "per_layer_config", None) is None:
        raise FamilyRefused("this version of transformers has no sizes of heads by layer")
    norm = rms_norm(config)
    norms: dict[str, Any] = {"before_attention": norm, "after_attention": norm, "before_mlp": norm, "after_mlp": norm}
    count, shared = int(config.num_hidden_layers), int(config.num_kv_shared_layers)
    feeding: MLPSpec | DenseAndExpertsSpec = mlp(config, bias=False)
    if getattr(config, "enable_moe_block", False):
        norms["before_mlp"] = None
        feeding = _experts(config, mlp(config, bias=False), norm)
    width, inputs = int(getattr(config, "hidden_size_per_layer_input", None) or 0), None
    if width:
        norms["added_input"] = AddedInputSpec(width, activation(config), norm)
        inputs = LayerInputsSpec(int(config.vocab_size_per_layer_input), count, width, norm)
    layers = []
    for index in counted(config):
        own = feeding
        if index >= count - shared > 0 and config.use_double_wide_mlp:
            own = mlp(config, 2 * config.intermediate_size, bias=False)
        layers.append(LayerSpec(_gemma4_attention(config, index, count - shared), own, **norms, scaled=True))
    names = WeightNames(
        **_BETWEEN,
        **_BEHIND,
        router="router.proj",
        expert_gate_up=("experts.gate_up_proj",),
        expert_down="experts.down_proj",
        expert_suffix="",
        ignored=(*WeightNames().ignored, *_unread(config)),
    )
    return Description(decoder(config, layers, norm, layer_inputs=inputs, **_ends(config)), names)


def gemma4_assistant(config: Any, places: Mapping[str, int]) -> Description:
    """The layers of Gemma 4's assistant, of its own `config`: queries alone, which attend to keys and values in the
    target's cache, at `places` of it by type of layer. Rows stand behind the last of these keys, and see none of each
    other. Embedding and head are the assistant's; what makes its rows is not described here."""
    text = config.get_text_config()
    if missing := sorted(set(text.layer_types) - places.keys()):
        raise FamilyRefused(f"the target has no layers of type {', '.join(missing)}, whose keys it reads")
    description = gemma4(text)
    layers = []
    for kind, one in zip(text.layer_types, description.spec.layers, strict=True):
        attending = one.attention
        assert isinstance(attending, AttentionSpec), "as Gemma 4's layers are"
        # transformers shows a row `sliding_window` keys and one more, none of which is its own.
        window = None if attending.window is None else attending.window + 2
        layers.append(replace(one, attention=replace(attending, keys_of=None, keys_in=places[kind], window=window)))
    spec = replace(
        description.spec,
        layers=tuple(layers),
        tied=bool(config.tie_word_embeddings),
        # The target's embedding makes its rows.
        embedding_scale=1.0,
        logits_cap=None,
    )
    unread = (*description.names.ignored, r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*")
    return Description(spec, replace(description.names, ignored=unread))


def muse_glimmer(config: Any) -> Description:
    """Muse-Glimmer's text: gated attention whose heads are normed without weights, and which embeds positions in some
    layers alone; embedded rows are normed."""
    plain, outer = rms_norm(config), rms_norm(config, offset=1.0)
    behind = replace(outer, epsilon=float(config.post_norm_eps))
    heads = replace(plain, weight=False)
    norms: dict[str, Any] = {"after_attention": behind, "after_mlp": behind}
    feeding, layers = mlp(config, bias=False), []
    for index in counted(config):
        own: dict[str, Any] = {} if config.layer_rope_theta[index] else {"rotary": None}
        attending = attention(
            config,
            index,
            windows=True,
            scaling=head_width(config) ** -0.5 * float(config.qk_scale_factor),
            head_norm=HeadNormSpec(heads),
            output_gate=OutputGateSpec("sigmoid"),
            **own,
        )
        layers.append(layer(attending, feeding, outer, **norms))
    ends: dict[str, Any] = {
        "embedding_norm": heads,
        "logits_scale": float(config.output_multiplier),
        "logits_cap": float(config.final_logit_softcapping),
    }
    names = WeightNames(**_BETWEEN, **_BEHIND, output_gate="self_attn.gate_proj")
    return Description(decoder(config, layers, plain, **ends), names)


def _gemma4_attention(config: Any, index: int, own: int) -> AttentionSpec:
    """Of a layer of Gemma 4, of which the first `own` have keys and values."""
    values_of_keys = bool(config.attention_k_eq_v) and config.layer_types[index] != "sliding_attention"
    return _sharing(config, config.per_layer_config[index], index, own, keys_are_values=values_of_keys)


def _sharing(config: Any, heads: Any, index: int, own: int, **changes: Any) -> AttentionSpec:
    """Of a layer of Gemma 3n or 4 with `heads` of that configuration, and `own` as above."""
    kinds, norm = config.layer_types, rms_norm(config)
    return attention(
        heads,
        index,
        windows=True,
        scaling=1.0,
        head_norm=HeadNormSpec(norm),
        value_norm=replace(norm, weight=False),
        # The last before them of the same kind.
        keys_of=own - 1 - kinds[:own][::-1].index(kinds[index]) if index >= own > 0 else None,
        **changes,
    )


def _unread(config: Any) -> tuple[str, ...]:
    """Tensors of layers without keys of their own, which checkpoints have, and nobody reads."""
    own = int(config.num_hidden_layers) - int(config.num_kv_shared_layers)
    unread = "|".join(str(index) for index in counted(config) if index >= own > 0)
    return (rf"model\.layers\.({unread})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",) if unread else ()


def _ends(config: Any) -> dict[str, Any]:
    """Scaled embeddings and capped logits."""
    cap = config.final_logit_softcapping
    return {"embedding_scale": float(config.hidden_size) ** 0.5, "logits_cap": None if cap is None else float(cap)}


def _experts(config: Any, dense: MLPSpec, norm: NormSpec) -> DenseAndExpertsSpec:
    router = RouterSpec(norm=replace(norm, weight=False), expert_scales=True)
    experts = ExpertsSpec(
        count=int(config.num_experts),
        top_k=int(config.top_k_experts),
        width=int(config.moe_intermediate_size),
        router=router,
        activation=activation(config),
    )
    return DenseAndExpertsSpec(dense, experts, norm)


def _gemma(
    config: Any, norm: NormSpec, names: WeightNames, norms: dict[str, Any] | None = None, **attending: Any
) -> Description:
    if getattr(config, "use_bidirectional_attention", False):
        raise FamilyRefused("its tokens see later ones")
    feeding = mlp(config, bias=False)
    layers = [layer(attention(config, index, **attending), feeding, norm, **(norms or {})) for index in counted(config)]
    # Gemma 1 has none, whatever its configuration says.
    cap = config.final_logit_softcapping if config.model_type != "gemma" else None
    scale = float(config.hidden_size) ** 0.5
    spec = decoder(config, layers, norm, embedding_scale=scale, logits_cap=None if cap is None else float(cap))
    return Description(spec, names)


def _norm(config: Any) -> NormSpec:
    return rms_norm(config, offset=1.0)


def _scores(config: Any) -> dict[str, Any]:
    cap = config.attn_logit_softcapping
    scaling = float(config.query_pre_attn_scalar) ** -0.5
    return {"windows": True, "scaling": scaling, "score_cap": None if cap is None else float(cap)}
