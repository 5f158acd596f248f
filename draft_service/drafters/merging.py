"""Trees of several drafters for the same roots, merged by a compiled loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draft_service.compiling import Numbers, Reals, compiled, inlined
from draft_service.drafters.grown import GrownTrees
from draft_service.drafters.packing import RowHeads


def merge_grown(parts: Sequence[GrownTrees], nodes: Sequence[int]) -> GrownTrees:
    """The best nodes of trees with one and the same root, likeliest first, parents first; for many sequences: `parts`
    are the trees of all sequences by each drafter, and `nodes` has one bound per sequence.

    A node that several trees have takes the highest of its scores. Siblings whose scores then sum to more than 1 are
    scaled, since only one of them can be accepted. Of equally likely nodes the one that was proposed first comes first.
    """
    count, most = len(nodes), max(part.trees.shape[2] for part in parts)
    trees, scores = np.empty((len(parts), count, 2, most), np.int32), np.empty((len(parts), count, most))
    sizes = np.empty((len(parts), count), np.int64)
    for number, part in enumerate(parts):
        rows = part.trees.shape[2]
        trees[number, :, :, :rows], scores[number, :, :rows], sizes[number] = part.trees, part.scores, part.sizes[:, 0]
    merged = GrownTrees.roots([0] * count, 1 + max(nodes, default=0))
    _merge(trees, scores, sizes, np.array(nodes, np.int64), merged.trees, merged.scores, merged.sizes)
    return merged


class _Nodes(NamedTuple):
    """The nodes of one sequence's trees, each once, in the order in which they were proposed; node 0 is the root."""

    tokens: Numbers
    parents: Numbers
    scores: Reals
    # The children of a node are a linked list; 0 is none.
    first: Numbers
    last: Numbers
    following: Numbers


@inlined
def _child(nodes: _Nodes, count: int, parent: int, token: int) -> int:
    """The child of `parent` with this token; without one, node `count` is made it."""
    node = nodes.first[parent]
    while node != 0 and nodes.tokens[node] != token:
        node = nodes.following[node]
    if node != 0:
        return int(node)
    nodes.tokens[count], nodes.parents[count], nodes.scores[count] = token, parent, 0.0
    nodes.first[count], nodes.last[count], nodes.following[count] = 0, 0, 0
    if nodes.first[parent] == 0:
        nodes.first[parent] = count
    else:
        nodes.following[nodes.last[parent]] = count
    nodes.last[parent] = count
    return count


@inlined
def _scale(nodes: _Nodes, count: int) -> None:
    """Scale the scores of siblings that sum to more than 1, since only one of them can be accepted."""
    for parent in range(count):
        total, node = 0.0, nodes.first[parent]
        while node != 0:
            total += nodes.scores[node]
            node = nodes.following[node]
        total, node = max(1.0, total), nodes.first[parent]
        while node != 0:
            nodes.scores[node] /= total
            node = nodes.following[node]


@compiled
def _merge(
    trees: Numbers,
    scores: Reals,
    sizes: RowHeads,
    nodes: RowHeads,
    merged: Numbers,
    merged_scores: Reals,
    rows: RowHeads,
) -> None:
    """Merge the trees of n sequences by p drafters.

    Args:
        trees: [p, n, 2, most] tokens and parents; scores: [p, n, most]; sizes: [p, n] rows, the root among them.
        nodes: [n], the most that a merged tree has, the root not counted.
        merged: [n, 2, 1 + most nodes], filled; merged_scores: [n, ..], filled likewise.
        rows: [n, 1], filled: rows of the merged trees.
    """
    parts, sequences, _, most = trees.shape
    room = parts * most
    integers = np.empty((5, room), np.int32)
    found = _Nodes(integers[0], integers[1], np.empty(room), integers[2], integers[3], integers[4])
    path_probs, node_of, row_of = np.empty(room), np.empty(most, np.int32), np.empty(room, np.int32)
    node_of[0] = row_of[0] = 0
    for b in range(sequences):
        count = 1
        found.tokens[0], found.scores[0], found.first[0] = trees[0, b, 0, 0], 1.0, 0
        for part in range(parts):
            for row in range(1, sizes[part, b]):
                node = _child(found, count, node_of[trees[part, b, 1, row]], trees[part, b, 0, row])
                count = max(count, node + 1)
                found.scores[node] = max(found.scores[node], scores[part, b, row])
                node_of[row] = node
        _scale(found, count)
        # Parents come before their children and are at least as likely, so the best nodes hold their ancestors.
        path_probs[0] = -1.0
        for node in range(1, count):
            path_probs[node] = path_probs[found.parents[node]] * found.scores[node]
        order = np.argsort(path_probs[1:count], kind="mergesort")
        kept = min(nodes[b], count - 1)
        merged[b, 0, 0], merged[b, 1, 0], merged_scores[b, 0] = found.tokens[0], 0, 1.0
        for row in range(1, kept + 1):
            node = order[row - 1] + 1
            row_of[node] = row
            merged[b, 0, row], merged[b, 1, row] = found.tokens[node], row_of[found.parents[node]]
            merged_scores[b, row] = found.scores[node]
        rows[b, 0] = kept + 1
