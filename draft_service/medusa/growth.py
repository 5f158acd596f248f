"""Trees of heads that each predict one depth, independently of the path to it.

A depth's tokens and scores are the same below every node of the depth before, so a node is its parent and a rank. In
GREEDY mode a score is a probability; in COUPLED mode the chance of winning the target's Gumbel-max draw, whose noise
depends on position and token alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_service.compiling import Numbers, Reals, compiled, inlined, largest
from draft_service.drafters.grown import GrownTrees
from draft_service.drafters.packing import RowHeads
from draft_service.neural.level_growth import DEPTH, NODES, Probs, Rules, score_candidates


class Ranked(NamedTuple):
    """The best tokens of every depth of B sequences, best first; only the first `counts` [B, K] are valid."""

    tokens: Numbers  # [B, K, breadth]
    scores: Reals  # [B, K, breadth] given the parent
    counts: Numbers  # [B, K]


@compiled
def rank(rules: Rules, tokens: Numbers, probs: Probs, ranked: Ranked) -> None:
    """Fill `ranked` from the candidates of every depth, tokens and probs [B, K, M], most probable first."""
    count, depths, known = tokens.shape
    for b in range(count):
        for depth in range(depths):
            work = probs[b, depth].astype(np.float64)
            kept, _ = score_candidates(rules, b, depth, tokens[b, depth], work, known)
            found = 0
            while found < min(rules.breadth, kept):
                best = largest(work, kept)
                if work[best] <= 0.0:
                    break
                ranked.tokens[b, depth, found] = tokens[b, depth, best]
                ranked.scores[b, depth, found] = min(work[best], 1.0)
                work[best] = 0.0
                found += 1
            ranked.counts[b, depth] = found


@inlined
def _score_of(ranked: Ranked, b: int, depth: int, rank: int, deepest: int) -> float:
    """The score of a token by its rank below a node of this depth; 0 if there is none."""
    if depth >= min(deepest, ranked.counts.shape[1]) or rank >= ranked.counts[b, depth]:
        return 0.0
    return float(ranked.scores[b, depth, rank])


@compiled
def grow_best_first(rules: Rules, ranked: Ranked, trees: Numbers, scores: Reals, sizes: RowHeads) -> None:
    """Grow the tree of every sequence by its most probable paths, most probable first.

    Args:
        trees: [B, 2, rows] tokens and parents, filled but for row 0, the root.
        scores: [B, rows], filled but for row 0.
        sizes: [B, 1] rows of each tree, filled.
    """
    for b in range(len(trees)):
        limit, deepest = min(1 + rules.ints[b, NODES], trees.shape[2]), rules.ints[b, DEPTH]
        # Of each row: its depth and path probability, its children, and the path probability of its best other child.
        depths, path_probs = np.zeros(limit, np.int32), np.ones(limit)
        children, following = np.zeros(limit, np.int32), np.zeros(limit)
        following[0] = _score_of(ranked, b, 0, 0, deepest)
        rows = 1
        while rows < limit:
            parent = largest(following, rows)
            if following[parent] <= 0.0 or following[parent] < rules.floor:
                break
            depth, child = depths[parent], children[parent]
            trees[b, 0, rows], trees[b, 1, rows] = ranked.tokens[b, depth, child], parent
            scores[b, rows] = ranked.scores[b, depth, child]
            depths[rows], path_probs[rows] = depth + 1, following[parent]
            children[parent] += 1
            for row in (parent, rows):
                following[row] = path_probs[row] * _score_of(ranked, b, depths[row], children[row], deepest)
            rows += 1
        sizes[b, 0] = rows


def grown(rules: Rules, tokens: Numbers, probs: Probs, roots: list[int]) -> GrownTrees:
    """The trees of B sequences in GREEDY or COUPLED mode; `tokens` and `probs` [B, K, M] are the candidates of every
    depth, most probable first."""
    count, depths, _ = tokens.shape
    shape = (count, depths, rules.breadth)
    ranked = Ranked(np.zeros(shape, np.int32), np.zeros(shape), np.zeros((count, depths), np.int32))
    rank(rules, tokens, probs, ranked)
    trees = GrownTrees.roots(roots, 1 + int(rules.ints[:, NODES].max(initial=0)))
    grow_best_first(rules, ranked, *trees)
    return trees
