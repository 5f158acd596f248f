"""Trees as arrays, to be merged or encoded without a Python object for each node.

Elsewhere a tree is a `TokenTree`. A tree of 240 nodes costs 0.1 ms as one, and more where two are merged, so trees
without distributions stay arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from draft_service.compiling import Numbers, Reals
from draft_service.drafters.base import DraftSequence
from draft_service.drafters.packing import RowHeads, pack, room_for
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree


class GrownTrees(NamedTuple):
    """Trees of n sequences, in the order of `TokenTree`: row 0 is the root, path probability falls, parents come first.
    Entries after a tree's last row are undefined. All arrays are contiguous."""

    trees: Numbers  # [n, 2, rows] tokens and parents
    scores: Reals  # [n, rows] given the parent
    sizes: RowHeads  # [n, ..] rows of each tree, in column 0

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> GrownTrees:
        """Trees as arrays; distributions are left out."""
        grown = cls.roots([tree.token_ids[0] for tree in trees], max(map(len, trees), default=1))
        for i, tree in enumerate(trees):
            rows = len(tree)
            grown.trees[i, 0, :rows], grown.trees[i, 1, :rows] = tree.token_ids, tree.parents
            grown.scores[i, :rows], grown.sizes[i] = tree.scores, rows
        return grown

    @classmethod
    def roots(cls, roots: Sequence[int], rows: int) -> GrownTrees:
        """Trees of a root alone, with room for `rows` rows."""
        count = len(roots)
        trees, scores = np.zeros((count, 2, rows), np.int32), np.ones((count, rows))
        trees[:, 0, 0] = roots
        return cls(trees, scores, np.ones((count, 1), np.int64))

    def as_trees(self) -> list[TokenTree]:
        sizes: list[int] = self.sizes[:, 0].tolist()
        most = max(sizes, default=1)
        rows, scores = self.trees[:, :, :most].tolist(), self.scores[:, :most].tolist()
        return [
            TokenTree(tuple(tokens[:size]), tuple(parents[:size]), tuple(scored[:size]))
            for size, (tokens, parents), scored in zip(sizes, rows, scores, strict=True)
        ]

    def packed(self, heads: Sequence[tuple[int, int, int, int]]) -> tuple[list[int], bytes] | None:
        """Nodes of each tree, and the bytes of a `GrowSequences`; None if a token is past its sequence's vocabulary.

        `heads`: for each sequence its id on the wire, its step, the id of its first new node and its vocabulary size,
        see `drafters.packing.pack`.
        """
        count, _, rows = self.trees.shape
        out = np.empty(room_for(count, rows), np.uint8)
        size = pack(self.trees, self.scores, self.sizes, np.array(heads, np.int64).reshape(count, 4), out)
        return None if size < 0 else ((self.sizes[:, 0] - 1).tolist(), out[:size].tobytes())


@dataclass(frozen=True, slots=True)
class Pending:
    """Trees that are being made."""

    # Waits for them, or computes them: the smaller trees if asked for and there are any, else the whole ones.
    wait: Callable[[bool], GrownTrees]
    elsewhere: bool = False  # another device computes them
    early: bool = False  # smaller trees are ready sooner; the whole trees contain them
    # Whether they may still be fetched: not once the drafter has begun others in their place.
    fresh: Callable[[], bool] = lambda: True

    def fetch(self) -> GrownTrees:
        """The whole trees, while they are `fresh`."""
        return self.wait(False)


@runtime_checkable
class ArrayDrafter(Protocol):
    """A drafter whose trees come as arrays."""

    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        """As `Drafter.propose`, for sequences without REJECTION requests. Another device may compute until the trees
        are fetched. They must be fetched before the next call, but for whole trees whose early ones were fetched: see
        `Pending.fresh`."""


def computed(grown: GrownTrees) -> Pending:
    """Trees that are computed already."""
    return Pending(lambda _early: grown)


def among(sequences: Sequence[DraftSequence], places: list[int], pending: Pending | None) -> Pending:
    """The trees of all these sequences: those at `places` are pending (None if there are none), the others are
    roots."""
    roots = [sequence.root for sequence in sequences]
    if pending is None:
        return computed(GrownTrees.roots(roots, 1))
    if len(places) == len(sequences):
        return pending

    def wait(early: bool) -> GrownTrees:
        found = pending.wait(early)
        whole = GrownTrees.roots(roots, found.trees.shape[2])
        whole.trees[places], whole.scores[places] = found.trees, found.scores
        whole.sizes[places, 0] = found.sizes[:, 0]
        return whole

    return replace(pending, wait=wait)


def in_order(
    sequences: Sequence[DraftSequence],
    grow: Callable[[list[DraftSequence]], GrownTrees],
    draw: Callable[[list[DraftSequence]], Sequence[TokenTree]],
) -> list[TokenTree]:
    """A tree for each, in order. Those of REJECTION requests are drawn, since they carry distributions; all others are
    grown together. Neither function is called for none."""
    places: dict[bool, list[int]] = {False: [], True: []}
    for place, sequence in enumerate(sequences):
        places[sequence.mode is VerificationMode.REJECTION].append(place)
    grown, drawn = ([sequences[place] for place in places[is_drawn]] for is_drawn in (False, True))
    trees = [*(grow(grown).as_trees() if grown else ()), *(draw(drawn) if drawn else ())]
    found = dict(zip(places[False] + places[True], trees, strict=True))
    return [found[place] for place in range(len(sequences))]
