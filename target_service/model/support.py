"""Which models can be served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from outrider.checkpoints.causal_lm import said
from outrider.checkpoints.causal_lm_names import causal_lm_names
from outrider.checkpoints.formats import DEQUANTISED_FORMATS
from outrider.checkpoints.plain_attention import attention_refusal
from tree_models.families import Description, describe
from tree_models.families.common import longest_context
from tree_models.layers.paged import CacheShape
from tree_models.spec import FamilyRefused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ModelRefused",
    "check_supported",
    "description_of",
    "has_latents",
    "kv_bytes",
    "kv_shape",
    "longest_context",
    "quantisation_method",
    "text_part",
]


class ModelRefused(ValueError):
    """The model cannot be served losslessly; the message has the reason."""


def description_of(config: PretrainedConfig) -> Description | None:
    """What our layers are made of for a configuration; None where its family has no entry, or the configuration asks
    for what they do not compute."""
    try:
        return describe(config)
    except FamilyRefused:
        return None
    # A foreign configuration may have anything in place of a number.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(f"{config.model_type}: config.json cannot be used: {said(error)}") from None


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the part that reads and writes text, where a model that takes more has one of our layers;
    else the configuration itself."""
    text: PretrainedConfig = config.get_text_config()
    if text is config or description_of(text) is None:
        return config
    if text.model_type not in causal_lm_names():
        # The whole model has the head, and so shows whether it is tied.
        whole = getattr(config, "thinker_config", config)
        text.tie_word_embeddings = bool(getattr(whole, "tie_word_embeddings", False))
    return text


def check_supported(config: PretrainedConfig, model: PreTrainedModel | None = None) -> None:
    """Raise `ModelRefused` with the reason unless every token attends to tokens before it, and to no other: to all of
    them, or where the layers are ours to those within a window."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{kind}: an encoder-decoder; only decoders are served")
    if getattr(config, "add_cross_attention", False):
        raise ModelRefused(f"{kind}: it attends to another input")
    if config.get_text_config() is not config:
        if text_part(config) is config:
            raise ModelRefused(f"{kind}: it takes more than text")
        check_supported(text_part(config))
        return
    if reason := attention_refusal(config, variants=description_of(config) is not None):
        raise ModelRefused(f"{kind}: {reason}")
    method = quantisation_method(config)
    if method and not _is_dequantised(config, method):
        # Passes multiply plain matrices; no test holds the layers of a quantisation method to the model's.
        raise ModelRefused(f"{kind}: quantised weights ({method}) are not served")
    if description_of(config) is not None:
        return
    if model is None:
        return
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelRefused(f"{kind}: its attention cannot be replaced in this version of transformers")
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise ModelRefused(f"{kind}: its tokens see later ones")
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    windows = [one for one in (getattr(layer, "sliding_window", None) for layer in layers) if isinstance(one, int)]
    if windows and min(windows) < longest_context(config):
        raise ModelRefused(f"{kind}: a sliding window of {min(windows)} tokens is not served")
    if any("sinks" in name for name, _ in model.named_parameters()):
        raise ModelRefused(f"{kind}: attention sinks are not served")


def quantisation_method(config: PretrainedConfig) -> str:
    """What a configuration calls its format of weights; empty where they are plain."""
    quantised = getattr(config, "quantization_config", None)
    if not quantised:
        return ""
    return str(quantised.get("quant_method") or "of some kind") if isinstance(quantised, dict) else "of some kind"


def _is_dequantised(config: PretrainedConfig, method: str) -> bool:
    """Whether weights in this format become plain ones when they are read."""
    description = description_of(config)
    return (
        method in DEQUANTISED_FORMATS and description is not None and description.names.experts_lie == "by_neighbours"
    )


def has_latents(config: PretrainedConfig) -> bool:
    """Whether the keys and values of all layers are made of latents (multi-head latent attention). Beside layers with
    states, as in Kimi Linear, they are kept expanded."""
    of_some = all(getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    return of_some and "linear_attention" not in (getattr(config, "layer_types", None) or ())


def kv_shape(config: PretrainedConfig, *, latent: bool = False) -> CacheShape:
    """Widths of keys and values in the cache. With `latent` it has one vector for all heads of a model with latents:
    the latent and the rotary key. Otherwise they are expanded for all heads, keys and values of unequal widths."""
    heads = int(config.num_attention_heads)
    if has_latents(config):
        rotary = int(config.qk_rope_head_dim)
        if latent:
            return CacheShape(1, int(config.kv_lora_rank) + rotary, 0)
        return CacheShape(heads, config.qk_nope_head_dim + rotary, config.v_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CacheShape(getattr(config, "num_key_value_heads", None) or heads, width, width)


def kv_bytes(config: PretrainedConfig, itemsize: int, *, latent: bool) -> int:
    """Bytes of a token in the cache, all layers; `latent` as in `kv_shape`."""
    heads, key_width, value_width = kv_shape(config, latent=latent)
    return int(config.num_hidden_layers) * heads * (key_width + value_width) * itemsize
