"""Published layouts of MTP modules in their target's checkpoint, read as configurations of `EagleHead`.

| | DeepSeek-V3, GLM-4.5 | MiMo | MiMo-V2 | Qwen3-Next, 3.5 | ERNIE 4.5 |
|---|---|---|---|---|---|
| module k, from 0, of n layers' target | `model.layers.{n + k}.` | `model.mtp_layers.{k}.` | `model.mtp.layers.{k}.` | `mtp.` | `model.mtp_*.{k}.` |
| norms of embedding and state | `enorm`, `hnorm` | `token_layernorm`, `hidden_layernorm` | `enorm`, `hnorm` | `pre_fc_norm_*` | `emb_norm`, `hidden_norm` |
| joined by | `eh_proj`, the embedding first | `input_proj`, the state first | `eh_proj`, the embedding first | `fc`, the embedding first | `linear_proj`, the embedding first |
| last norm | `shared_head.norm` | `final_layernorm` | `final_layernorm` | `norm` | the target's |
| head, embedding | `shared_head.head`, `embed_tokens`, or the target's | the target's | the target's | the target's | the target's |
| the target's state | after its last norm | before it | before it | after it | after it |
| module k reads | output of module k - 1 | output of module k - 1 | the target's state, as module 0 does | | |

A module's layer is one that the target could have behind its last (`tree_models.families`), and its output is the one
after its last norm. Sources: vLLM's deepseek_mtp.py, mimo.py (whose states come before the norm), mimo_mtp.py,
mimo_v2_mtp.py, qwen3_next_mtp.py and ernie_mtp.py; SGLang's deepseek_nextn.py, mimo_v2_nextn.py, ernie4_eagle.py and
multi_layer_eagle_worker_v2.py, which hands the target's state before its norm to every module of MiMo-V2
(`chain_mtp_hidden_states`); that a chain costs these modules acceptance was measured in sglang-jax, pull request 1256.
DeepSeek's paper (arXiv 2412.19437, section 2.2) chains modules; its published checkpoints have one. Of ERNIE's module
FastDeploy norms the output by the target's last norm, and vLLM and SGLang do not.
"""  # noqa: E501

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig

from draft_service.checkpoints.facts import number_of
from draft_service.checkpoints.target import EMBEDDING, LM_HEAD
from draft_service.eagle.head_config import LAYER_NAMES, ModuleConfig
from outrider.checkpoints.causal_lm import configuration_of
from outrider.checkpoints.refusal import CheckpointRefused, first_line
from outrider.heads import HeadRefused
from tree_models.families import Description, describe

_LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The names of a checkpoint's modules, and their inputs."""

    # Published prefixes, with a place for a module's number, and what they are in `EagleHead.slots`; the first that
    # fits counts.
    names: tuple[tuple[str, str], ...]
    first: int = 0  # number of the first module
    state_first: bool = False  # the state comes before the embedding in the joined input
    normed_state: bool = True  # the target's state is the one after its last norm, not the one before it
    chained: bool = True  # a module reads the output of the one before it, not the target's state
    # Entries of config.json with another name for modules -> their usual name; and the family of their layers, where
    # that is not the target's.
    settings: Mapping[str, str] = field(default_factory=dict)
    family: str = ""

    def prefixes(self, module: int) -> list[tuple[str, str]]:
        """The names of a module's weights; modules are counted from 0."""
        return [(published.format(self.first + module), neutral) for published, neutral in self.names]

    def joining(self, module: int) -> str:
        """The name of the weight that joins embedding and state."""
        return next(published for published, neutral in self.prefixes(module) if neutral == "fc.") + "weight"

    def count(self, names: Collection[str]) -> int:
        """Number of modules among these weight names, from the first on without a gap."""
        found = 0
        while self.joining(found) in names:
            found += 1
            if self.joining(found) == self.joining(0):
                break
        return found


