"""What the layers of a rank need of the other ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tree_kernels.linear import Norm, ScaledRows, SumForm


class RowSums(Protocol):
    """Sums over ranks in one launch with what a layer does behind them. Every rank makes the same calls."""

    def place(self, rows: int, width: int) -> Tensor:
        """[rows, width] of numbers: where this rank writes its part of the next sum, which `add` makes."""

    def add(self, part: Tensor, residual: Tensor, norm: Norm | None, form: SumForm) -> tuple[Tensor, ScaledRows | None]:
        """See `tree_kernels.rank_sums.added_parts`; `part` [R, H] is what `place` gave."""


class RankGroup(Protocol):
    """One rank among `size`. Every rank makes the same calls in the same order, with tensors of the same shapes."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sums_of(self, residual: Tensor) -> RowSums | None:
        """What adds parts of all ranks to a residual [R, H]; None where `summed` does. The first sum of a pass is one
        of `summed`."""

    def summed(self, part: Tensor) -> Tensor:
        """[..]: the sum of all ranks' parts [..], the same on every rank bit for bit. `part` may be overwritten."""

    def joined(self, part: Tensor) -> Tensor:
        """[.., size * W]: all ranks' parts [.., W] beside one another, in the order of the ranks."""

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
