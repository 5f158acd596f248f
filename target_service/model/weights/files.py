"""Safetensors files of a folder, checked against a model's tensors and read into memory.

The model itself is not changed here. Headers have names, shapes and types, so what does not fit is refused before any
tensor is read; values are checked as they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidField
from target_service.model.weights.room import HostRoom
from tree_models.slots import TensorSpec

# Types that can be rounded to those of weights, as safetensors' headers name them.
_FLOATS = ("F32", "F16", "BF16")
# Names in one message; a model has hundreds.
_NAMES_SHOWN = 5


def read_weights(folder: Path, wanted: Mapping[str, TensorSpec], room: HostRoom | None = None) -> dict[str, Tensor]:
    """Every wanted tensor of the folder's `*.safetensors`, on the CPU and in its wanted type.

    Tensors are copied out of the files, into `room` if it is given; nothing may have been taken of that yet. A tied
    tensor may be missing, and then is the tensor to which it is tied. Raises `InvalidField` where there are no such
    files, or they cannot be read; names are missing, unknown or there twice; a tensor has another shape, a type that is
    no floating point number of 16 or 32 bits, or a value that is not finite; tied tensors differ. The message has the
    name.
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
            room.reserve(wanted[name].nbytes for name in places)
            found = {
                name: _read(file, name, room.take(wanted[name].shape, wanted[name].dtype))
                for name, file in places.items()
            }
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
    # Copied, since a tensor may be mapped from the file, which others may change.
    place.copy_(file.get_tensor(name))
    if not _finite(place):
        kind = str(place.dtype).removeprefix("torch.")
        raise InvalidField("tensors", f"{name} has values that are not finite in {kind}")
    return place


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
        if not spec.tied_to:
            continue
        own, other = found.get(name), found.get(spec.tied_to)
        if own is not None and other is not None and not torch.equal(own, other):
            raise InvalidField("tensors", f"{name} is tied to {spec.tied_to} and differs from it")
        kept = own if other is None else other
        assert kept is not None, "one of them is there"
        found[name] = found[spec.tied_to] = kept
    return found


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _NAMES_SHOWN
    return ", ".join(listed[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
