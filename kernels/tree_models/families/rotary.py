"""Rotary frequencies by the types that configurations name, as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tree_models.spec import FamilyRefused, RotarySpec

# Frequencies [width / 2] in fp32, and the factor of cosines and sines, by the parameters, the width and the longest
# context.
_Frequencies = Callable[[Mapping[str, Any], int, int], tuple[Tensor, float]]


def rotary(
    config: Any,
    head_width: int,
    *,
    interleaved: bool = False,
    scaling: float | None = None,
    layer: int = 0,
    theta: float | None = None,
) -> RotarySpec:
    """The rotary embedding of heads of `head_width` in a layer, of which `partial_rotary_factor` is rotated.

    `scaling` in place of the type's own, `theta` of the configuration's. Raises `FamilyRefused` for a type that is not
    computed.
    """
    parameters = rope_parameters(config, layer)
    if theta is not None:
        parameters = {**parameters, "rope_theta": theta}
    kind = str(parameters.get("rope_type", "default"))
    if kind not in _TYPES:
        raise FamilyRefused(f"rotary frequencies of type {kind} are not served")
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    # Where all of a head is rotated, a part of it by nothing.
    width = head_width if kind == "proportional" else int(head_width * share)
    frequencies, own = _TYPES[kind](parameters, width, int(getattr(config, "max_position_embeddings", 0)))
    return RotarySpec(tuple(frequencies.tolist()), own if scaling is None else scaling, interleaved)


def rope_parameters(config: Any, layer: int) -> Mapping[str, Any]:
    """The parameters of a layer's rotary embedding, which some configurations have for each kind of layer."""
    found: Mapping[str, Any] = config.rope_parameters
    kinds = getattr(config, "layer_types", None) or ()
    if kinds and kinds[layer] in found:
        own: Mapping[str, Any] = found[kinds[layer]]
        return own
    # Beside the parameters, as in Phi-3, it comes first.
    beside = getattr(config, "original_max_position_embeddings", None)
    if beside is not None and found.get("rope_type") in _WITH_ORIGINAL:
        return {**found, "original_max_position_embeddings": beside}
    return found


def _default(parameters: Mapping[str, Any], width: int, longest: int) -> tuple[Tensor, float]:
    del longest
    return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0


def _linear(parameters: Mapping[str, Any], width: int, longest: int) -> tuple[Tensor, float]:
    return _default(parameters, width, longest)[0] / parameters["factor"], 1.0


def _llama3(parameters: Mapping[str, Any], width: int, longest: int) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones kept, and those between blended (Llama 3.1)."""
    frequencies, _ = _default(parameters, width, longest)
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    blend = (original / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(waves > original / low, frequencies / factor, blended)
    return torch.where(waves < original / high, frequencies, stretched), 1.0


def _yarn(parameters: Mapping[str, Any], width: int, longest: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): slow rotations are stretched, fast ones kept, with a ramp between."""
    base, original = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or longest / original
    scaling = parameters.get("attention_factor")
    if scaling is None:
        whole, every = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scaling = yarn_softness(factor, whole) / yarn_softness(factor, every) if whole and every else None
    ends = []
    for rotations in (parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1):
        ends.append(width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base)))
    if parameters.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    # So that a ramp of no length is a step.
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    kept = 1 - ramp
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return frequencies, float(yarn_softness(factor, 1.0) if scaling is None else scaling)


def _proportional(parameters: Mapping[str, Any], width: int, longest: int) -> tuple[Tensor, float]:
    """The first pairs of a head, a share of it, are rotated at the frequencies of a whole head, the rest by nothing."""
    frequencies, _ = _linear({"factor": 1.0} | dict(parameters), width, longest)
    frequencies[int(float(parameters.get("partial_rotary_factor") or 1.0) * width // 2) :] = 0.0
    return frequencies, 1.0


def _longrope(parameters: Mapping[str, Any], width: int, longest: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753), for texts up to the original context: longer ones are not served."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or longest / original
    scaling = parameters.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = torch.tensor(parameters["short_factor"], dtype=torch.float32)
    powers = parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return 1.0 / (short * powers), float(scaling)


def yarn_softness(factor: float, scale: float) -> float:
    """YaRN's factor of attention scores' size, by the stretching of positions."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


# Types that are made of the context that a model was first trained with.
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
_TYPES: Mapping[str, _Frequencies] = {
    "default": _default,
    # Other ones behind the longest context, which is as far as texts go.
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
