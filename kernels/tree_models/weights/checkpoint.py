"""Checkpoints as tensors by name, wherever these are read from.

A checkpoint of text and images has its text part under a prefix, which is stripped, beside parts that are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tree_models.names import WeightNames

# Types that can be rounded to those of weights, as safetensors' headers name them.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Prefixes of a text part, and what its names begin with elsewhere.
_TEXT = (
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("text_model.model.", "model."),
    ("text_model.lm_head.", "lm_head."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
)
# Modules of parts that read images, sounds or videos, or that speak.
_OTHER_PARTS = re.compile(
    r"(talker|token2wav|code2wav)\..*|(model\.|thinker\.)?(visual|vision_\w+|vit(_\w+)?|image_\w+|audio_\w+|multi_modal_projector|mm_projector|projector|resampler_model|connector|aligner|"
    r"patch_merger|embed_vision|embed_audio|vqmodel)\..*"
)


class WeightsRefused(ValueError):
    """A checkpoint's tensors are not those of its model, or cannot be read; the message names them, in one line."""


class Stored(Protocol):
    """What a header has of a tensor: its shape, and its type as safetensors names it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all dimensions."""

    @property
    def dtype(self) -> str:
        """Such as "BF16"."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """See `Stored`."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor's shape and type, read without its values."""

    def read(self, name: str) -> Tensor:
        """A tensor's values, on the CPU unless they are in memory elsewhere."""


class TensorsInMemory:
    """Tensors that are loaded already, by their published names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.stored = {name: StoredTensor(tuple(tensor.shape), _kind(tensor)) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        return self._tensors[name]


class _Renamed:
    """A checkpoint's tensors under other names. A `TensorSource`."""

    def __init__(self, checkpoint: TensorSource, stored_names: Mapping[str, str]) -> None:
        self._checkpoint, self._names = checkpoint, stored_names
        self.stored = {name: checkpoint.stored[own] for name, own in stored_names.items()}

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        return self._checkpoint.read(self._names[name])


def text_tensors(checkpoint: TensorSource) -> TensorSource:
    """The text part of a checkpoint of text and more, under the names of a model of text alone. Raises `WeightsRefused`
    for tensors that are there under names with several prefixes."""
    names = [name for name in checkpoint.stored if not _OTHER_PARTS.fullmatch(name)]
    own = {text_name(name): name for name in names}
    if twice := set(names) - set(own.values()):
        raise WeightsRefused(f"tensors are there under another prefix too: {some(twice)}")
    return _Renamed(checkpoint, own)


def whole_names(checkpoint: TensorSource, names: WeightNames) -> TensorSource:
    """A checkpoint with the body's prefix before the names of its body: `layers.0...` is `model.layers.0...`. A body
    that was written by itself has names without it. Raises `WeightsRefused` for tensors that are there with and without
    the prefix."""
    prefix = names.embedding.partition(".")[0] + "."
    parts = tuple(f"{name.removeprefix(prefix).partition('.')[0]}." for name in names.of_body)
    if twice := {prefix + name for name in checkpoint.stored if name.startswith(parts)} & checkpoint.stored.keys():
        raise WeightsRefused(f"tensors are there with and without {prefix!r} before their names: {some(twice)}")
    return _Renamed(checkpoint, {prefix + name if name.startswith(parts) else name: name for name in checkpoint.stored})


def some(names: Iterable[str], most: int = 10) -> str:
    """The first names in order, and how many more there are."""
    listed = sorted(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "F32"
    return "U8" if tensor.dtype == torch.uint8 else "I64"


def text_name(name: str) -> str:
    """What a tensor of a text part is called in a model of text alone; other names as they are."""
    for prefix, own in _TEXT:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
