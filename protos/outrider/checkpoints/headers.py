"""Headers of safetensors files: names, types, shapes and places of tensors, checked before a tensor is read.

The format (github.com/huggingface/safetensors): eight bytes with the header's length, the header as JSON, and the
tensors' values without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from outrider.checkpoints.refusal import CheckpointRefused, first_line
from outrider.checkpoints.regular_files import opened, read_into

# Some 60,000 tensors in one file, where published ones have hundreds to 20,000. The library's own bound of 100 MB is
# more than a second's work (8.3 s and 0.6 GB were measured for 53 MB), for which the process does nothing else.
HEADER_BYTES = 8 << 20
_LENGTH_BYTES = 8
# Bits of an element by the format's name of its type.
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, not read yet. `offset` is from the file's begin."""

    name: str
    dtype: str  # as the format names it, such as "BF16"
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    file_bytes: int  # of the file when its header was read

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file by its name. Raises `CheckpointRefused` where it is no such file, or not a
    whole one."""
    with opened(path) as (descriptor, size):
        if size < _LENGTH_BYTES:
            raise CheckpointRefused(f"{path.name} is no safetensors file: it has {size} bytes")
        first = bytearray(_LENGTH_BYTES)
        read_into(descriptor, memoryview(first), 0, path.name)
        length = int.from_bytes(first, "little")
        if length > size - _LENGTH_BYTES:
            raise CheckpointRefused(
                f"{path.name} is no safetensors file, or not a whole one: its header ends behind it"
            )
        if length > HEADER_BYTES:
            raise CheckpointRefused(f"{path.name} has a header of {length} bytes, at most {HEADER_BYTES} are read")
        text = bytearray(length)
        read_into(descriptor, memoryview(text), _LENGTH_BYTES, path.name)
    try:
        entries = json.loads(text, object_pairs_hook=_without_repeats)
    except CheckpointRefused as refused:
        raise CheckpointRefused(f"{path.name}: {refused}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointRefused(f"{path.name} has a header that is no JSON: {first_line(error)}") from None
    if not isinstance(entries, dict):
        raise CheckpointRefused(f"{path.name} has a header that is no JSON object")
    entries.pop("__metadata__", None)
    begin = _LENGTH_BYTES + length
    tensors = {name: _entry(name, fields, path, begin, size) for name, fields in entries.items()}
    _check_places(list(tensors.values()), path, begin, size)
    return tensors


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise CheckpointRefused(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def _entry(name: str, fields: Any, path: Path, begin: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        whole = all(type(one) is int and one >= 0 for one in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or not isinstance(dtype, str):
        raise CheckpointRefused(f"{path.name} has a header in which {name} has no dtype, shape or data_offsets")
    if dtype not in DTYPE_BITS:
        raise CheckpointRefused(f"{path.name}: {name} is of the unknown type {dtype}")
    if end - start != -(-prod(shape) * DTYPE_BITS[dtype] // 8):
        raise CheckpointRefused(f"{path.name}: {name} has {end - start} bytes, not those of {dtype} {list(shape)}")
    return TensorEntry(name, dtype, tuple(shape), path, begin + start, end - start, size)


def _check_places(tensors: Sequence[TensorEntry], path: Path, begin: int, size: int) -> None:
    """Raise `CheckpointRefused` unless the tensors fill the file without gaps."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != begin:
            raise CheckpointRefused(f"{path.name}: {tensor.name} begins at byte {tensor.offset}, expected {begin}")
        begin += tensor.nbytes
    if begin != size:
        cut = "it was cut short" if begin > size else "more follows behind its tensors"
        raise CheckpointRefused(f"{path.name} has {size} bytes, and its header describes {begin}: {cut}")
