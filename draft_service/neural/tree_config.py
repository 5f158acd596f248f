"""The shape of a neural drafter's trees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.settings import SettingsError
from outrider.tree import MAX_ROWS
from outrider.wire.frames import TreeLimits

# Lower bounds of trees for several sequences. By simulation over recorded answers, one pass behind: with 7 rows a
# sequence, as 8 sequences have at 8B size, 5 levels of 8 nodes make 2.71 tokens a pass and 8 levels 2.79, but a tree
# that comes a pass too late makes 2.31; with 3 rows, as 32 sequences have, 5 levels of 4 nodes make 2.15 and 8 levels
# of 2 nodes 2.07. A level took 0.3 ms, and full trees came a pass too late (two H100,
# `benchmarks/results/2026-11-24-h100-widened-tenth.md`).
_LEAST_LEVELS, _LEAST_WIDTH = 5, 4


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How trees grow, in EAGLE-2's terms."""

    num_steps: int  # levels of a tree, each of which costs one pass
    topk: int  # children of a node; 1 drafts a chain
    num_draft_tokens: int  # nodes of the whole tree, without the root
    min_score: float  # least path probability of a node
    gumbel_candidates: int  # tokens that take part in COUPLED's Gumbel-max draw at each node
    gumbel_sharpness: float  # how far the Gumbel-max draw over the drafter's distribution is taken for the target's
    frontier: int = 0  # nodes that a level expands; 0 is topk
    rows_per_level: int = 0  # most rows of a level over all sequences, see `for_sequences`; 0 is no bound
    # Path probabilities of the nodes that a level would expand, below whose sum it is left out with all behind it; 0
    # leaves none out.
    least_mass: float = 0.0
    early_levels: int = 0  # levels that are sent while the others are grown, for one sequence; 0 sends whole trees only

    def __post_init__(self) -> None:
        if 1 + self.expanded > MAX_ROWS:
            raise SettingsError(f"(num_steps - 1) * frontier, or topk without one, must stay below {MAX_ROWS}")
        if self.gumbel_candidates < self.topk:
            raise SettingsError("gumbel_candidates must be at least topk")

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(self.num_draft_tokens, self.num_steps)

    @property
    def width(self) -> int:
        """Nodes that a level expands."""
        return self.frontier or self.topk

    @property
    def expanded(self) -> int:
        """Most nodes whose keys are in the cache at a time."""
        return (self.num_steps - 1) * self.width

    @property
    def early_nodes(self) -> int:
        """Most nodes of the levels that are sent early."""
        # They are sent to be in time: as many as whole trees had when that was measured
        # (`2026-11-23-h200-launched-at-once.md`). Chosen; larger ones take longer to encode and to read.
        return min(self.num_draft_tokens, 239)

    def for_sequences(self, count: int) -> TreeShape:
        """The shape of trees for `count` sequences together, such that drafting for all takes no longer than for one.

        For each doubling of the count, trees lose a level, down to `_LEAST_LEVELS`. The width becomes a power of two
        within `rows_per_level`, at least `_LEAST_WIDTH`; a tree has `_NODES_PER_EXPANDED` nodes for each that a level
        expands, since all nodes of a frame cost the target's host time. The count is rounded up to a power of two, for
        which passes are captured. Several sequences get whole trees only, for the same reason.
        """
        doublings = (count - 1).bit_length()
        if not self.rows_per_level or not doublings:
            return self
        steps = max(self.num_steps - doublings, min(self.num_steps, _LEAST_LEVELS))
        room = max(self.rows_per_level >> doublings, _LEAST_WIDTH)
        width = min(self.width, 1 << (room.bit_length() - 1))
        # Most nodes of such a tree for each that a level expands. Twice as many make 0.5 to 1.5 % more tokens by
        # simulation (`2026-11-25-cpu-table-sizes.md`); but with twice as many, and more of a trie, trees of 8 sequences
        # took 5.3 ms, not 4.5, and came too late for one pass in twenty more (two H100,
        # `2026-11-25-h100-widened-fourteenth.md`).
        nodes = min(self.num_draft_tokens, max(steps, int(width * 7.5)))
        # A frontier of 0 stands for topk.
        frontier = width if width < self.width else self.frontier
        return replace(self, num_steps=steps, frontier=frontier, num_draft_tokens=nodes, early_levels=0)
