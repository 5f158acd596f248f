"""Deterministic trees for GREEDY and COUPLED verification: the most worthy node first.

In COUPLED mode the candidates of a row run the very race that the target will run, with the target's noise, over the
law that the tries predict; so a drafted token is the one the target is about to sample, not merely a likely one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_service.compiling import compiled
from draft_service.noise import exponential
from draft_service.prediction import (
    SOURCES,
    Evidence,
    Numbers,
    Reals,
    Scratch,
    Tries,
    follow,
    make_scratch,
    predict,
    start_states,
)
from draft_service.trie_arrays import Tokens


class Shape(NamedTuple):
    """What the tree may be, and how its candidates race. `seed` and `position` are uint64."""

    nodes: int
    depth: int
    breadth: int
    floor: float
    coupled: bool
    # Exponent on probabilities (1 / temperature), and how much the race is trusted over not knowing the target's law.
    power: float
    sharpness: float
    seed: np.uint64
    position: np.uint64


@compiled
def _race(known: int, shape: Shape, position: np.uint64, scratch: Scratch) -> None:
    """Turn probabilities into chances of winning the shared race, given its noise.

    Token x has the weight (p(x)**power / E(x))**sharpness; what is not a candidate races with its expected noise.
    """
    probs = scratch.probs
    rest = 1.0
    for i in range(known):
        rest -= probs[i]
    total = max(rest, 1e-3) ** (shape.power * shape.sharpness)
    for i in range(known):
        noise = exponential(shape.seed, position, np.uint64(scratch.candidates[i]))
        probs[i] = (probs[i] ** shape.power / noise) ** shape.sharpness
        total += probs[i]
    for i in range(known):
        probs[i] /= total


@compiled
def heap_push(worth: Reals, items: Numbers, place: int) -> None:
    """Restore the heap (largest worth first) after an item was put at its end, `place`."""
    while place > 0:
        above = (place - 1) >> 1
        if worth[items[above]] >= worth[items[place]]:
            return
        items[above], items[place] = items[place], items[above]
        place = above


@compiled
def heap_pop(worth: Reals, items: Numbers, size: int) -> int:
    """Take the most worthy item; `size` counts items before."""
    top = items[0]
    items[0] = items[size - 1]
    size -= 1
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            return top
        if child + 1 < size and worth[items[child + 1]] > worth[items[child]]:
            child += 1
        if worth[items[place]] >= worth[items[child]]:
            return top
        items[place], items[child] = items[child], items[place]
        place = child


@compiled
def _best(scratch: Scratch, known: int) -> int:
    """The index of the most probable candidate left, or -1."""
    best, prob = -1, 0.0
    for i in range(known):
        if scratch.probs[i] > prob:
            best, prob = i, scratch.probs[i]
    return best


@compiled
def grow(
    tries: Tries, context: Tokens, evidence: Evidence, shape: Shape, tokens: Numbers, parents: Numbers, scores: Reals
) -> int:
    """Grow a tree, the most worthy node first: worth is the product of scores along a node's path.

    Args:
        context: the sequence's last tokens, the root last.
        tokens, parents, scores: [1 + shape.nodes], filled; row 0, the root, is left to the caller.

    Returns:
        Rows, the root among them. Parents stand before children, and worth falls from row to row.
    """
    scratch, longest = make_scratch(), evidence.max_match
    states = np.empty((shape.nodes + 1, SOURCES), np.int32)
    lengths = np.empty((shape.nodes + 1, SOURCES), np.int32)
    depths = np.zeros(shape.nodes + 1, np.int32)
    room = (shape.nodes + 1) * shape.breadth + 1
    worth, items, score = np.empty(room), np.empty(room, np.int32), np.empty(room)
    item_token, item_parent = np.empty(room, np.int32), np.empty(room, np.int32)
    worth[0], items[0], size, made, row = 1.0, 0, 1, 1, 0
    while size > 0:
        item = heap_pop(worth, items, size)
        size -= 1
        if item == 0:
            start_states(tries, context, states, lengths, longest)
        else:
            tokens[row], parents[row], scores[row] = item_token[item], item_parent[item], score[item]
            depths[row] = depths[parents[row]] + 1
        row += 1
        if row > shape.nodes:
            break
        here = row - 1
        if depths[here] >= shape.depth:
            continue
        if here > 0:
            follow(tries, states, lengths, here, parents[here], tokens[here], longest)
        known = predict(tries, states[here], lengths[here], evidence, scratch)
        if shape.coupled:
            _race(known, shape, shape.position + np.uint64(depths[here]), scratch)
        for _ in range(shape.breadth):
            best = _best(scratch, known)
            if best < 0 or worth[item] * scratch.probs[best] < shape.floor:
                break
            item_token[made], item_parent[made] = scratch.candidates[best], here
            score[made] = min(scratch.probs[best], 1.0)
            worth[made] = worth[item] * score[made]
            items[size] = made
            heap_push(worth, items, size)
            scratch.probs[best] = 0.0
            made += 1
            size += 1
    return row
