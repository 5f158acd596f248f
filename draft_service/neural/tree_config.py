"""The shape of a neural drafter's trees, and the room of its cache."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.frames import TreeLimits
from outrider.settings import SettingsError
from outrider.tree import MAX_ROWS


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How trees grow, in EAGLE-2's words.

    Attributes:
        num_steps: levels of a tree, each of which costs one pass.
        topk: children of a node, and nodes that a level expands; 1 drafts a chain.
        num_draft_tokens: nodes of the whole tree, the root not counted.
        min_score: least probability of the path to a node that is worth having.
        race_entrants: tokens that take part in COUPLED's race at each node.
        race_sharpness: how far the race over the drafter's law is taken for the target's own.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    min_score: float
    race_entrants: int
    race_sharpness: float

    def __post_init__(self) -> None:
        if not 1 <= self.num_draft_tokens < MAX_ROWS:
            raise SettingsError(f"num_draft_tokens must be 1..{MAX_ROWS - 1}")
        if self.num_steps < 1 or self.topk < 1:
            raise SettingsError("num_steps and topk must be at least 1")
        if 1 + (self.num_steps - 1) * self.topk > MAX_ROWS:
            raise SettingsError(f"(num_steps - 1) * topk must stay below {MAX_ROWS}")
        if not 0.0 <= self.min_score <= 1.0:
            raise SettingsError("min_score must be in [0, 1]")
        if self.race_entrants < self.topk or self.race_sharpness <= 0.0:
            raise SettingsError("race_entrants must be at least topk, and race_sharpness positive")

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(self.num_draft_tokens, self.num_steps)

    @property
    def expanded(self) -> int:
        """Most nodes whose keys are in the cache at a time."""
        return (self.num_steps - 1) * self.topk


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cache's room: `tokens` of all sequences, in pages of `page_size`; passes have at most `max_rows` rows."""

    tokens: int
    page_size: int
    max_rows: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.page_size, self.max_rows) < 1 or self.tokens < self.page_size:
            raise SettingsError("kv_tokens, page_size and max_rows must be positive, and kv_tokens a page at least")
