"""Safetensors files of a folder, held against the tensors that a model has, and read into memory.

Nothing of the model is touched here. Names, shapes and types are known by the files' headers, so that what does not fit
is refused before any tensor is read; values are checked as they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidField
from target_service.model.weights.room import HostRoom

# Types that turn into those of weights by rounding, by the names that safetensors' headers have.
_FLOATS = ("F32", "F16", "BF16")
# Names in one message; a model has hundreds.
_NAMES_SAID = 5


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of a model is. `tied_to` names the tensor that it is one with, if it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str = ""

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type."""
        return self.shape, self.dtype

    @property
    def bytes(self) -> int:
        """Of its values."""
        return prod(self.shape) * self.dtype.itemsize


def read_weights(folder: Path, wanted: Mapping[str, TensorSpec], room: HostRoom | None = None) -> dict[str, Tensor]:
    """Every wanted tensor of the folder's `*.safetensors`, on the CPU, in its wanted type, in memory of its own; in
    `room` where it is given, of which nothing was taken yet.

    A tied tensor may be missing: it is what it is tied to.

    Raises:
        InvalidField: no such files, or none that can be read; names that are missing, unknown or there twice; another
            shape; a type that is no floating point number of 16 or 32 bits; a value that is not finite; a tied tensor
            that differs from its other. The message says which.
    """
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InvalidField("folder", "holds no safetensors files")
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
            places = _places(files)
            _check_headers(places, wanted)
            room = room or HostRoom(torch.device("cpu"))
            room.reserve(wanted[name].bytes for name in places)
            found = {name: _read(file, name, room.take(*wanted[name].kind)) for name, file in places.items()}
    except (OSError, SafetensorError) as error:
        raise InvalidField("folder", f"cannot be read: {error}") from None
    return _with_tied(found, wanted)


def _places(files: Sequence[Any]) -> dict[str, Any]:
    """The file that each tensor is in."""
    places: dict[str, Any] = {}
    for file in files:
        for name in file.keys():  # noqa: SIM118
            if name in places:
                raise InvalidField("tensors", f"{name} is there twice")
            places[name] = file
    return places


def _check_headers(places: Mapping[str, Any], wanted: Mapping[str, TensorSpec]) -> None:
    if unknown := places.keys() - wanted.keys():
        raise InvalidField("tensors", f"the model has no {_some(unknown)}")
    if missing := [name for name, spec in wanted.items() if name not in places and spec.tied_to not in places]:
        raise InvalidField("tensors", f"{_some(missing)} missing")
    for name, file in places.items():
        entry, spec = file.get_slice(name), wanted[name]
        shape = tuple(entry.get_shape())
        if shape != spec.shape:
            raise InvalidField("tensors", f"{name} is {list(shape)}, expected {list(spec.shape)}")
        if entry.get_dtype() not in _FLOATS:
            raise InvalidField("tensors", f"{name} is {entry.get_dtype()}, expected one of {', '.join(_FLOATS)}")


def _read(file: Any, name: str, place: Tensor) -> Tensor:
    # A copy, for a tensor may lie in the file, which others may change.
    place.copy_(file.get_tensor(name))
    if not _finite(place):
        kind = str(place.dtype).removeprefix("torch.")
        raise InvalidField("tensors", f"{name} has values that are not finite in {kind}")
    return place


def _finite(tensor: Tensor) -> bool:
    """Whether every value is. One pass that makes no other tensor: `torch.isfinite` makes several of the tensor's size,
    and took five sixths of the time of reading."""
    if not tensor.numel():
        return True
    # Both are NaN where any value is.
    least, most = torch.aminmax(tensor)
    return math.isfinite(least) and math.isfinite(most)


def _with_tied(found: dict[str, Tensor], wanted: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    for name, spec in wanted.items():
        if not spec.tied_to:
            continue
        own, other = found.get(name), found.get(spec.tied_to)
        if own is not None and other is not None and not torch.equal(own, other):
            raise InvalidField("tensors", f"{name} is tied to {spec.tied_to} and differs from it")
        kept = other if other is not None else own
        assert kept is not None, "either is there"
        found[name] = found[spec.tied_to] = kept
    return found


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _NAMES_SAID
    return ", ".join(listed[:_NAMES_SAID]) + (f" and {more} more" if more > 0 else "")
