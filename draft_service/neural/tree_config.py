"""The shape of a neural drafter's trees, and the room of its cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.settings import SettingsError
from outrider.tree import MAX_ROWS
from outrider.wire.frames import TreeLimits


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How trees grow, in EAGLE-2's words.

    Attributes:
        num_steps: levels of a tree, each of which costs one pass.
        topk: children of a node; 1 drafts a chain.
        num_draft_tokens: nodes of the whole tree, the root not counted.
        min_score: least probability of the path to a node that is worth having.
        race_entrants: tokens that take part in COUPLED's race at each node.
        race_sharpness: how far the race over the drafter's distribution is taken for the target's own.
        frontier: nodes that a level expands; 0 is as many as topk.
        rows_per_level: rows of a pass over a level of all sequences together; 0 is no bound.
        early_levels: levels that are handed out while the others are grown, to a target of one sequence; 0 hands out
            whole trees only.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    min_score: float
    race_entrants: int
    race_sharpness: float
    frontier: int = 0
    rows_per_level: int = 0
    early_levels: int = 0

    def __post_init__(self) -> None:
        if 1 + self.expanded > MAX_ROWS:
            raise SettingsError(f"(num_steps - 1) * frontier, or topk without one, must stay below {MAX_ROWS}")
        if self.race_entrants < self.topk:
            raise SettingsError("race_entrants must be at least topk")

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

    def for_sequences(self, count: int) -> TreeShape:
        """The shape of trees that so many sequences get together, so that their levels keep to `rows_per_level`.

        Levels are narrowed to a power of two, one node at least, and trees hold fewer nodes in proportion, but a chain
        at least. The count is rounded up to a power of two, for which passes are captured. Several sequences get whole
        trees only: passes of several take longer, so that there is time for those, and for each growth that comes the
        target's host pays, sequence by sequence.
        """
        room = max(1, self.rows_per_level >> (count - 1).bit_length())
        shape = replace(self, early_levels=0) if count > 1 and self.early_levels else self
        if not self.rows_per_level or self.width <= room:
            return shape
        width = 1 << (room.bit_length() - 1)
        nodes = min(self.num_draft_tokens, max(self.num_steps, self.num_draft_tokens * width // self.width))
        return replace(shape, frontier=width, num_draft_tokens=nodes)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cache's room: `tokens` of all sequences, in pages of `page_size`; passes have at most `max_rows` rows."""

    tokens: int
    page_size: int
    max_rows: int

    def __post_init__(self) -> None:
        if self.tokens < self.page_size:
            raise SettingsError("kv_tokens must be a page at least")
