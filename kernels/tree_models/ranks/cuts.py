"""Parts of a checkpoint's tensors, as a rank reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tree_models.weights.checkpoint import StoredTensor, TensorSource


class Cut(Protocol):
    """A rank's part of a tensor."""

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a tensor of this shape."""

    def part(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of one dimension, put one behind another, and so many zeros behind them."""

    dimension: int
    spans: tuple[range, ...]
    zeros: int = 0

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """See `Cut`."""
        return self._with(whole, sum(map(len, self.spans)) + self.zeros)

    def part(self, whole: Tensor) -> Tensor:
        """See `Cut`."""
        parts = [whole.narrow(self.dimension, span.start, len(span)) for span in self.spans]
        if self.zeros:
            parts.append(whole.new_zeros(self._with(whole.shape, self.zeros)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)

    def _with(self, whole: Sequence[int], length: int) -> tuple[int, ...]:
        return (*whole[: self.dimension], length, *whole[self.dimension + 1 :])


@dataclass(frozen=True, slots=True)
class Zeros:
    """Nothing of a bias that is added once, by the first rank."""

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """See `Cut`."""
        return tuple(whole)

    def part(self, whole: Tensor) -> Tensor:
        """See `Cut`."""
        return torch.zeros_like(whole)


class RankTensors:
    """A checkpoint's tensors as one rank reads them. A `TensorSource`."""

    def __init__(self, whole: TensorSource, cuts: Mapping[str, Cut]) -> None:
        """`whole` has the tensors of the whole decoder, in their shapes; those without a cut are read whole."""
        self._whole, self._cuts = whole, cuts
        self.stored = {
            name: StoredTensor(cuts[name].shape(one.shape), one.dtype) if name in cuts else one
            for name, one in whole.stored.items()
        }

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        tensor = self._whole.read(name)
        return self._cuts[name].part(tensor) if name in self._cuts else tensor
