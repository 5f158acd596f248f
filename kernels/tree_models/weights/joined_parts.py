"""Tensors of a convolution that are published in parts, and modules under other names, as OLMo-hybrid's are; routers of
texts and images, as ERNIE 4.5 VL's."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from tree_models.names import WeightNames
from tree_models.weights.checkpoint import Stored, StoredTensor, TensorSource


class JoinedParts:
    """A checkpoint with one tensor where parts of it, one above another, are stored. A `TensorSource`."""

    def __init__(self, checkpoint: TensorSource, names: WeightNames) -> None:
        self._checkpoint, self.stored = checkpoint, dict[str, Stored]()
        self._parts: dict[str, list[str]] = defaultdict(list)
        for name in checkpoint.stored:
            self._parts[_joined_name(name, names)].append(name)
        for name, parts in self._parts.items():
            places = {f".{part}.": place for place, part in enumerate(names.convolution_parts)}
            parts.sort(key=lambda part: next((places[one] for one in places if one in part), 0))
            first = checkpoint.stored[parts[0]]
            rows = sum(checkpoint.stored[part].shape[0] for part in parts) if first.shape else 0
            self.stored[name] = StoredTensor((rows, *first.shape[1:]) if first.shape else (), first.dtype)

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        parts = [self._checkpoint.read(part) for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class TextRouters:
    """A checkpoint with the text's router [E, H] of a router [H, E], and the text's corrections [1, E] of two rows. A
    `TensorSource`."""

    def __init__(self, checkpoint: TensorSource, names: WeightNames) -> None:
        self._checkpoint, self._names = checkpoint, names
        self.stored = {name: self._own(name, one) for name, one in checkpoint.stored.items()}

    def _own(self, name: str, stored: Stored) -> Stored:
        if self._is_router(name) and len(stored.shape) == 2:
            return StoredTensor(stored.shape[::-1], stored.dtype)
        is_pair = name.endswith(f".{self._names.correction}") and stored.shape[:1] == (2,)
        return StoredTensor((1, *stored.shape[1:]), stored.dtype) if is_pair else stored

    def _is_router(self, name: str) -> bool:
        return name.endswith(f".{self._names.router}.weight")

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        tensor = self._checkpoint.read(name)
        return tensor.t() if self._is_router(name) else tensor[: self.stored[name].shape[0]] if tensor.dim() else tensor


def joined(checkpoint: TensorSource, names: WeightNames) -> TensorSource:
    """The checkpoint as a family with these names reads it."""
    if names.routers_see:
        return TextRouters(checkpoint, names)
    return JoinedParts(checkpoint, names) if names.convolution_parts or names.renamed else checkpoint


def _joined_name(name: str, names: WeightNames) -> str:
    """The name of what a stored tensor is, or is a part of."""
    for part in names.convolution_parts:
        name = name.replace(f".{part}.", f".{names.convolution}.")
    return renamed(name, names)


def renamed(name: str, names: WeightNames) -> str:
    """The name that stands here for a stored tensor's, of which a module or the end may be published otherwise."""
    for published, own in names.renamed:
        name = f"{name}.".replace(f".{published}.", f".{own}.")[:-1]
    return name
