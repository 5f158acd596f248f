"""What the layers of a rank need of the other ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """One rank among `size`. Every rank makes the same calls in the same order, with tensors of the same shapes."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def summed(self, part: Tensor) -> Tensor:
        """[..]: the sum of all ranks' parts [..], the same on every rank bit for bit. `part` may be overwritten."""

    def joined(self, part: Tensor) -> Tensor:
        """[.., size * W]: all ranks' parts [.., W] beside one another, in the order of the ranks."""

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
