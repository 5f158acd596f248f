"""What drafters behind the target's passes have in common: the shapes of their trees, and how these grow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from draft_service.neural.cuda_graphs.pass_trees import CacheSizes, PassTrees
from draft_service.neural.tree_config import TreeShape
from tree_models.in_pass import TablesToWrite, VerifiedPass

if TYPE_CHECKING:
    from tree_kernels.attention import TreeAttention
    from tree_kernels.latent_attention import LatentAttention
    from tree_models.layers.paged import CacheShape, PagedPass

# (sequences up to which, levels, nodes that a level expands). With an 8B target on an H200 a level of 8 rows takes
# 0.15 ms, of 32 rows 0.17, of 64 rows 0.20 and of 128 rows 0.27, of passes of 6 to 10 ms. Of four sets of shapes these
# made most tokens a second at 8, 32 and 128 sequences (`benchmarks/results/2026-11-29-h200-heads-behind-passes.md`).
_SHAPES = ((4, 7, 8), (16, 5, 4), (32, 4, 2), (64, 3, 2))
# For more.
_LEAST_LEVELS, _LEAST_WIDTH = 2, 1
# Of networks whose levels can be left out: sequences up to which they are, levels, nodes that a level expands, and the
# least mass of its frontier. By simulation of one sequence such trees make 4 % more tokens a second than fixed ones,
# and with 8 sequences no more (`benchmarks/results/2026-11-30-cpu-deep-trees.md`); at the temperature of greedy trees
# with masses of 0.15 to 0.3 (`2026-11-30-cpu-greedy-temperature.md`). An H200 takes 0.155 ms for a level and 0.028 for
# one that is left out (`2026-11-30-h200-level-launches.md`).
_LEFT_OUT = (4, 8, 8, 0.2)


class PassDrafter(ABC):
    """The part of `tree_models.in_pass.InPassDrafter` that does not depend on the network. Subclasses set the other
    attributes."""

    name: str
    layers: tuple[int, ...]
    cache_shapes: Sequence[CacheShape]
    latent: bool
    window = 0
    divided = False
    # Levels that are not worth their time end at once.
    leaves_out = False

    def __init__(self, tree: TreeShape) -> None:
        """Trees are no deeper or wider than `tree`."""
        self._tree = tree
        # What `prepare` was given.
        self._cache: tuple[TreeAttention | LatentAttention, CacheSizes] | None = None
        # By sequences at most.
        self._trees: dict[int, PassTrees] = {}
        # [R, C] of the rows of the pass that was read last, and their positions, until trees grow from it.
        self._read: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def read(self, done: VerifiedPass, sequences: int) -> None:
        """See `InPassDrafter.read`. Ends with `grow_from`."""

    @abstractmethod
    def _make_trees(
        self, sequences: int, shape: TreeShape, attention: TreeAttention | LatentAttention, sizes: CacheSizes
    ) -> PassTrees:
        """The trees behind passes of up to so many sequences."""

    def tail(self, sequences: int) -> int:
        """See `InPassDrafter.tail`."""
        return self._shape_for(sequences).expanded

    def prepare(self, attention: TreeAttention | LatentAttention, page_size: int, max_context: int, rows: int) -> None:
        """See `InPassDrafter.prepare`."""
        most = max_context + self.tail(1)
        self._cache = attention, CacheSizes(page_size, -(-most // page_size), rows)

    def grow_from(self, carried: Tensor, positions: Tensor) -> None:
        """Let the next trees grow from the states [R, C] of rows at `positions` [R]."""
        self._read = carried, positions

    def grow(self, sequences: int, step: PagedPass, to: TablesToWrite | None, *, coupled: bool) -> None:
        """See `InPassDrafter.grow`."""
        read, self._read = self._read, None
        assert read is not None, "a pass was read before"
        trees = self.trees_for(sequences)
        trees.grow(*read, step.cache, coupled=coupled)
        if to is not None:
            trees.write(*to)

    def trees_for(self, sequences: int) -> PassTrees:
        """The trees behind passes of so many sequences."""
        found = self._trees.get(sequences)
        if found is None:
            assert self._cache is not None, "`prepare` comes first"
            shape = self._shape_for(sequences)
            found = self._trees[sequences] = self._make_trees(sequences, shape, *self._cache)
        return found

    def _shape_for(self, sequences: int) -> TreeShape:
        return shape_for(self._tree, sequences, leaves_out=self.leaves_out)


def shape_for(tree: TreeShape, sequences: int, *, leaves_out: bool = False) -> TreeShape:
    """The shape of trees behind passes of so many sequences: as deep and as wide as pays with the rows that each of
    them gets, and no deeper or wider than `tree`. `leaves_out` if levels that are not worth their time end at once."""
    levels, width = next(
        ((levels, width) for most, levels, width in _SHAPES if sequences <= most), (_LEAST_LEVELS, _LEAST_WIDTH)
    )
    least_mass = 0.0
    if leaves_out and sequences <= _LEFT_OUT[0] and tree.num_steps >= 3:
        _, levels, width, least_mass = _LEFT_OUT
    steps = max(2, min(tree.num_steps, levels))
    return replace(
        tree, num_steps=steps, frontier=min(tree.width, width), least_mass=least_mass, early_levels=0, rows_per_level=0
    )
