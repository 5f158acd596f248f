"""The drafts that a step verifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outrider.tree import TokenTree
from target_service.core.sequence import Sequence
from target_service.speculation.policy.draft_times import Use


@dataclass(frozen=True)
class Gathered:
    """A tree per chunk, and what waiting for drafts cost."""

    trees: list[TokenTree | None]
    # Sequences that the step waited for.
    drafted: tuple[Sequence, ...]
    wait_ns: int
    # Sequences whose draft came too late.
    fallbacks: int
    use: Use
    # The cost of its rows, in plain steps.
    row_cost: float = 1.0

    @cached_property
    def has_trees(self) -> bool:
        """Whether any tree has more rows than its root."""
        return any([tree is not None and tree.drafted for tree in self.trees])

    @property
    def answered(self) -> bool:
        """Whether the draft answered for any of the sequences that the step waited for."""
        return len(self.drafted) > self.fallbacks
