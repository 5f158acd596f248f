"""Published layouts of MTP modules in their target's checkpoint, read as configurations of `EagleHead`.

| | DeepSeek-V3 | MiMo | MiMo-V2 |
|---|---|---|---|
| module k, from 0, of n layers' target | `model.layers.{n + k}.` | `model.mtp_layers.{k}.` | `model.mtp.layers.{k}.` |
| norms of embedding and state | `enorm`, `hnorm` | `token_layernorm`, `hidden_layernorm` | `enorm`, `hnorm` |
| joined by | `eh_proj`, the embedding first | `input_proj`, the state first | `eh_proj`, the embedding first |
| last norm | `shared_head.norm` | `final_layernorm` | `final_layernorm` |
| head, embedding | `shared_head.head`, `embed_tokens`, or the target's | the target's | the target's |
| the target's state | after its last norm | before it | before it |
| module k reads | output of module k - 1 | output of module k - 1 | the target's state, as module 0 does |

A module's output is the one after its own last norm. Sources: vLLM's deepseek_mtp.py, mimo.py (whose states come
before the norm), mimo_mtp.py and mimo_v2_mtp.py; SGLang's deepseek_nextn.py, mimo_v2_nextn.py and
multi_layer_eagle_worker_v2.py, which hands the target's state before its norm to every module of MiMo-V2
(`chain_mtp_hidden_states`); that a chain costs these modules acceptance was measured in sglang-jax, pull request 1256.
DeepSeek's paper (arXiv 2412.19437, section 2.2) chains modules; its published checkpoints have one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from draft_service.checkpoints.facts import number_of
from draft_service.eagle.head_config import ExpertShape, HeadConfig, LatentShape
from draft_service.eagle.layers import rope_of
from draft_service.eagle.layouts import Shapes, layer_settings
from outrider.heads import HeadRefused

_LAYER = "layers.0."
_COUNT = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The names of a checkpoint's modules, and their inputs."""

    prefix: str  # of a module's weights, with a placeholder for its number
    first: int  # number of the first module
    renamed: Mapping[str, str]  # prefixes of published names below `prefix` -> their names in `EagleHead`
    state_first: bool = False  # the state comes before the embedding in the joined input
    normed_state: bool = True  # the target's state is the one after its last norm, not the one before it
    chained: bool = True  # a module reads the output of the one before it, not the target's state
    # Entries of config.json with another name for modules -> their usual name.
    settings: Mapping[str, str] = field(default_factory=dict)

    def prefix_of(self, module: int) -> str:
        """The prefix of a module's weights; modules are counted from 0."""
        return self.prefix.format(self.first + module)

    def count(self, names: Collection[str]) -> int:
        """Number of modules among these weight names, from the first on without a gap."""
        joining = next(name for name, neutral in self.renamed.items() if neutral == "fc.")
        found = 0
        while f"{self.prefix_of(found)}{joining}weight" in names:
            found += 1
        return found


_DEEPSEEK = {
    "enorm.": "token_norm.",
    "hnorm.": "feature_norm.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "embed_tokens.",
}
_MIMO = {
    "token_layernorm.": "token_norm.",
    "hidden_layernorm.": "feature_norm.",
    "input_proj.": "fc.",
    "final_layernorm.": "norm.",
}
_MIMO_V2 = {
    "enorm.": "token_norm.",
    "hnorm.": "feature_norm.",
    "eh_proj.": "fc.",
    "final_layernorm.": "norm.",
    "pre_mlp_layernorm.": f"{_LAYER}post_attention_layernorm.",
}
# MiMo-V2's names of the settings of its sliding-window layers, whose shape its modules have.
_MIMO_V2_SETTINGS = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_rope_theta": "rope_theta",
    "sliding_window_size": "sliding_window",
    "layernorm_epsilon": "rms_norm_eps",
}


def mtp_layout(config: Mapping[str, Any], names: Collection[str]) -> MtpLayout:
    """The layout of a checkpoint, by the entries of its config.json and the names of its weights. Raises `HeadRefused`
    if it has no known layout, or its weights are quantised."""
    if config.get("quantization_config"):
        raise HeadRefused("an MTP module with quantised weights (quantization_config) is not served")
    layouts = (
        MtpLayout("model.layers.{}.", number_of(config, "num_hidden_layers"), _DEEPSEEK),
        MtpLayout("model.mtp_layers.{}.", 0, _MIMO, state_first=True, normed_state=False),
        MtpLayout("model.mtp.layers.{}.", 0, _MIMO_V2, normed_state=False, chained=False, settings=_MIMO_V2_SETTINGS),
    )
    for layout in layouts:
        if layout.count(names):
            return layout
    prefixes = ", ".join(layout.prefix_of(0) for layout in layouts)
    raise HeadRefused(f"no MTP module below any of {prefixes}; config.json counts {config.get(_COUNT) or 0} ({_COUNT})")


