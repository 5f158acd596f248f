"""What families share: descriptions by the names that most configurations have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tree_models.decoder_spec import DecoderSpec
from tree_models.families.rotary import rope_parameters, rotary
from tree_models.names import WeightNames
from tree_models.spec import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    FamilyRefused,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RecurrentSpec,
    StateSpaceSpec,
)

# Tokens of a text that only states read. Chosen: more than any published model of attention takes.
_LONGEST_OF_STATES = 2**20

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


@dataclass(frozen=True, slots=True)
class Description:
    """A decoder and the names of its tensors."""

    spec: DecoderSpec
    names: WeightNames = field(default_factory=WeightNames)


# A `Description` of a transformers configuration.
Family = Callable[[Any], Description]


def activation(config: Any) -> Activation:
    """The activation that a configuration names."""
    return named_activation(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu"))


def named_activation(name: object) -> Activation:
    """The activation of this name."""
    if str(name) not in _ACTIVATIONS:
        raise FamilyRefused(f"the activation {name} is not served")
    return _ACTIVATIONS[str(name)]


def head_width(config: Any) -> int:
    """Width of a head, named or the hidden size's share."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def window(config: Any, layer: int) -> int | None:
    """Tokens that a layer sees; None where it sees every token up to the longest context."""
    tokens = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        tokens = None
    if not getattr(config, "use_sliding_window", True) or (tokens or 0) >= config.max_position_embeddings:
        tokens = None
    return None if tokens is None else int(tokens)


def attention(config: Any, layer: int = 0, *, windows: bool = False, **changes: Any) -> AttentionSpec:
    """Llama's attention with `changes`. Only with `windows` does a configuration's window mean something in the family:
    others carry one from another model that they were made of."""
    width = head_width(config)
    bias = bool(getattr(config, "attention_bias", False))
    usual: dict[str, Any] = {
        "heads": int(config.num_attention_heads),
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads),
        "head_width": width,
        "scaling": width**-0.5,
        "qkv_bias": bias,
        "out_bias": bias,
        "window": window(config, layer) if windows else None,
    }
    if "rotary" not in changes:
        usual["rotary"] = rotary(config, width, layer=layer)
    return AttentionSpec(**(usual | changes))


def rms_norm(config: Any, **changes: Any) -> NormSpec:
    """The RMSNorm of a configuration."""
    return NormSpec("rms", float(config.rms_norm_eps), **changes)


def mlp(config: Any, width: int | None = None, **changes: Any) -> MLPSpec:
    """Llama's MLP, or of another width, with `changes`."""
    bias = bool(getattr(config, "mlp_bias", False))
    usual = {"activation": activation(config), "bias": bias}
    return MLPSpec(int(config.intermediate_size if width is None else width), **(usual | changes))


def state_space(config: Any) -> StateSpaceSpec:
    """Mamba2 by the names that hybrids with `mamba_` settings have."""
    if activation(config) != "silu":
        raise FamilyRefused(f"the activation {config.hidden_act} of a state space is not served")
    width = getattr(config, "mamba_d_ssm", None) or getattr(config, "mamba_expand", 1) * config.hidden_size
    if width != config.mamba_n_heads * config.mamba_d_head:
        raise FamilyRefused("state spaces whose heads are not as wide as their product are not served")
    least, most = getattr(config, "time_step_limit", None) or (0.0, float("inf"))
    return StateSpaceSpec(
        groups=int(config.mamba_n_groups),
        heads=int(config.mamba_n_heads),
        state_width=int(config.mamba_d_state),
        value_width=int(config.mamba_d_head),
        taps=int(config.mamba_d_conv),
        epsilon=float(config.rms_norm_eps),
        bias=bool(config.mamba_proj_bias),
        convolution_bias=bool(config.mamba_conv_bias),
        step_limits=(float(least), float(most)),
    )


# Names of their weights.
STATE_SPACES: dict[str, Any] = {
    "mixer_in": ("mamba.in_proj",),
    "convolution": "mamba.conv1d",
    "decay": "mamba.A_log",
    "decay_bias": "mamba.dt_bias",
    "mixer_norm": "mamba.norm",
    "mixer_out": "mamba.out_proj",
}


def layer(
    attending: AttentionSpec | LatentSpec | RecurrentSpec,
    feeding: MLPSpec | ExpertsSpec,
    norm: NormSpec,
    **changes: Any,
) -> LayerSpec:
    """Llama's layer, a norm before each half, with `changes`."""
    return replace(LayerSpec(attending, feeding, norm, norm), **changes)


def decoder(config: Any, layers: Iterable[LayerSpec], norm: NormSpec, **changes: Any) -> DecoderSpec:
    """A decoder of these layers, with `changes`."""
    usual: dict[str, Any] = {
        "vocabulary_size": int(config.vocab_size),
        "hidden_size": int(config.hidden_size),
        "layers": tuple(layers),
        "final_norm": norm,
        "max_positions": longest_context(config),
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
    }
    return DecoderSpec(**(usual | changes))


def longest_context(config: Any) -> int:
    """Tokens of the longest text. LongRoPE takes other frequencies, and so other keys for all tokens, once a text is
    longer than the original context. States alone have no longest text of their own."""
    longest = int(getattr(config, "max_position_embeddings", None) or _LONGEST_OF_STATES)
    if not getattr(config, "rope_parameters", None):
        return longest
    for rope in (rope_parameters(config, layer) for layer in counted(config)):
        if rope is not None and rope.get("rope_type") == "longrope":
            longest = min(longest, int(rope.get("original_max_position_embeddings", longest)))
    return longest


def counted(config: Any) -> range:
    """Numbers of the layers."""
    return range(int(config.num_hidden_layers))
