"""Which models can be served."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PretrainedConfig, PreTrainedModel

from outrider.checkpoints.plain_attention import attention_refusal


class ModelRefused(ValueError):
    """The model cannot be served losslessly; the message says why."""


def check_supported(config: PretrainedConfig, model: PreTrainedModel | None = None) -> None:
    """Raise `ModelRefused` with the reason unless every token attends to all tokens before it, and to no other."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{kind}: an encoder-decoder; only decoders are served")
    if getattr(config, "add_cross_attention", False):
        raise ModelRefused(f"{kind}: it attends to another input")
    if config.get_text_config() is not config:
        raise ModelRefused(f"{kind}: it takes more than text")
    if reason := attention_refusal(config):
        raise ModelRefused(f"{kind}: {reason}")
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        # Passes multiply plain matrices; no test holds the layers of a quantisation method to the model's.
        raise ModelRefused(f"{kind}: quantised weights ({method or 'of some kind'}) are not served")
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


class KVShape(NamedTuple):
    """What one layer caches of one token. A latent is key and value in one, and has no separate value."""

    heads: int
    key_width: int
    value_width: int


def has_latents(config: PretrainedConfig) -> bool:
    """Whether the model's keys and values are made of latents (multi-head latent attention)."""
    return all(getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))


def kv_shape(config: PretrainedConfig, *, latent: bool = False) -> KVShape:
    """Widths of keys and values in the cache. With `latent` it has one vector for all heads of a model with latents:
    the latent and the rotary key. Otherwise they are expanded for all heads, keys and values of unequal widths."""
    heads = int(config.num_attention_heads)
    if has_latents(config):
        rotary = int(config.qk_rope_head_dim)
        if latent:
            return KVShape(1, int(config.kv_lora_rank) + rotary, 0)
        return KVShape(heads, config.qk_nope_head_dim + rotary, config.v_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVShape(getattr(config, "num_key_value_heads", None) or heads, width, width)


def kv_bytes(config: PretrainedConfig, itemsize: int, *, latent: bool) -> int:
    """Bytes of a token in the cache, all layers; `latent` as in `kv_shape`."""
    heads, key_width, value_width = kv_shape(config, latent=latent)
    return int(config.num_hidden_layers) * heads * (key_width + value_width) * itemsize


def longest_context(config: PretrainedConfig) -> int:
    """Tokens of prompt and output that the model can be served for.

    longrope takes other frequencies, and so other keys for all tokens, once a text is longer than the original context;
    dynamic ones do so behind the context of config.json.
    """
    longest = int(config.max_position_embeddings)
    if "longrope" not in _rope_types(config):
        return longest
    original = config.rope_parameters.get("original_max_position_embeddings", longest)
    return min(longest, int(original))


def _rope_types(config: PretrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one per type of layer.
    every = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(one["rope_type"]) for one in every if "rope_type" in one}
