"""Where each tensor of a checkpoint goes: its name, its shape, and what writes it into a decoder's memory.

Several tensors may share memory (queries, keys and values lie one above another), and some are written together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

Copy = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a model's tensor. `tied_to` names the tensor with which it shares memory, if any: of the two
    a checkpoint may have one or both."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str = ""

    @property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Tensors that are written together. `write` takes them in the order of `specs`, of those shapes and types."""

    specs: Mapping[str, TensorSpec]
    write: Callable[[Sequence[Tensor]], None]
    memory: Tensor | None = None  # where the one tensor lies as it is published; None where it is kept in another form


def in_place(name: str, memory: Tensor, copy: Copy, order: Tensor | None = None) -> WeightSlot:
    """The slot of one tensor that lies in `memory`, its rows in the order `order` [rows] if that is given."""

    def write(tensors: Sequence[Tensor]) -> None:
        (tensor,) = tensors
        values = tensor.view(memory.shape)
        copy(memory, values if order is None else values[order.to(values.device)])

    held = memory.detach() if order is None else None
    return WeightSlot({name: TensorSpec(tuple(memory.shape), memory.dtype)}, write, held)


def by_columns(slots: Iterable[WeightSlot]) -> Iterator[WeightSlot]:
    """The slots of tensors whose matrices are published with inputs before outputs."""
    for slot in slots:
        specs = {name: replace(spec, shape=spec.shape[::-1]) for name, spec in slot.specs.items()}
        yield WeightSlot(specs, partial(_write_turned, slot))


def _write_turned(slot: WeightSlot, tensors: Sequence[Tensor]) -> None:
    slot.write([tensor.t().contiguous() for tensor in tensors])


def rearranged(
    name: str, shape: tuple[int, ...], memory: Tensor, arrange: Callable[[Tensor], Tensor], copy: Copy
) -> WeightSlot:
    """The slot of a tensor of `shape` that lies in `memory` as `arrange` makes it."""

    def write(tensors: Sequence[Tensor]) -> None:
        (tensor,) = tensors
        copy(memory, arrange(tensor))

    return WeightSlot({name: TensorSpec(shape, memory.dtype)}, write)


def stacked(names: Sequence[str], memory: Tensor, copy: Copy) -> Iterator[WeightSlot]:
    """Slots of tensors that lie in `memory` [sum of rows, ..] one above another, in equal parts."""
    rows = len(memory) // len(names)
    for index, name in enumerate(names):
        yield in_place(name, memory[index * rows : (index + 1) * rows], copy)


def published(slots: Iterable[WeightSlot]) -> dict[str, Tensor]:
    """Every tensor of slots that hold one each as it is published; they share the model's memory."""
    found: dict[str, Tensor] = {}
    for slot in slots:
        assert slot.memory is not None, f"kept in another form are {list(slot.specs)}"
        found |= dict.fromkeys(slot.specs, slot.memory)
    return found


def specs_of(slots: Sequence[WeightSlot]) -> dict[str, TensorSpec]:
    """Every tensor of all slots."""
    return {name: spec for slot in slots for name, spec in slot.specs.items()}
