"""Deterministic trees for GREEDY and COUPLED verification: the most worthy node first.

In COUPLED mode the candidates of a row run the very race that the target will run, with the target's noise, over the
law that the tries predict; so a drafted token is the one the target is about to sample, not merely a likely one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_service.compiling import compiled, inlined
from draft_service.noise import exponential
from draft_service.prediction import (
    MAX_MATCH,
    SOURCES,
    Evidence,
    Numbers,
    Reals,
    Scratch,
    Tries,
    make_scratch,
    predict,
    resolve_states,
    start_states,
)
from draft_service.trie_arrays import Tokens

# Open probability that no longer changes which candidates win a race or a draw.
OPEN_FLOOR = 0.02


class Shape(NamedTuple):
    """What the tree may be, and how its candidates race.

    Nodes, depth and breadth bound it; `floor` is the least worth of a node; `coupled` turns on the race, in which
    `power` (1 / temperature) is the exponent on probabilities and `sharpness` how far the race is trusted.
    """

    nodes: int
    depth: int
    breadth: int
    floor: float
    coupled: bool
    power: float
    sharpness: float


def pack(shape: Shape) -> Reals:
    """The shape as `grow` takes it, since one array is passed faster than seven numbers."""
    return np.array(shape, dtype=np.float64)


@compiled
def unpack(packed: Reals) -> Shape:
    """The inverse of `pack`."""
    return Shape(int(packed[0]), int(packed[1]), int(packed[2]), packed[3], packed[4] != 0.0, packed[5], packed[6])


class _Items(NamedTuple):
    """Nodes that were thought of: [room] each, states [room, 2 * SOURCES]. `order` ranks the best, by worth."""

    order: Numbers
    tokens: Numbers
    parents: Numbers
    scores: Reals
    worths: Reals
    states: Numbers


@compiled
def _race(known: int, shape: Shape, seed: np.uint64, position: np.uint64, scratch: Scratch) -> None:
    """Turn probabilities into chances of winning the shared race, given its noise.

    Token x has the weight (p(x)**power / E(x))**sharpness; what is not a candidate races with its expected noise.
    """
    probs = scratch.probs
    rest = 1.0
    for i in range(known):
        rest -= probs[i]
    total = max(rest, 1e-3) ** (shape.power * shape.sharpness)
    for i in range(known):
        noise = exponential(seed, position, np.uint64(scratch.tokens[i]))
        probs[i] = (probs[i] ** shape.power / noise) ** shape.sharpness
        total += probs[i]
    for i in range(known):
        probs[i] /= total


@inlined
def _best(scratch: Scratch, known: int) -> int:
    """The index of the most probable candidate left, or -1."""
    best, prob = -1, 0.0
    for i in range(known):
        if scratch.probs[i] > prob:
            best, prob = i, scratch.probs[i]
    return best


@inlined
def _rank(items: _Items, item: int, first: int, ranked: int, limit: int) -> int:
    """Put a new item where its worth belongs, from `first` on; the least worthy falls out past `limit`."""
    place = min(ranked, limit - 1)
    while place > first and items.worths[items.order[place - 1]] < items.worths[item]:
        items.order[place] = items.order[place - 1]
        place -= 1
    items.order[place] = item
    return min(ranked + 1, limit)


@inlined
def _offer(
    items: _Items,
    made: int,
    ranked: int,
    row: int,
    worth: float,
    known: int,
    scratch: Scratch,
    shape: Shape,
) -> tuple[int, int]:
    """Rank the best candidates of `row`, up to the breadth. Returns items made and ranked then."""
    for _ in range(shape.breadth):
        best = _best(scratch, known)
        if best < 0 or worth * scratch.probs[best] < shape.floor:
            break
        score = min(scratch.probs[best], 1.0)
        scratch.probs[best] = 0.0
        if ranked == shape.nodes and worth * score <= items.worths[items.order[ranked - 1]]:
            break
        items.tokens[made], items.parents[made] = scratch.tokens[best], row
        items.scores[made], items.worths[made] = score, worth * score
        for i in range(2 * SOURCES):
            items.states[made, i] = scratch.states[best, i]
        ranked = _rank(items, made, row, ranked, shape.nodes)
        made += 1
    return made, ranked


@compiled
def grow(
    tries: Tries,
    context: Tokens,
    evidence: Evidence,
    packed: Reals,
    seed: np.uint64,
    position: np.uint64,
    tree: Numbers,
    scores: Reals,
) -> int:
    """Grow a tree, the most worthy node first: worth is the product of scores along a node's path.

    Args:
        context: the sequence's last tokens, the root last.
        packed: a packed `Shape`.
        seed, position: of the request, and of the token after the root, for the race.
        tree: [2, 1 + shape.nodes], tokens and parents, filled; row 0, the root, is left to the caller.
        scores: [1 + shape.nodes], filled likewise.

    Returns:
        Rows, the root among them. Parents stand before children, and worth falls from row to row.
    """
    shape, scratch, longest = unpack(packed), make_scratch(), evidence.rules[MAX_MATCH]
    limit = shape.nodes
    room = (limit + 1) * shape.breadth
    items = _Items(
        np.empty(limit + 1, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.float64),
        np.empty(room, np.float64),
        np.empty((room, 2 * SOURCES), np.int32),
    )
    states, depths = np.empty((limit + 1, 2 * SOURCES), np.int32), np.zeros(limit + 1, np.int32)
    start_states(tries, context, states, longest)
    made, ranked, row, worth = 0, 0, 0, 1.0
    while row < limit:
        floor = items.worths[items.order[limit - 1]] if ranked == limit else shape.floor
        # Rows fall in worth, and children in worth below their row: no later row can change the ranks.
        if worth <= floor and row > 0:
            break
        if depths[row] < shape.depth:
            if row > 0:
                resolve_states(tries, states, row, tree[1, row], tree[0, row], longest)
            open_floor = OPEN_FLOOR if shape.coupled else max(OPEN_FLOOR, floor / worth)
            known = predict(tries, states, row, evidence, open_floor, scratch)
            if shape.coupled:
                _race(known, shape, seed, position + np.uint64(depths[row]), scratch)
            made, ranked = _offer(items, made, ranked, row, worth, known, scratch, shape)
        if row == ranked:
            break
        row += 1
        item = items.order[row - 1]
        worth = items.worths[item]
        tree[0, row], tree[1, row], depths[row] = (
            items.tokens[item],
            items.parents[item],
            depths[items.parents[item]] + 1,
        )
        states[row] = items.states[item]
    for row in range(1, ranked + 1):
        item = items.order[row - 1]
        tree[0, row], tree[1, row], scores[row] = items.tokens[item], items.parents[item], items.scores[item]
    return ranked + 1
