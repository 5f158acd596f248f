"""Fills a decoder's slots from a checkpoint, strictly: what does not fit is refused before any tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tree_models.names import WeightNames
from tree_models.slots import TensorSpec, WeightSlot, specs_of
from tree_models.weights.checkpoint import FLOATS, Stored, TensorSource, WeightsRefused, some


def load_slots(slots: Sequence[WeightSlot], checkpoint: TensorSource, names: WeightNames) -> None:
    """Write every slot, one tensor at a time. Of two that are tied one may be missing.

    Args:
        slots: of all tensors of a model.
        checkpoint: what they are read from.
        names: which of them may be left over.

    Raises:
        WeightsRefused: tensors are missing, left over, or of another shape or kind of type; tied ones differ. The
            message has the first ten names.
    """
    check_names(specs_of(slots), checkpoint.stored, names)
    with torch.inference_mode():
        for slot in slots:
            slot.write([_read(checkpoint, name, spec) for name, spec in slot.specs.items()])


def check_names(wanted: Mapping[str, TensorSpec], stored: Mapping[str, Stored], names: WeightNames) -> None:
    """The part of `load_slots` that reads no values, of what is `stored` by name."""
    wrong = []
    if missing := [name for name, spec in wanted.items() if name not in stored and spec.tied_to not in stored]:
        wrong.append(f"missing are {some(missing)}")
    unread = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignored))
    modules = tuple(name.removesuffix(names.joining) for name in stored if name.endswith(f".{names.joining}"))
    left = [name for name in stored if name not in wanted and not unread.fullmatch(name)]
    if left := [name for name in left if not name.startswith(modules)]:
        wrong.append(f"left over are {some(left)}")
    both = {name: (stored[name], spec) for name, spec in wanted.items() if name in stored}
    shapes = {
        f"{name} is {list(one.shape)}, expected {list(spec.shape)}"
        for name, (one, spec) in both.items()
        if one.shape != spec.shape
    }
    if shapes:
        wrong.append(f"of another shape are {some(shapes)}")
    if wrong:
        raise WeightsRefused(f"its tensors are not those of its config.json: {'; '.join(wrong)}")
    if kinds := [f"{name} ({one.dtype})" for name, (one, _) in both.items() if one.dtype not in FLOATS]:
        raise WeightsRefused(f"tensors are no floating point numbers of 16 or 32 bits: {some(kinds)}")


def _read(checkpoint: TensorSource, name: str, spec: TensorSpec) -> Tensor:
    both = spec.tied_to in checkpoint.stored and name in checkpoint.stored
    # Once for the two.
    if both and name < spec.tied_to and not torch.equal(checkpoint.read(name), checkpoint.read(spec.tied_to)):
        raise WeightsRefused(
            f"{name} differs from {spec.tied_to}, and config.json ties them: set tie_word_embeddings to false, or "
            "remove one"
        )
    held = name if name in checkpoint.stored else spec.tied_to
    return checkpoint.read(held).to(spec.dtype)
