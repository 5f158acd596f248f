"""Deterministic trees for GREEDY and COUPLED verification: the node of the likeliest path first.

In COUPLED mode the candidates of a row take part in the same Gumbel-max draw as at the target, with the target's noise,
over the distribution that the tries predict; so a drafted token tends to be the one that the target will sample, not
merely a likely one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_service.compiling import Numbers, Reals, compiled, inlined
from draft_service.ngram.arrays import Tokens
from draft_service.ngram.prediction import (
    SOURCES,
    Evidence,
    Tries,
    longest_match,
    make_scratch,
    predict,
    resolve_states,
    start_states,
)
from draft_service.noise import exponential

# Open probability below which further windows no longer change the result of a Gumbel-max or plain draw.
OPEN_FLOOR = 0.1
# How far the Gumbel-max draw over relative frequencies is trusted to be the target's. Fitted as the weights of sources.
_SHARPNESS = 0.5


class TreeBounds(NamedTuple):
    """Bounds of the tree, and how its candidates are drawn.

    Nodes, depth and breadth bound it; `floor` is the least path probability of a node; `coupled` turns on the
    Gumbel-max draw, in which `power` (1 / temperature) is the exponent on probabilities.
    """

    nodes: int
    depth: int
    breadth: int
    floor: float
    coupled: bool
    power: float


@compiled
def _gumbel_max(
    known: int, shape: TreeBounds, seed: np.uint64, position: np.uint64, candidates: Numbers, weights: Reals
) -> None:
    """Turn probabilities into chances of winning the shared Gumbel-max draw, given its noise. Token x has the weight
    (p(x)**power / E(x))**_SHARPNESS; all other tokens take part with their expected noise."""
    rest = 1.0
    for i in range(known):
        rest -= weights[i, 0]
    total = max(rest, 1e-3) ** (shape.power * _SHARPNESS)
    for i in range(known):
        noise = exponential(seed, position, np.uint64(candidates[i, 0]))
        weights[i, 0] = (weights[i, 0] ** shape.power / noise) ** _SHARPNESS
        total += weights[i, 0]
    for i in range(known):
        weights[i, 0] /= total


@inlined
def _rank(order: Numbers, path_probs: Reals, item: int, first: int, ranked: int, limit: int) -> int:
    """Put a new item where its path probability belongs, from `first` on; the least likely falls out past `limit`."""
    place = min(ranked, limit - 1)
    while place > first and path_probs[order[place - 1], 0] < path_probs[item, 0]:
        order[place] = order[place - 1]
        place -= 1
    order[place] = item
    return min(ranked + 1, limit)


@inlined
def _offer(
    order: Numbers,
    items: Numbers,
    path_probs: Reals,
    made: int,
    ranked: int,
    row: int,
    path_prob: float,
    known: int,
    candidates: Numbers,
    weights: Reals,
    shape: TreeBounds,
) -> tuple[int, int]:
    """Rank the best candidates of `row`, up to the breadth. Returns items made and ranked then."""
    for _ in range(shape.breadth):
        best, score = -1, 0.0
        for i in range(known):
            if weights[i, 0] > score:
                best, score = i, weights[i, 0]
        if best < 0 or path_prob * score < shape.floor:
            break
        if ranked == shape.nodes and path_prob * score <= path_probs[order[ranked - 1], 0]:
            break
        weights[best, 0] = 0.0
        path_probs[made, 0], path_probs[made, 1] = path_prob * score, min(score, 1.0)
        items[made, 0] = row
        for i in range(1 + 2 * SOURCES):
            items[made, 1 + i] = candidates[best, i]
        ranked = _rank(order, path_probs, made, row, ranked, shape.nodes)
        made += 1
    return made, ranked


@inlined
def _settle(
    row: int,
    order: Numbers,
    items: Numbers,
    path_probs: Reals,
    tree: Numbers,
    scores: Reals,
    depths: Numbers,
    states: Numbers,
) -> float:
    """Write down a row whose rank is final. Returns its path probability."""
    item = order[row - 1]
    tree[1, row], tree[0, row], scores[row] = items[item, 0], items[item, 1], path_probs[item, 1]
    depths[row] = depths[tree[1, row]] + 1
    for i in range(2 * SOURCES):
        states[row, i] = items[item, 2 + i]
    return float(path_probs[item, 0])


@compiled
def grow(
    tries: Tries,
    context: Tokens,
    evidence: Evidence,
    shape: TreeBounds,
    seed: np.uint64,
    position: np.uint64,
    tree: Numbers,
    scores: Reals,
) -> int:
    """Grow a tree, the likeliest path first: its probability is the product of scores along a node's path.

    Returns rows, the root among them. Parents stand before children, and path probability falls from row to row.

    Args:
        context: the sequence's last tokens, the root last.
        seed, position: of the request, and of the token after the root, for the draw.
        tree: [2, 1 + nodes], tokens and parents, filled; row 0, the root, is left to the caller.
        scores: [1 + nodes], filled likewise.
    """
    longest = longest_match(evidence.trust)
    rows, scratch = (tries[0][0], tries[1][0], tries[2][0]), make_scratch()
    candidates, weights = scratch.candidates, scratch.weights
    # Possible nodes: parent row and candidate; path probability and score. `order` ranks the best of them.
    room = (shape.nodes + 1) * shape.breadth
    items, path_probs = np.empty((room, 2 + 2 * SOURCES), np.int32), np.empty((room, 2), np.float64)
    order, depths = np.empty(shape.nodes + 1, np.int32), np.zeros(shape.nodes + 1, np.int32)
    states = np.empty((shape.nodes + 1, 2 * SOURCES), np.int32)
    start_states(tries, context, states, scratch.state, longest)
    made, ranked, row, path_prob = 0, 0, 0, 1.0
    while row < shape.nodes:
        floor = path_probs[order[ranked - 1], 0] if ranked == shape.nodes else shape.floor
        # Rows fall in path probability, and children below their row: no later row can change the ranks.
        if path_prob <= floor and row > 0:
            break
        if depths[row] < shape.depth:
            if row > 0:
                resolve_states(tries, states, row, tree[1, row], tree[0, row], longest)
            open_floor = OPEN_FLOOR if shape.coupled else max(OPEN_FLOOR, floor / path_prob)
            known = predict(rows, states, row, evidence, open_floor, scratch)
            if shape.coupled:
                _gumbel_max(known, shape, seed, position + np.uint64(depths[row]), candidates, weights)
            made, ranked = _offer(
                order, items, path_probs, made, ranked, row, path_prob, known, candidates, weights, shape
            )
        if row == ranked:
            break
        row += 1
        path_prob = _settle(row, order, items, path_probs, tree, scores, depths, states)
    for last in range(row + 1, ranked + 1):
        _settle(last, order, items, path_probs, tree, scores, depths, states)
    return ranked + 1