def modules_of(layout: MtpLayout, config: Mapping[str, Any], names: Collection[str], wanted: int) -> int:
    """The number of modules that draft: `wanted`, if 0 that of config.json, and if that is missing all there are.
    Raises `HeadRefused` if the checkpoint has fewer."""
    present, counted = layout.count(names), int(config.get(_COUNT) or 0)
    if (wanted or counted) <= present:
        return wanted or counted or present
    if wanted:
        raise HeadRefused(f"{wanted} MTP modules are wanted (num_modules), the checkpoint has {present}")
    raise HeadRefused(
        f"config.json counts {counted} MTP modules ({_COUNT}), the checkpoint has {present}: num_modules takes these"
    )


def mtp_names(layout: MtpLayout, names: Collection[str], module: int) -> dict[str, str]:
    """Neutral name -> published name of a module's weights; modules are counted from 0."""
    found: dict[str, str] = {}
    prefix = layout.prefix_of(module)
    for published in names:
        # Rotary frequencies are computed.
        if published.startswith(prefix) and not published.endswith("rotary_emb.inv_freq"):
            own = published.removeprefix(prefix)
            old = next((old for old in layout.renamed if own.startswith(old)), "")
            found[layout.renamed.get(old, _LAYER) + own.removeprefix(old)] = published
    return found


def mtp_config(layout: MtpLayout, config: Mapping[str, Any], shapes: Shapes) -> HeadConfig:
    """The configuration of a module, by the entries of the checkpoint's config.json and the shapes of the module's
    weights, by neutral name. Raises `HeadRefused` if its layer is of a kind that is not supported."""
    config = dict(config) | {usual: config[own] for own, usual in layout.settings.items() if own in config}
    settings = layer_settings(config, shapes)
    latent = _latent(config) if f"{_LAYER}self_attn.kv_a_proj_with_mqa.weight" in shapes else None
    if latent is None and f"{_LAYER}self_attn.q_proj.weight" not in shapes:
        raise HeadRefused("an MTP module whose attention is neither Llama's nor latent is not served")
    _refuse_attention(config, shapes, 0 if latent else settings["head_dim"])
    if latent is not None:
        settings["num_kv_heads"], settings["head_dim"] = settings["num_heads"], latent.plain + latent.rotary
        settings["qkv_bias"] = f"{_LAYER}self_attn.kv_a_proj_with_mqa.bias" in shapes
    return HeadConfig(
        kind="mtp",
        draft_vocab_size=settings["vocab_size"],
        target_hidden_size=settings["hidden_size"],
        feature_layers=(number_of(config, "num_hidden_layers") - (not layout.normed_state),),
        rope=_rope(config, latent),
        norm_output=True,
        input_norm=True,
        latent=latent,
        experts=_experts(config) if f"{_LAYER}mlp.gate.weight" in shapes else None,
        **settings,
    )


def _refuse_attention(config: Mapping[str, Any], shapes: Shapes, head_dim: int) -> None:
    """Raise `HeadRefused` for attention that is not supported. Keys are `head_dim` wide; 0 stands for latent attention,
    whose values may be narrower."""
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise HeadRefused(f"a sliding window of {config['sliding_window']} tokens is not served")
    if f"{_LAYER}self_attn.attention_sink_bias" in shapes:
        raise HeadRefused("an MTP module with attention sinks (attention_sink_bias) is not served")
    if config.get("attention_value_scale") not in (None, 1.0):
        raise HeadRefused(f"values scaled by {config['attention_value_scale']} (attention_value_scale) are not served")
    value = int(config.get("v_head_dim") or head_dim)
    if head_dim and value != head_dim:
        raise HeadRefused(f"an MTP module with values of width {value} beside keys of {head_dim} is not served")


def _latent(config: Mapping[str, Any]) -> LatentShape:
    return LatentShape(
        query_rank=int(config.get("q_lora_rank") or 0),
        key_rank=number_of(config, "kv_lora_rank"),
        plain=number_of(config, "qk_nope_head_dim"),
        rotary=number_of(config, "qk_rope_head_dim"),
        value=number_of(config, "v_head_dim"),
        interleaved=bool(config.get("rope_interleave", True)),
    )


def _rope(config: Mapping[str, Any], latent: LatentShape | None) -> dict[str, Any]:
    """`HeadConfig.rope`. Latent attention ignores `partial_rotary_factor`: it rotates its whole rotary part."""
    rope = rope_of(config)
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if latent is not None:
        rope.pop("partial_rotary_factor", None)
    return rope


def _experts(config: Mapping[str, Any]) -> ExpertShape:
    for setting, served in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(setting, served) != served:
            raise HeadRefused(f"experts chosen by {setting} {config[setting]!r} are not served, only {served!r}")
    return ExpertShape(
        experts=number_of(config, "n_routed_experts"),
        shared=int(config.get("n_shared_experts") or 0),
        width=number_of(config, "moe_intermediate_size"),
        chosen=number_of(config, "num_experts_per_tok"),
        groups=int(config.get("n_group") or 1),
        chosen_groups=int(config.get("topk_group") or 1),
        normed=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
