"""Families that stand by themselves: Cohere, EXAONE, Apertus, StarCoder2, Nemotron."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import (
    Description,
    attention,
    counted,
    decoder,
    head_width,
    layer,
    mlp,
    rms_norm,
)
from tree_models.families.olmo import NORMS_BEHIND
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import AttentionSpec, HeadNormSpec, LayerSpec, NormSpec


def cohere(config: Any) -> Description:
    """Command R: attention and MLP side by side, neighbouring pairs rotated, scaled logits."""
    norm = NormSpec("layer", float(config.layer_norm_eps))
    heads = HeadNormSpec(norm, "each_head") if config.use_qk_norm else None
    turning = rotary(config, head_width(config), interleaved=True)
    return _cohere(
        config, norm, [attention(config, index, rotary=turning, head_norm=heads) for index in counted(config)]
    )


def cohere2(config: Any) -> Description:
    """Command A and R7B: layers with windows, and layers that embed no positions."""
    turning = rotary(config, head_width(config), interleaved=True)
    attending = []
    for index in counted(config):
        windowed = config.layer_types[index] == "sliding_attention" and config.sliding_window is not None
        attending.append(attention(config, index, windows=True, rotary=turning if windowed else None))
    return _cohere(config, NormSpec("layer", float(config.layer_norm_eps)), attending)


def _cohere(config: Any, norm: NormSpec, attending: list[AttentionSpec]) -> Description:
    feeding = mlp(config, bias=False)
    layers = [layer(one, feeding, norm, before_mlp=None, parallel=True) for one in attending]
    return Description(decoder(config, layers, norm, logits_scale=float(config.logit_scale)), WeightNames())


def exaone4(config: Any) -> Description:
    """EXAONE 4: norms behind each half, normed heads; beside layers with windows, others embed no positions."""
    norm = rms_norm(config)
    layers = []
    for index in counted(config):
        turns = config.sliding_window is None or config.layer_types[index] == "sliding_attention"
        changes: dict[str, Any] = {} if turns else {"rotary": None}
        attending = attention(config, index, windows=True, head_norm=HeadNormSpec(norm), **changes)
        layers.append(LayerSpec(attending, mlp(config, bias=False), None, None, after_attention=norm, after_mlp=norm))
    return Description(decoder(config, layers, norm), WeightNames(**NORMS_BEHIND))


def apertus(config: Any) -> Description:
    """Apertus: xIELU without a gate, normed queries and keys."""
    norm = rms_norm(config)
    layers = [
        layer(
            attention(config, index, head_norm=HeadNormSpec(norm)),
            mlp(config, gated=False, bias=False),
            norm,
        )
        for index in counted(config)
    ]
    names = WeightNames(before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
    return Description(decoder(config, layers, norm), names)


def starcoder2(config: Any) -> Description:
    """StarCoder2: LayerNorms, biases, an MLP without a gate."""
    norm, bias = NormSpec("layer", float(config.norm_epsilon), bias=True), bool(config.use_bias)
    layers = [
        layer(
            attention(config, index, windows=True, qkv_bias=bias, out_bias=bias),
            mlp(config, gated=False, bias=bias),
            norm,
        )
        for index in counted(config)
    ]
    return Description(decoder(config, layers, norm), WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"))


def nemotron(config: Any) -> Description:
    """Nemotron and Minitron: LayerNorms whose weights are less one, squared ReLU, a part of each head rotated."""
    norm = NormSpec("layer", float(config.norm_eps), offset=1.0, bias=True)
    layers = [layer(attention(config, index), mlp(config, gated=False), norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())
