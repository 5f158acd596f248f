"""The tensors of trees that grow on the device: children of rows, their Gumbel-max draws, and the trees.

Symbols: B sequences; L levels; W nodes that a level expands; K children of each; F frontier nodes of a sequence, 1 at
the first level and W below; V' tokens of the network's vocabulary; T = 1 + (L - 1) * W rows of the cache's tail, the
root's first; C = 1 + K + (L - 1) * W * K items of a tree, the root first and then the children of every frontier in
order. Absent items have a path probability of 0: children of an absent item, a frontier place that is not taken. They
are computed like the rest and never kept.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

# Of the temperatures that trees are grown for: at lower ones the target's distribution is practically one token.
COLDEST = 0.05
# That trees of greedy sequences are grown for. A network's distribution is near the target's own, of which a greedy
# target takes the likeliest token: at 1 a child of probability 0.5 is right 72 times in 100, at 0.75 50 times, and of
# four temperatures this one's trees accept most (`benchmarks/results/2026-11-30-cpu-greedy-temperature.md`).
GREEDY_TEMPERATURE = 0.75
# Parts of a probability, as integers, whose sum does not depend on an order: of 2,000 trees it fits in an int32.
MASS_UNITS = 1 << 20


class VocabularyRanks(Protocol):
    """Ranks that share a network's vocabulary, each with as many tokens, in their order. All make the same calls."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def joined(self, part: Tensor) -> Tensor:
        """[R, size * W]: all ranks' parts [R, W] beside one another, in the order of the ranks."""


class Children(NamedTuple):
    """The best children of each of R rows, best first; a score of 0 is no child."""

    tokens: Tensor  # [R, K] int32 the target's ids
    scores: Tensor  # [R, K] float64


class GumbelMax(NamedTuple):
    """Each sequence's Gumbel-max draw: filters as a request gives them, and the key of the shared noise."""

    coupled: Tensor  # [B] int32; a sequence of 0 draws nothing, and ranks by probability
    top_k: Tensor  # [B] int32, 0 for none
    top_p: Tensor  # [B] float64, 1 for none
    min_p: Tensor  # [B] float64, 0 for none
    seeds: Tensor  # [B] int64, the bits of 64
    positions: Tensor  # [B] int64 of the token after the root


class Growth(NamedTuple):
    """Trees as they grow, and what the next pass reads. All tensors keep their addresses."""

    tokens: Tensor  # [B, C] int32
    parents: Tensor  # [B, C] int32 items
    path_probs: Tensor  # [B, C] float64
    scores: Tensor  # [B, C] float32 given the parent
    # Of odd levels' frontiers and of even ones', since a level reads one and writes the other.
    frontier: Tensor  # [2, B, W] int32 items that are expanded
    frontier_path_probs: Tensor  # [2, B, W] float64
    next_tokens: Tensor  # [B, W] int32 of the frontier
    sources: Tensor  # [B, W] int64 row of each one's parent in the pass before, in which each sequence has F
    # [L + 1] int32, of each level from the second on: how much more its frontiers hold than `least_mass` of each tree
    # that may grow, in parts of MASS_UNITS. A level that holds no more is left out, and so are all behind it.
    worth: Tensor
    least_mass: float  # 0 leaves none out
    breadth: int  # K

    def first_item(self, level: int) -> int:
        """The first of a level's items."""
        width = self.frontier.shape[2]
        return 1 if level == 1 else 1 + self.breadth + (level - 2) * width * self.breadth
