"""Trees that grow a level at a time, as in EAGLE-2 (arXiv 2406.16858): expand the best, rank all, keep the best.

A network reads a whole level in one pass. At each level the `width` best new nodes are expanded; in the end the tree is
made of the best nodes of all levels by path probability, the product of scores along a node's path. A child's is never
higher than its parent's, so the tree contains every ancestor.

In GREEDY mode a node's score is its probability; in COUPLED mode its chance of winning the target's Gumbel-max draw, as
in `ngram.growth`. In REJECTION mode children are drawn one after the other without replacement from a distribution of
integer weights, as in `ngram.drawn_growth`. Whether another child of a node is drawn depends on its distribution, on
the number of earlier draws and on the path above it, never on the token that is drawn. A draw's path probability is
fixed before the draw, and falls along paths and from draw to draw, so neither which nodes are expanded nor which are
kept depends on a node's own token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draft_service.compiling import Numbers, Reals, compiled, inlined, largest
from draft_service.drafters.base import MOST_CONFIDENT
from draft_service.noise import GOLDEN, coin_of, draw_place, exponential
from outrider.tree import MAX_DISTRIBUTION_SUPPORT, MAX_DISTRIBUTION_WEIGHT

Words = npt.NDArray[np.uint64]
Probs = npt.NDArray[np.float32]

GREEDY, COUPLED, REJECTION = 0, 1, 2
# Columns of `Rules.ints` and `Rules.reals`.
MODE, NODES, DEPTH, TOP_K = range(4)
TOP_P, MIN_P = range(2)
# Probabilities below this count as this, since zero cannot take part in a draw.
_LEAST = 1e-30


class Rules(NamedTuple):
    """The requests of B sequences, and the shape of all trees."""

    ints: Numbers  # [B, 4]: mode, most nodes, most depth, top_k (0 for none)
    reals: Reals  # [B, 2]: top_p, min_p
    seeds: Words  # [B] of the shared noise
    positions: Words  # [B] of the token after the root
    coins: Words  # [B] state of the draft's own coins
    width: int  # nodes expanded at a level
    breadth: int  # most children of a node
    floor: float  # least path probability of a node
    sharpness: float  # how far the Gumbel-max draw over the draft's distribution is taken for the target's own


class Forest(NamedTuple):
    """The trees of B sequences as they grow. Item 0 is the root; items of a level follow those of the level above."""

    tokens: Numbers  # [B, C]
    parents: Numbers  # [B, C] items
    path_probs: Reals  # [B, C]
    scores: Reals  # [B, C]
    tails: Numbers  # [B, C] row in the cache's tail, -1 if not expanded; the root's is 0
    sizes: Numbers  # [B] items
    rows: Numbers  # [B] rows of the tail, the root's among them
    tail_parents: Numbers  # [B, T]
    frontier: Numbers  # [B, W] items of the newest level to expand
    widths: Numbers  # [B] items in the frontier
    sources: Numbers  # [B, W] index of each one's parent in the previous frontier
    distribution_sizes: Numbers  # [B, T] by row of the tail
    distribution_tokens: Numbers  # [B, T, MAX_DISTRIBUTION_SUPPORT]
    distribution_weights: Numbers  # [B, T, MAX_DISTRIBUTION_SUPPORT]


def make_forest(sequences: int, levels: int, width: int, breadth: int, *, drawn: bool) -> Forest:
    """Trees of a root alone, to be expanded. `drawn` allocates distributions."""
    items, tails = 1 + breadth + (levels - 1) * width * breadth, 1 + (levels - 1) * width
    forest = Forest(
        tokens=np.zeros((sequences, items), np.int32),
        parents=np.zeros((sequences, items), np.int32),
        path_probs=np.ones((sequences, items)),
        scores=np.ones((sequences, items)),
        tails=np.full((sequences, items), -1, np.int32),
        sizes=np.ones(sequences, np.int32),
        rows=np.ones(sequences, np.int32),
        tail_parents=np.zeros((sequences, tails), np.int32),
        frontier=np.zeros((sequences, width), np.int32),
        widths=np.ones(sequences, np.int32),
        sources=np.zeros((sequences, width), np.int32),
        distribution_sizes=np.zeros((sequences, tails), np.int32),
        distribution_tokens=np.zeros((sequences, tails if drawn else 1, MAX_DISTRIBUTION_SUPPORT), np.int32),
        distribution_weights=np.zeros((sequences, tails if drawn else 1, MAX_DISTRIBUTION_SUPPORT), np.int32),
    )
    forest.tails[:, 0] = 0
    return forest


@inlined
def _apply_filters(probs: Reals, known: int, top_k: int, top_p: float, min_p: float) -> tuple[int, float]:
    """Apply a request's filters to probabilities in descending order, as the target does: min_p, top_k, top_p. Returns
    the number of tokens kept, and the probability mass of the others, which is 0 once filters renormalise."""
    kept, total = known, 1.0
    if not probs[0] > 0.0:
        return 0, 1.0
    while min_p > 0.0 and kept > 1 and probs[kept - 1] < min_p * probs[0]:
        kept -= 1
    if 0 < top_k < kept:
        kept = top_k
    if kept < known:
        total = probs[:kept].sum()
    if top_p < 1.0:
        before = 0.0
        for i in range(kept):
            if i > 0 and before >= top_p * total:
                kept = i
                break
            before += probs[i]
    mass = probs[:kept].sum()
    if kept == known:
        return kept, max(0.0, 1.0 - mass)
    probs[:kept] /= mass
    return kept, 0.0


@inlined
def score_candidates(rules: Rules, b: int, depth: int, tokens: Numbers, probs: Reals, known: int) -> tuple[int, float]:
    """Turn the probabilities of the first `known` candidates of a row, most probable first, into scores, in place, by
    the request of sequence b. In REJECTION mode they stay probabilities. `depth` is that of the row's node, 0 for the
    root. Returns the number of candidates kept, and the probability mass of the others.
    """
    kept, rest = _apply_filters(probs, known, rules.ints[b, TOP_K], rules.reals[b, TOP_P], rules.reals[b, MIN_P])
    if rules.ints[b, MODE] == COUPLED:
        # Chances of winning the shared Gumbel-max draw, in which other tokens have expected noise.
        seed, position, sharpness = rules.seeds[b], rules.positions[b] + np.uint64(depth), rules.sharpness
        total = max(rest, _LEAST) ** sharpness
        for i in range(kept):
            noise = exponential(seed, position, np.uint64(tokens[i]))
            probs[i] = (max(probs[i], _LEAST) / noise) ** sharpness
            total += probs[i]
        probs[:kept] /= total
    return kept, rest


@inlined
def _add(forest: Forest, b: int, parent: int, token: int, score: float, path_prob: float) -> None:
    item = forest.sizes[b]
    forest.tokens[b, item] = token
    forest.parents[b, item] = parent
    forest.scores[b, item] = score
    forest.path_probs[b, item] = path_prob
    forest.sizes[b] += 1


@inlined
def _offer(forest: Forest, b: int, parent: int, tokens: Numbers, scores: Reals, kept: int, rules: Rules) -> None:
    """Add the best children of an item, best first, up to the breadth."""
    path_prob = forest.path_probs[b, parent]
    for _ in range(min(rules.breadth, kept)):
        best = largest(scores, kept)
        if scores[best] <= 0.0 or path_prob * scores[best] < rules.floor:
            return
        score = min(scores[best], 1.0)
        _add(forest, b, parent, tokens[best], score, path_prob * score)
        scores[best] = 0.0


@inlined
def _make_distribution(
    forest: Forest, b: int, tail: int, tokens: Numbers, probs: Reals, kept: int, rest: float
) -> float:
    """Write a row's distribution as integer weights. Returns the estimated probability that a draw is accepted.

    The estimate is the square root of the chance that two draws agree: 1 for a single token, 1 / sqrt(n) for n equally
    likely ones.
    """
    total = 0
    for i in range(kept):
        weight = max(1, int(probs[i] / probs[0] * MAX_DISTRIBUTION_WEIGHT + 0.5))
        forest.distribution_tokens[b, tail, i], forest.distribution_weights[b, tail, i] = tokens[i], weight
        total += weight
    forest.distribution_sizes[b, tail] = kept
    agree = 0.0
    for i in range(kept):
        agree += (forest.distribution_weights[b, tail, i] / total) ** 2
    return min(math.sqrt(agree) * (1.0 - rest), MOST_CONFIDENT)


@inlined
def _draw_level(forest: Forest, b: int, confidences: Reals, left: Numbers, rules: Rules) -> None:
    """Draw children of the frontier, each time where the path probability is highest, up to the width."""
    count = forest.widths[b]
    next_path_probs, draws = np.zeros(count), np.zeros(count, np.int32)
    for i in range(count):
        next_path_probs[i] = forest.path_probs[b, forest.frontier[b, i]] * confidences[i]
    for _ in range(rules.width):
        best = largest(next_path_probs, count)
        if next_path_probs[best] <= 0.0 or next_path_probs[best] < rules.floor:
            return
        parent = forest.frontier[b, best]
        tail = forest.tails[b, parent]
        size = forest.distribution_sizes[b, tail]
        rules.coins[b] += GOLDEN
        place = draw_place(left[best], size, coin_of(rules.coins[b]))
        left[best, place] = 0
        token, path_prob = forest.distribution_tokens[b, tail, place], next_path_probs[best]
        _add(forest, b, parent, token, path_prob / forest.path_probs[b, parent], path_prob)
        draws[best] += 1
        next_path_probs[best] *= 1.0 - confidences[best]
        if draws[best] >= min(rules.breadth, size):
            next_path_probs[best] = 0.0


@inlined
def _next_frontier(forest: Forest, b: int, begin: int, before: Numbers, rules: Rules) -> None:
    """Choose the items to expand next: the best new ones that rank among the nodes that the tree can hold."""
    path_probs, count = forest.path_probs[b, : forest.sizes[b]], 0
    for place in np.argsort(-path_probs[begin:], kind="mergesort")[: rules.width]:
        best = begin + place
        if np.sum(path_probs[1:] >= path_probs[best]) - 1 >= rules.ints[b, NODES]:
            break
        forest.frontier[b, count] = best
        forest.tails[b, best] = forest.rows[b] + count
        forest.tail_parents[b, forest.rows[b] + count] = forest.tails[b, forest.parents[b, best]]
        forest.sources[b, count] = before[forest.parents[b, best]]
        count += 1
    forest.rows[b] += count
    forest.widths[b] = count


@compiled
def grow_level(forest: Forest, rules: Rules, level: int, last: bool, tokens: Numbers, probs: Probs) -> int:
    """Add the children of every frontier, and choose the next frontiers. Returns rows of the next pass: the sum of the
    new widths.

    Args:
        level: depth of the new nodes, from 1.
        last: no level follows, so nothing is expanded.
        tokens, probs: [R, M] candidates of the rows of all frontiers, one sequence after another.
    """
    row, following, known = 0, 0, tokens.shape[1]
    for b in range(len(forest.sizes)):
        count = forest.widths[b]
        if count == 0:
            continue
        begin, mode = forest.sizes[b], rules.ints[b, MODE]
        confidences, left = np.zeros(count), np.zeros((count, MAX_DISTRIBUTION_SUPPORT), np.int32)
        before = np.zeros(begin, np.int32)
        for i in range(count):
            item = forest.frontier[b, i]
            before[item] = i
            work = probs[row + i].astype(np.float64)
            usable = known if mode == COUPLED else min(known, MAX_DISTRIBUTION_SUPPORT)
            kept, rest = score_candidates(rules, b, level - 1, tokens[row + i], work, usable)
            if mode == REJECTION:
                tail = forest.tails[b, item]
                confidences[i] = _make_distribution(forest, b, tail, tokens[row + i], work, kept, rest)
                left[i] = forest.distribution_weights[b, tail]
            else:
                _offer(forest, b, item, tokens[row + i], work, kept, rules)
        row += count
        if mode == REJECTION:
            _draw_level(forest, b, confidences, left, rules)
        if last or level >= rules.ints[b, DEPTH]:
            forest.widths[b] = 0
        else:
            _next_frontier(forest, b, begin, before, rules)
            following += forest.widths[b]
    return following


def compile_loops() -> None:
    """Compile what grows trees level by level."""
    forest = make_forest(1, 1, 1, 1, drawn=False)
    rules = Rules(
        ints=np.zeros((1, 4), np.int32),
        reals=np.ones((1, 2)),
        seeds=np.zeros(1, np.uint64),
        positions=np.zeros(1, np.uint64),
        coins=np.zeros(1, np.uint64),
        width=1,
        breadth=1,
        floor=0.0,
        sharpness=1.0,
    )
    grow_level(forest, rules, 1, True, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))


def kept_items(forest: Forest, b: int, nodes: int) -> npt.NDArray[np.int64]:
    """The root and the `nodes` most probable items of a tree, most probable first; parents come before children."""
    size = int(forest.sizes[b])
    return np.argsort(-forest.path_probs[b, :size], kind="stable")[: nodes + 1]
