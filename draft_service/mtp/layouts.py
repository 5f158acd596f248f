"""Published layouts of MTP modules, read from their target's checkpoint, in the terms of `EagleHead`.

| | DeepSeek-V3 | MiMo |
|---|---|---|
| prefix, n being the target's layers | `model.layers.{n}.` | `model.mtp_layers.0.` |
| norms of embedding and state | `enorm`, `hnorm` | `token_layernorm`, `hidden_layernorm` |
| joined by | `eh_proj`, the embedding first | `input_proj`, the state first |
| last norm | `shared_head.norm` | `final_layernorm` |
| head, embedding | `shared_head.head`, `embed_tokens`, or the target's | the target's |

Sources: vLLM's deepseek_mtp.py and mimo_mtp.py, SGLang's deepseek_nextn.py. All read the state after the target's last
norm, and hand the state after the module's own to the next step; DeepSeek's own code has no next step of one module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draft_service.checkpoints.facts import HeadRefused, number_of
from draft_service.eagle.head_config import ExpertShape, HeadConfig, LatentShape
from draft_service.eagle.layers import rope_of
from draft_service.eagle.layouts import Shapes, layer_settings

_LAYER = "layers.0."


class MtpLayout(NamedTuple):
    """Where a checkpoint keeps its first module, and whether it joins the state before the embedding."""

    prefix: str
    renamed: Mapping[str, str]
    state_first: bool


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
_IGNORED = re.compile(r".*rotary_emb\.inv_freq$")


def mtp_layout(config: Mapping[str, Any], names: Sequence[str]) -> MtpLayout:
    """Which layout a checkpoint has.

    Args:
        config: the entries of its config.json.
        names: of its weights.

    Raises:
        HeadRefused: none, or its weights are quantised.
    """
    if config.get("quantization_config"):
        raise HeadRefused("an MTP module with quantised weights (quantization_config) is not served")
    layouts = (
        MtpLayout(f"model.layers.{number_of(config, 'num_hidden_layers')}.", _DEEPSEEK, state_first=False),
        MtpLayout("model.mtp_layers.0.", _MIMO, state_first=True),
    )
    for layout in layouts:
        joining = next(name for name, neutral in layout.renamed.items() if neutral == "fc.")
        if f"{layout.prefix}{joining}weight" in names:
            return layout
    said = config.get("num_nextn_predict_layers") or 0
    looked = " and ".join(layout.prefix for layout in layouts)
    raise HeadRefused(f"no MTP module below {looked}; config.json counts {said} (num_nextn_predict_layers)")


def mtp_names(layout: MtpLayout, names: Sequence[str]) -> dict[str, str]:
    """Neutral name -> published name of the first module's weights."""
    found: dict[str, str] = {}
    for published in names:
        if published.startswith(layout.prefix) and not _IGNORED.match(published):
            own = published.removeprefix(layout.prefix)
            renamed = (
                neutral + own.removeprefix(old) for old, neutral in layout.renamed.items() if own.startswith(old)
            )
            found[next(renamed, _LAYER + own)] = published
    return found


def mtp_config(config: Mapping[str, Any], shapes: Shapes) -> HeadConfig:
    """What the first module is.

    Args:
        config: the entries of the checkpoint's config.json.
        shapes: shape of every weight of the module, by neutral name.

    Raises:
        HeadRefused: its layer is of a kind that is not served.
    """
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise HeadRefused(f"a sliding window of {config['sliding_window']} tokens is not served")
    settings = layer_settings(config, shapes)
    latent = _latent(config) if f"{_LAYER}self_attn.kv_a_proj_with_mqa.weight" in shapes else None
    if latent is None and f"{_LAYER}self_attn.q_proj.weight" not in shapes:
        raise HeadRefused("an MTP module whose attention is neither Llama's nor latent is not served")
    if latent is not None:
        settings["num_kv_heads"], settings["head_dim"] = settings["num_heads"], latent.plain + latent.rotary
        settings["qkv_bias"] = f"{_LAYER}self_attn.kv_a_proj_with_mqa.bias" in shapes
    return HeadConfig(
        kind="mtp",
        draft_vocab_size=settings["vocab_size"],
        target_hidden_size=settings["hidden_size"],
        feature_layers=(number_of(config, "num_hidden_layers"),),
        rope=_rope(config, latent),
        norm_output=True,
        input_norm=True,
        latent=latent,
        experts=_experts(config) if f"{_LAYER}mlp.gate.weight" in shapes else None,
        **settings,
    )


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
    """Latent attention turns the whole of its rotary part, whatever share of a key that is said to be."""
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
