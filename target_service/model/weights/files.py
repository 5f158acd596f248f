"""Safetensors files of a folder, checked against a model's tensors and read into memory.

The model itself is not changed here. Headers have names, shapes and types, so what does not fit is refused before any
tensor is read; values are checked as they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from outrider.checkpoints.headers import TensorEntry, read_header
from outrider.checkpoints.refusal import CheckpointRefused, some
from outrider.checkpoints.tensors import read_tensor_into
from outrider.errors import InvalidField
from target_service.model.weights.host_memory import HostMemory
from tree_models.ranks.cuts import Cut
from tree_models.slots import TensorSpec

# Types that can be rounded to those of weights, as safetensors' headers name them.
_FLOATS = ("F32", "F16", "BF16")


def read_weights(
    folder: Path,
    wanted: Mapping[str, TensorSpec],
    memory: HostMemory | None = None,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Every wanted tensor of the folder's `*.safetensors`, on the CPU and in its wanted type; of those with a cut that
    part.

    Tensors are copied out of the files, into `memory` if it is given; nothing may have been taken of that yet. Of two
    that are tied one may be missing. Raises `InvalidField` where there are no such
    files, or they cannot be read; names are missing, unknown or there twice; a tensor has another shape, a type that is
    no floating point number of 16 or 32 bits, or a value that is not finite; tied tensors differ. The message has the
    name.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InvalidField("folder", "holds no safetensors files")
    try:
        entries = _entries(paths)
        _check_headers(entries, wanted)
        memory = memory or HostMemory(torch.device("cpu"))
        kept = {name: _part(wanted[name], cuts.get(name)) for name in entries}
        memory.reserve(spec.nbytes for spec in kept.values())
        found = {
            name: _read(entry, wanted[name], memory.allocate(kept[name].shape, kept[name].dtype), cuts.get(name))
            for name, entry in entries.items()
        }
    except (OSError, CheckpointRefused) as error:
        raise InvalidField("folder", f"cannot be read: {error}") from None
    return _with_tied(found, wanted)


def _entries(paths: Sequence[Path]) -> dict[str, TensorEntry]:
    """Every tensor of all files."""
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        found = read_header(path)
        if twice := entries.keys() & found.keys():
            raise InvalidField("tensors", f"{some(twice)} is there twice")
        entries |= found
    return entries


def _check_headers(entries: Mapping[str, TensorEntry], wanted: Mapping[str, TensorSpec]) -> None:
    if unknown := entries.keys() - wanted.keys():
        raise InvalidField("tensors", f"the model has no {some(unknown)}")
    if missing := [name for name, spec in wanted.items() if name not in entries and spec.tied_to not in entries]:
        raise InvalidField("tensors", f"{some(missing)} missing")
    for name, entry in entries.items():
        spec = wanted[name]
        if entry.shape != spec.shape:
            raise InvalidField("tensors", f"{name} is {list(entry.shape)}, expected {list(spec.shape)}")
        if entry.dtype not in _FLOATS:
            raise InvalidField("tensors", f"{name} is {entry.dtype}, expected one of {', '.join(_FLOATS)}")


def _part(spec: TensorSpec, cut: Cut | None) -> TensorSpec:
    return spec if cut is None else replace(spec, shape=cut.shape(spec.shape))


def _read(entry: TensorEntry, spec: TensorSpec, place: Tensor, cut: Cut | None) -> Tensor:
    """The tensor, or its part, in `place`."""
    whole = place if cut is None else torch.empty(spec.shape, dtype=spec.dtype)
    read_tensor_into(entry, whole)
    if not _finite(whole):
        kind = str(place.dtype).removeprefix("torch.")
        raise InvalidField("tensors", f"{entry.name} has values that are not finite in {kind}")
    return place if cut is None else place.copy_(cut.part(whole))


def _finite(tensor: Tensor) -> bool:
    """Whether every value is finite, in one pass without another tensor: `torch.isfinite` makes several of the tensor's
    size, and took five sixths of the time of reading."""
    if not tensor.numel():
        return True
    # Both are NaN where any value is.
    least, most = torch.aminmax(tensor)
    return math.isfinite(least) and math.isfinite(most)


def _with_tied(found: dict[str, Tensor], wanted: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    for name, spec in wanted.items():
        # Once for the two.
        if not spec.tied_to or spec.tied_to < name:
            continue
        own, other = found.get(name), found.get(spec.tied_to)
        if own is not None and other is not None and not torch.equal(own, other):
            raise InvalidField("tensors", f"{name} is tied to {spec.tied_to} and differs from it")
        kept = own if other is None else other
        assert kept is not None, "one of them is there"
        found[name] = found[spec.tied_to] = kept
    return found
