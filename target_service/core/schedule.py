"""The schedule of one step: its sequences, and how many known tokens each feeds."""

from __future__ import annotations

from dataclasses import dataclass

from target_service.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens that one sequence feeds in one step: `token_ids[kv_length : kv_length + count]`."""

    sequence: Sequence
    count: int

    @property
    def reaches_root(self) -> bool:
        """Whether the last row is the root, so that the step yields a token."""
        return self.sequence.kv_length + self.count == self.sequence.length

    @property
    def takes_tree(self) -> bool:
        """Whether the chunk is the root alone, so that drafted rows may follow."""
        return self.count == 1 and self.reaches_root


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: sequences that read come first, then those that feed their root alone and may have drafted rows. Pages
    for every known token are reserved."""

    chunks: tuple[Chunk, ...] = ()
    # Only one tenant has had sequences in recent steps, or has this step alone so that its time can be measured.
    own: bool = True

    @property
    def rows(self) -> int:
        """Rows of known tokens."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def reading(self) -> int:
        """Sequences that read."""
        return sum(not chunk.takes_tree for chunk in self.chunks)
