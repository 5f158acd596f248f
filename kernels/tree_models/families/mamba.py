"""Mamba 1 and 2 and Falcon-Mamba: layers of states alone, without attention and without MLPs."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import Description, activation, counted, decoder
from tree_models.names import WeightNames
from tree_models.spec import FamilyRefused, LayerSpec, NormSpec, SelectiveSpec, StateSpaceSpec

_MIXER = "mixer."
# Of a layer of one half, whatever it is, as NVIDIA's hybrids have them too.
STATE_LAYERS: dict[str, Any] = {
    "embedding": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "layer": "backbone.layers.{layer}.",
    "before_attention": "norm",
    "mixer_in": (f"{_MIXER}in_proj",),
    "convolution": f"{_MIXER}conv1d",
    "decay": f"{_MIXER}A_log",
    "decay_bias": f"{_MIXER}dt_bias",
    "skip": f"{_MIXER}D",
    "mixer_norm": f"{_MIXER}norm",
    "mixer_out": f"{_MIXER}out_proj",
}
_NAMES = WeightNames(**STATE_LAYERS, selection=f"{_MIXER}x_proj", steps=f"{_MIXER}dt_proj")


def mamba(config: Any) -> Description:
    """Mamba: a selective scan in each layer."""
    return _states(config, _selective(config, None))


def falcon_mamba(config: Any) -> Description:
    """Falcon-Mamba: Mamba with norms without weights of steps, keys and queries."""
    return _states(config, _selective(config, NormSpec("rms", float(config.mixer_rms_eps), weight=False)))


def mamba2(config: Any) -> Description:
    """Mamba2, Codestral Mamba: one norm of all heads' gated outputs."""
    least, most = config.time_step_limit
    space = StateSpaceSpec(
        groups=int(config.n_groups),
        heads=int(config.num_heads),
        state_width=int(config.state_size),
        value_width=int(config.head_dim),
        taps=int(config.conv_kernel),
        epsilon=float(config.layer_norm_epsilon),
        bias=bool(config.use_bias),
        convolution_bias=bool(config.use_conv_bias),
        step_limits=(float(least), float(most)),
    )
    return _states(config, space)


def _selective(config: Any, norm: NormSpec | None) -> SelectiveSpec:
    return SelectiveSpec(
        channels=int(config.intermediate_size),
        state_width=int(config.state_size),
        taps=int(config.conv_kernel),
        step_rank=int(config.time_step_rank),
        norm=norm,
        bias=bool(config.use_bias),
        convolution_bias=bool(config.use_conv_bias),
    )


def _states(config: Any, mixing: SelectiveSpec | StateSpaceSpec) -> Description:
    if activation(config) != "silu":
        raise FamilyRefused(f"the activation {config.hidden_act} of a state space is not served")
    norm = NormSpec("rms", float(config.layer_norm_epsilon))
    layers = [LayerSpec(mixing, None, norm, None) for _ in counted(config)]
    return Description(decoder(config, layers, norm), _NAMES)
