"""Memory of several ranks that all of them can read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Of a part that is summed alone, and two by turns for others: a rank writes its next part while others may still read
# its last one.
PLACES = 3


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What a rank has of the memory: its own, and other ranks', in the order of the ranks."""

    rank: int
    parts: tuple[Tensor, ...]  # [PLACES, numbers] each, of one type
    signals: tuple[Tensor, ...]  # [programs, ranks] int32 each, zeros between sums

    @property
    def own(self) -> Tensor:
        """[PLACES, numbers] of this rank."""
        return self.parts[self.rank]

    @property
    def programs(self) -> int:
        """How many programs of a launch can meet those of other ranks."""
        return len(self.signals[self.rank])
