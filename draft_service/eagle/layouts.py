"""The published layouts of heads, read into one `HeadConfig` and one set of weight names.

- EAGLE (SafeAILab): a Llama config.json; EAGLE-1 and -2 with `fc`, `layers.0.*`; EAGLE-3 with `fc`, `midlayer.*`,
  `norm`, `lm_head`, `d2t`, `t2d`. The `architectures` entry is LlamaForCausalLM for both.
- SGLang and SpecForge: `architectures` LlamaForCausalLMEagle or LlamaForCausalLMEagle3, `draft_vocab_size`,
  `eagle_config.eagle_aux_hidden_state_layer_ids` counting the outputs of layers; `midlayer.` or `layers.0.`, with a
  prefix `model.` or without.
- NVIDIA: as SGLang's; with `eagle_config.use_aux_hidden_state` false a head has no `fc`.
- speculators: `speculators_model_type`, the layer's settings in `transformer_layer_config`, and
  `eagle_aux_hidden_state_layer_ids` counting the inputs of layers, so one more; EAGLE-1 with `fusion_fc` and
  `transformer.*`.

The kind of head and its optional weights are derived from the weights, not from the configuration, which is often
incomplete in published heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from draft_service.checkpoints.facts import architectures_of, number_of
from draft_service.eagle.head_config import HeadConfig
from outrider.heads import HeadRefused

Shapes = Mapping[str, tuple[int, ...]]
_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^(midlayer|transformer)\."), "layers.0."),
    (re.compile(r"^midlayers\.(\d+)\."), r"layers.\1."),
    (re.compile(r"^fusion_fc\."), "fc."),
)
# Parts of the verifier, and buffers that are computed.
_IGNORED = re.compile(r"^(t2d|verifier_.*|.*rotary_emb\.inv_freq|(.*\.)?position_ids)$")


def neutral_name(name: str) -> str | None:
    """The name of a published weight in `EagleHead.slots`, "d2t" for the token map, None for an unneeded weight."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return None if _IGNORED.match(name) else name


def head_config(config: Mapping[str, Any], shapes: Shapes) -> HeadConfig:
    """A head's configuration, by the entries of its config.json and the shapes of its weights, by neutral name. Raises
    `HeadRefused` if it is not an EAGLE head, or of a kind that is not supported."""
    layer, feature_layers, target = _by_layout(config)
    _refuse_foreign(config, shapes)
    fused, has_fc = "layers.0.hidden_norm.weight" in shapes, "fc.weight" in shapes
    sizes, own = _sizes(layer, shapes), config.get("outrider") or {}
    drafted = next((shapes[name][0] for name in ("lm_head.weight", "d2t") if name in shapes), None)
    target_hidden = int(config.get("target_hidden_size") or sizes["hidden_size"]) if fused else sizes["hidden_size"]
    return HeadConfig(
        kind="eagle3" if fused else "eagle",
        draft_vocab_size=drafted or int(config.get("draft_vocab_size") or sizes["vocab_size"]),
        target_hidden_size=target_hidden,
        num_layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
        num_features=shapes["fc.weight"][1] // target_hidden if fused and has_fc else 1,
        feature_layers=feature_layers if fused and has_fc else None,
        has_fc=has_fc,
        rope=_rope(layer),
        norm_output=bool(config.get("norm_output", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        target=target,
        tokenizer_fingerprint=str(own.get("tokenizer_fingerprint", "")),
        window=number_of(own, "window") if own.get("window") else None,
        fc_norm="fc_norm.0.weight" in shapes,
        norm_before_fc="input_norm.weight" in shapes,
        input_norm=not fused and "layers.0.input_layernorm.weight" in shapes,
        **sizes,
    )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' `rope_parameters` from a config.json of any age: rope_theta, rope_scaling, rope_parameters."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    return rope


def _sizes(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The settings that a head's layer shares with Llama's, as arguments of `HeadConfig`, by the entries about the
    layer. Raises `HeadRefused` if one is missing, or not supported."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise HeadRefused(f"an activation of {activation!r} is not served, only silu")
    hidden, heads = number_of(config, "hidden_size"), number_of(config, "num_attention_heads")
    return {
        "hidden_size": hidden,
        "intermediate_size": number_of(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "vocab_size": number_of(config, "vocab_size"),
        "max_positions": int(config.get("max_position_embeddings") or 2048),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "fc_bias": "fc.bias" in shapes,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "o_bias": "layers.0.self_attn.o_proj.bias" in shapes,
        "mlp_bias": "layers.0.mlp.down_proj.bias" in shapes,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
        "tied_lm_head": "lm_head.weight" not in shapes,
    }


def _by_layout(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[int, ...] | None, str]:
    """A layout's settings of the layer, the captured layers, counted by output, and the target."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise HeadRefused(f"speculators of type {kind!r} are not served")
    named = ((config.get("eagle_config") or {}) if kind is None else config).get("eagle_aux_hidden_state_layer_ids")
    # speculators count inputs, which is one more. Where none are named they are the usual ones.
    layers = None if not named else tuple(int(layer) - (kind is not None) for layer in named)
    if kind is None:
        return config, layers, str((config.get("outrider") or {}).get("target", ""))
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return config.get("transformer_layer_config") or {}, layers, str(verifier.get("name_or_path") or "")


def _refuse_foreign(config: Mapping[str, Any], shapes: Shapes) -> None:
    fuses = (config.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    if (fuses and "fc.weight" not in shapes) or "layers.0.self_attn.q_proj.weight" not in shapes:
        architectures = architectures_of(config)
        raise HeadRefused(f"no EAGLE head of Llama's layers: {architectures}, and no fc or no layer among its weights")
    if config.get("layernorms") or "embed_layernorm.weight" in shapes or "embedding_layernorm.weight" in shapes:
        raise HeadRefused("an EAGLE-1 head with norms around its fusion layer is not served")
    for flag, weight in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if bool(config.get(flag, False)) is not (weight in shapes):
            raise HeadRefused(f"config.json has {flag} {config.get(flag, False)}, which its weights contradict")


def published_config(config: HeadConfig) -> dict[str, Any]:
    """config.json in the layout of SGLang and SpecForge, with Outrider's own entries under `outrider`."""
    fused = config.kind == "eagle3"
    rope = dict(config.rope)
    theta = rope.pop("rope_theta", 10000.0)
    published: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if fused else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "tie_word_embeddings": False,
        "outrider": {"target": config.target, "tokenizer_fingerprint": config.tokenizer_fingerprint}
        | ({} if config.window is None else {"window": config.window}),
    }
    if fused:
        published["target_hidden_size"] = config.target_hidden_size
        published["num_aux_hidden_states"] = config.num_features
        for flag in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"):
            published[flag] = getattr(config, flag)
    if fused and not config.has_fc:
        published["eagle_config"] = {"use_aux_hidden_state": False}
    elif config.feature_layers is not None:
        published["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        }
    return published


def published_name(name: str, config: HeadConfig) -> str:
    """The inverse of `neutral_name` for the layout of SGLang and SpecForge."""
    return re.sub(r"^layers\.0\.", "midlayer.", name) if config.kind == "eagle3" else name
