"""Sampled trees for REJECTION verification: children drawn without replacement from laws of integer weights.

Every decision to draw once more looks only at what was drawn before: at the law of the row, at how often it was drawn
from, and at the path above it. So whether a child exists never depends on its own token, which is what the target's
recursive rejection sampling needs; for the same reason scores say what the i-th draw is worth, whatever it shows.
"""

from __future__ import annotations

import numpy as np

from draft_service.compiling import compiled
from draft_service.prediction import (
    MAX_CANDIDATES,
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
from draft_service.tree_growth import Shape, heap_pop, heap_push
from draft_service.trie_arrays import Tokens
from outrider.tree import MAX_DISTRIBUTION_WEIGHT

# No law is trusted beyond this: the target's own is never the drafter's exactly.
_MOST_CONFIDENT = 0.95
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


@compiled
def _coin(state: np.uint64) -> float:
    """Uniform in [0, 1) from one state of splitmix64 (Steele, Lea, Flood 2014); the caller adds `_GOLDEN` per coin."""
    mixed = (state ^ (state >> _S30)) * _MIX1
    mixed = (mixed ^ (mixed >> _S27)) * _MIX2
    mixed ^= mixed >> _S31
    return float(mixed >> _S11) * 2.0**-53


@compiled
def _make_law(scratch: Scratch, known: int, power: float, weights: Numbers) -> float:
    """Integer weights of the candidates, into `weights`. Returns how much of the probability they hold."""
    largest, mass = 0.0, 0.0
    for i in range(known):
        largest = max(largest, scratch.probs[i])
        mass += scratch.probs[i]
    for i in range(known):
        share = (scratch.probs[i] / largest) ** power
        weights[i] = max(1, int(share * MAX_DISTRIBUTION_WEIGHT + 0.5))
    return min(mass, _MOST_CONFIDENT)


@compiled
def _draw(left: Numbers, size: int, coin: float) -> int:
    """The place of a draw by the weights left, or -1 when none is. The caller zeroes its weight."""
    total = 0
    for i in range(size):
        total += left[i]
    if total == 0:
        return -1
    point = int(coin * total)
    for i in range(size):
        point -= left[i]
        if point < 0:
            return i
    return -1


@compiled
def grow_drawn(
    tries: Tries,
    context: Tokens,
    evidence: Evidence,
    shape: Shape,
    coins: np.uint64,
    tokens: Numbers,
    parents: Numbers,
    scores: Reals,
    law_sizes: Numbers,
    law_tokens: Numbers,
    law_weights: Numbers,
) -> int:
    """Draw a tree.

    Args:
        context: the sequence's last tokens, the root last.
        coins: seed of the draws; private to the draft, so independent of the target's coins.
        tokens, parents, scores: [1 + shape.nodes], filled; row 0, the root, is left to the caller.
        law_sizes: [1 + shape.nodes], support of each row's law. law_tokens, law_weights: [.., MAX_CANDIDATES].

    Returns:
        Rows, the root among them, in draw order.
    """
    scratch, longest, limit = make_scratch(), evidence.max_match, shape.nodes + 1
    states, lengths = np.empty((limit, SOURCES), np.int32), np.empty((limit, SOURCES), np.int32)
    depths, draws = np.zeros(limit, np.int32), np.zeros(limit, np.int32)
    left = np.empty((limit, MAX_CANDIDATES), np.int32)
    path, confidence, worth = np.ones(limit), np.zeros(limit), np.zeros(limit)
    items, size, row = np.empty(limit + 1, np.int32), 0, 0
    while row < limit:
        law_sizes[row] = 0
        if depths[row] < shape.depth:
            if row == 0:
                start_states(tries, context, states, lengths, longest)
            else:
                follow(tries, states, lengths, row, parents[row], tokens[row], longest)
            law_sizes[row] = predict(tries, states[row], lengths[row], evidence, scratch)
        if law_sizes[row] > 0:
            confidence[row] = _make_law(scratch, law_sizes[row], shape.power, law_weights[row])
            law_tokens[row, : law_sizes[row]] = scratch.candidates[: law_sizes[row]]
            left[row, : law_sizes[row]] = law_weights[row, : law_sizes[row]]
            worth[row] = path[row] * confidence[row]
            items[size] = row
            heap_push(worth, items, size)
            size += 1
        row += 1
        parent, place = -1, -1
        while row < limit and size > 0 and place < 0:
            parent = heap_pop(worth, items, size)
            size -= 1
            if worth[parent] < shape.floor:
                return row
            coins += _GOLDEN
            place = _draw(left[parent], law_sizes[parent], _coin(coins))
        if place < 0:
            return row
        left[parent, place] = 0
        tokens[row], parents[row] = law_tokens[parent, place], parent
        scores[row] = worth[parent] / path[parent]
        path[row], depths[row] = worth[parent], depths[parent] + 1
        draws[parent] += 1
        worth[parent] *= 1.0 - confidence[parent]
        if draws[parent] < shape.breadth:
            items[size] = parent
            heap_push(worth, items, size)
            size += 1
    return row
