"""Of tiny models those that a test runs in `make test`: together they have everything that any of them has.

Our code computes what a description says, so that two families of which it says the same differ in nothing that a test
of engines or ranks could find. That a family's description is right is shown for each, by transformers' logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from conftest import TINY, TINY_OF
from transformers import AutoConfig

from tree_models.decoder_spec import DecoderSpec
from tree_models.families import describe

# Of all models, for what computes whole decoders.
USUAL = {
    "ministral3", "cohere", "apertus", "glm4_moe", "ernie4_5_moe", "phimoe", "longcat_flash", "diffllama", "nanochat",
    "gemma2", "gemma3n", "gemma4, experts", "gpt_oss", "mimo_v2", "laguna, gates of numbers", "modernbert",
    "modernbert, tied", "xlstm", "zaya, windows", "lfm2", "lfm2, biases", "qwen3_next",
    "granitemoehybrid, mamba and experts", "falcon_h1", "nemotron_h", "nemotron_h, latent", "recurrent_gemma", "zamba",
    "zamba2", "falcon_mamba", "kimi_linear", "minimax", "olmo_hybrid", "openai-gpt", "codegen", "falcon, falling",
    "mpt, twelve heads", "opt", "xglm", "llama4", "mllama", "step",
}  # fmt: skip
# Of those with states, with windows, and of the text of models that read images too, for engines: these know nothing
# of what follows attention.
USUAL_RECURRENT = {
    "xlstm", "zaya, windows", "lfm2", "lfm2, biases", "qwen3_next", "granitemoehybrid, mamba and experts", "bamba",
    "falcon_h1", "nemotron_h", "nemotron_h, latent", "jamba", "recurrent_gemma", "zamba", "zamba, plain",
    "kimi_linear", "minimax", "olmo_hybrid",
}  # fmt: skip
USUAL_WINDOWED = {
    "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "gpt_oss", "olmo3", "cohere2", "mimo_v2", "laguna",
    "afmoe", "llama4, plain heads", "modernbert", "modernbert, tied",
}  # fmt: skip
USUAL_TEXT_PARTS = {"qwen2_vl", "muse_glimmer", "llama4", "mllama", "mistral4", "step"}


def usual(names: Iterable[str], chosen: Collection[str]) -> list[Any]:
    """Parameters of a test: these names, of which those that are not chosen are of `make test-full`."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in names]


def described(model_type: str, settings: dict[str, Any]) -> DecoderSpec:
    """What a tiny model of the family computes."""
    description = describe(AutoConfig.for_model(model_type, **(TINY | TINY_OF.get(model_type, {}) | settings)))
    assert description is not None
    return description.spec


def parts_of(described: Any, name: str = "") -> set[tuple[Any, ...]]:
    """Which values the fields of a description have. Of numbers only whether they are 0, 1 or others."""
    if is_dataclass(described):
        kind = type(described).__name__
        return {(name, kind)}.union(
            *(parts_of(getattr(described, one.name), f"{kind}.{one.name}") for one in fields(described))
        )
    if isinstance(described, tuple):
        return {(name, "some" if described else "none")}.union(*(parts_of(one, name) for one in described))
    if isinstance(described, int | float) and not isinstance(described, bool):
        return {(name, "number", described if described in (0, 1) else "other")}
    return {(name, described)}


def parts_of_caches(spec: DecoderSpec) -> set[tuple[Any, ...]]:
    """The same of what engines keep for a model's layers, and of what stands around these."""
    found = set[tuple[Any, ...]]()
    for layer in spec.layers:
        found |= parts_of(layer.attention) | {("shared", layer.shared is None)}
    for one in fields(spec):
        value = getattr(spec, one.name)
        if one.name != "layers":
            found |= {(one.name, type(value).__name__)} if is_dataclass(value) else parts_of(value, one.name)
    return found
