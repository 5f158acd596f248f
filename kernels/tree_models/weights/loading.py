"""Fills a decoder's slots from a checkpoint, strictly: what does not fit is refused before any tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tree_models.slots import TensorSpec, WeightSlot, specs_of
from tree_models.weights.checkpoint import FLOATS, Checkpoint, CheckpointRefused, some


def load_slots(slots: Sequence[WeightSlot], checkpoint: Checkpoint, ignored: Sequence[str]) -> None:
    """Write every slot, one tensor at a time. A tied tensor may be missing, and then is the one to which it is tied.

    Args:
        slots: of all tensors of a model.
        checkpoint: what they are read from.
        ignored: regular expressions of whole names that may be left over.

    Raises:
        CheckpointRefused: tensors are missing, left over, or of another shape or kind of type; tied ones differ. The
            message has the first ten names.
    """
    check_names(specs_of(slots), checkpoint, ignored)
    with torch.inference_mode():
        for slot in slots:
            slot.write([_read(checkpoint, name, spec) for name, spec in slot.specs.items()])


def check_names(wanted: Mapping[str, TensorSpec], checkpoint: Checkpoint, ignored: Sequence[str]) -> None:
    """The part of `load_slots` that reads no values."""
    stored = checkpoint.stored
    missing = [name for name, spec in wanted.items() if name not in stored and spec.tied_to not in stored]
    if missing:
        raise CheckpointRefused(f"tensors are missing: {some(missing)}")
    unread = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    if left := [name for name in stored if name not in wanted and not unread.fullmatch(name)]:
        raise CheckpointRefused(f"the model has no place for {some(left)}")
    wrong = [
        f"{name} is {list(stored[name].shape)}, expected {list(spec.shape)}"
        for name, spec in wanted.items()
        if name in stored and stored[name].shape != spec.shape
    ]
    if wrong:
        raise CheckpointRefused(f"tensors have other shapes: {some(wrong)}")
    kinds = [f"{name} is {stored[name].kind}" for name in wanted if name in stored and stored[name].kind not in FLOATS]
    if kinds:
        raise CheckpointRefused(f"tensors are no floating point numbers of 16 or 32 bits: {some(kinds)}")


def _read(checkpoint: Checkpoint, name: str, spec: TensorSpec) -> Tensor:
    both = spec.tied_to in checkpoint.stored and name in checkpoint.stored
    if both and not torch.equal(checkpoint.read(name), checkpoint.read(spec.tied_to)):
        raise CheckpointRefused(f"{name} differs from {spec.tied_to}, to which config.json ties it")
    held = name if name in checkpoint.stored else spec.tied_to
    return checkpoint.read(held).to(spec.dtype)
