"""Values of tensors, copied out of safetensors files."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.headers import TensorEntry
from outrider.checkpoints.refusal import CheckpointRefused
from outrider.checkpoints.regular_files import opened, read_into

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensor(entry: TensorEntry, *, pinned: bool = False) -> Tensor:
    """The tensor on the CPU, in its stored type; `pinned` where a GPU takes it next, unless it is large. Raises
    `CheckpointRefused` for a type that is no plain number, and where the file has changed since its header was read."""
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointRefused(f"{entry.name} is {entry.dtype}, which is not read")
    # Pinned memory is never paged out, and is kept for the next tensor. Those of an 8B model's layers have at most
    # 117 MB.
    tensor = torch.empty(entry.shape, dtype=dtype, pin_memory=pinned and entry.nbytes <= 128 << 20)
    _fill(entry, tensor)
    return tensor


def read_tensor_into(entry: TensorEntry, place: Tensor) -> None:
    """As `read_tensor`, into `place` on the CPU, of the same shape, in its type."""
    if place.dtype == _DTYPES.get(entry.dtype) and place.is_contiguous():
        _fill(entry, place)
    else:
        place.copy_(read_tensor(entry))


def _fill(entry: TensorEntry, place: Tensor) -> None:
    with opened(entry.path) as (descriptor, size):
        if size != entry.file_bytes:
            raise CheckpointRefused(f"{entry.path.name} changed while it was read")
        if entry.nbytes:
            values: Any = place.detach().view(-1).view(torch.uint8).numpy()
            read_into(descriptor, memoryview(values), entry.offset, entry.path.name)


class TensorOnDisk:
    """A tensor that is read when it is taken, as transformers takes slices of safetensors files."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """As safetensors' slices have it."""
        return self.entry.dtype

    def __getitem__(self, place: EllipsisType | slice | int | tuple[Any, ...]) -> Tensor:
        tensor = read_tensor(self.entry)
        return tensor if place is Ellipsis else tensor[place]