_DEEPSEEK = (
    ("model.layers.{}.enorm.", "token_norm."),
    ("model.layers.{}.hnorm.", "feature_norm."),
    ("model.layers.{}.eh_proj.", "fc."),
    ("model.layers.{}.shared_head.norm.", "norm."),
    ("model.layers.{}.shared_head.head.", "lm_head."),
    ("model.layers.{}.embed_tokens.", "embed_tokens."),
    ("model.layers.{}.", _LAYER),
)
_MIMO = (
    ("model.mtp_layers.{}.token_layernorm.", "token_norm."),
    ("model.mtp_layers.{}.hidden_layernorm.", "feature_norm."),
    ("model.mtp_layers.{}.input_proj.", "fc."),
    ("model.mtp_layers.{}.final_layernorm.", "norm."),
    ("model.mtp_layers.{}.", _LAYER),
)
_MIMO_V2 = (
    ("model.mtp.layers.{}.enorm.", "token_norm."),
    ("model.mtp.layers.{}.hnorm.", "feature_norm."),
    ("model.mtp.layers.{}.eh_proj.", "fc."),
    ("model.mtp.layers.{}.final_layernorm.", "norm."),
    ("model.mtp.layers.{}.pre_mlp_layernorm.", f"{_LAYER}post_attention_layernorm."),
    ("model.mtp.layers.{}.", _LAYER),
)
_QWEN3_NEXT = (
    ("mtp.pre_fc_norm_embedding.", "token_norm."),
    ("mtp.pre_fc_norm_hidden.", "feature_norm."),
    ("mtp.fc.", "fc."),
    ("mtp.norm.", "norm."),
    ("mtp.layers.0.", _LAYER),
)
_ERNIE = (
    ("model.mtp_emb_norm.{}.", "token_norm."),
    ("model.mtp_hidden_norm.{}.", "feature_norm."),
    ("model.mtp_linear_proj.{}.", "fc."),
    ("model.norm.", "norm."),
    ("model.mtp_block.{}.", _LAYER),
)
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
        MtpLayout(_DEEPSEEK, number_of(text_of(config), "num_hidden_layers")),
        MtpLayout(_MIMO, state_first=True, normed_state=False),
        MtpLayout(_MIMO_V2, normed_state=False, chained=False, settings=_MIMO_V2_SETTINGS, family="qwen2"),
        MtpLayout(_QWEN3_NEXT),
        # Its layer is dense.
        MtpLayout(_ERNIE, family="ernie4_5"),
    )
    for layout in layouts:
        if layout.count(names):
            return layout
    joining = ", ".join(layout.joining(0) for layout in layouts)
    raise HeadRefused(f"no MTP module, which has one of {joining}; config.json counts {counted_modules(config)}")


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of config.json about the model of text."""
    return config.get("text_config") or config


def counted_modules(config: Mapping[str, Any]) -> int:
    """How many modules config.json counts; 0 where it has no such entry."""
    text = text_of(config)
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return next((int(text[name]) for name in names if text.get(name)), 0)


def modules_of(layout: MtpLayout, config: Mapping[str, Any], names: Collection[str], wanted: int) -> int:
    """The number of modules that draft: `wanted`, if 0 that of config.json, and if that is missing all there are.
    Raises `HeadRefused` if the checkpoint has fewer."""
    present, counted = layout.count(names), counted_modules(config)
    if (wanted or counted) <= present:
        return wanted or counted or present
    if wanted:
        raise HeadRefused(f"{wanted} MTP modules are wanted (num_modules), the checkpoint has {present}")
    raise HeadRefused(
        f"config.json counts {counted} MTP modules, and the checkpoint has {present}: num_modules takes these"
    )


def mtp_names(layout: MtpLayout, names: Collection[str], module: int) -> dict[str, str]:
    """Name in `EagleHead.slots` -> published name of a module's weights; modules are counted from 0."""
    found: dict[str, str] = {}
    prefixes = layout.prefixes(module)
    for published in names:
        own = next(((old, neutral) for old, neutral in prefixes if published.startswith(old)), None)
        # Rotary frequencies are computed.
        if own is not None and not published.endswith("rotary_emb.inv_freq"):
            found[own[1] + published.removeprefix(own[0])] = published
    return found


def mtp_config(layout: MtpLayout, config: Mapping[str, Any], names: Collection[str]) -> ModuleConfig:
    """The configuration of a module, by the entries of the checkpoint's config.json and the names of the module's
    weights. Raises `HeadRefused` if its layer is of a kind that is not supported."""
    text = dict(text_of(config))
    text |= {usual: text[own] for own, usual in layout.settings.items() if own in text}
    _refuse_foreign(text, names)
    if layout.family:
        text["model_type"] = layout.family
    if layout.family == "qwen2" and f"{_LAYER}self_attn.q_proj.bias" not in names:
        # Its layers are Qwen2's but for their biases, which config.json may not name.
        text |= {"model_type": "llama", "attention_bias": False}
    described = _described(text)
    spec, family = described.spec, described.names
    return ModuleConfig(
        kind="mtp",
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocabulary_size,
        draft_vocab_size=spec.vocabulary_size,
        target_hidden_size=spec.hidden_size,
        # The description has one layer more.
        feature_layers=(len(spec.layers) - 1 - (not layout.normed_state),),
        max_positions=spec.max_positions,
        norm_output=True,
        fc_bias="fc.bias" in names,
        tied_lm_head=LM_HEAD not in names,
        layer=spec.layers[-1],
        outer_norm=spec.final_norm,
        layer_names=replace(family, embedding=EMBEDDING.removesuffix(".weight"), layer=LAYER_NAMES.layer),
    )


def _described(text: Mapping[str, Any]) -> Description:
    """The target's description, with a module's layer behind its last. Raises `HeadRefused` where there is none."""
    try:
        found = describe(_longer(configuration_of(text)))
    except CheckpointRefused as refused:
        raise HeadRefused(str(refused)) from None
    # `FamilyRefused`, and what a foreign configuration has in place of a number.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise HeadRefused(f"an MTP module by this config.json is not served: {first_line(error)}") from None
    if found is None:
        raise HeadRefused(f"an MTP module with layers of a {text.get('model_type')} is not served")
    return found


def _longer(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with one layer more, which attends to all tokens and feeds as the last one does."""
    longer = copy.deepcopy(config)
    longer.num_hidden_layers += 1
    for listed, added in (("layer_types", "full_attention"), ("mlp_layer_types", None)):
        if kinds := getattr(longer, listed, None):
            setattr(longer, listed, [*kinds, added or kinds[-1]])
    return longer


def _refuse_foreign(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise `HeadRefused` for what the target's other layers have, and no family's layers show."""
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise HeadRefused(f"a sliding window of {config['sliding_window']} tokens is not served")
    if f"{_LAYER}self_attn.attention_sink_bias" in names:
        raise HeadRefused("an MTP module with attention sinks (attention_sink_bias) is not served")
    if config.get("attention_value_scale") not in (None, 1.0):
        raise HeadRefused(f"values scaled by {config['attention_value_scale']} (attention_value_scale) are not served")
    latent, key = config.get("kv_lora_rank"), config.get("head_dim")
    value = config.get("v_head_dim")
    if not latent and key and value not in (None, key):
        raise HeadRefused(f"an MTP module with values of width {value} beside keys of {key} is not served")
    for setting, served in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if f"{_LAYER}mlp.gate.e_score_correction_bias" in names and config.get(setting, served) != served:
            raise HeadRefused(f"experts chosen by {setting} {config[setting]!r} are not served, only {served!r}")
