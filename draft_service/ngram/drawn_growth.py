"""Sampled trees for REJECTION verification: children drawn without replacement from distributions of integer weights.

Every decision to draw once more looks only at what was drawn before: at the distribution of the row, at how often it
was drawn from, and at the path above it. So whether a child exists never depends on its own token, which is what the
target's recursive rejection sampling needs; for the same reason scores say what the i-th draw is worth, whatever it
shows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_service.compiling import Numbers, Reals, compiled, inlined
from draft_service.ngram.arrays import Tokens
from draft_service.ngram.growth import OPEN_FLOOR, Shape, unpack
from draft_service.ngram.prediction import (
    MAX_CANDIDATES,
    MAX_MATCH,
    SOURCES,
    UNKNOWN,
    Evidence,
    Scratch,
    Tries,
    make_scratch,
    predict,
    resolve_states,
    start_states,
)
from outrider.tree import MAX_DISTRIBUTION_WEIGHT

# No distribution is trusted beyond this: the target's own is never the drafter's exactly.
_MOST_CONFIDENT = 0.95
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


@compiled
def coin_of(state: np.uint64) -> float:
    """Uniform in [0, 1) from one state of splitmix64 (Steele, Lea, Flood 2014); the caller adds `GOLDEN` per coin."""
    mixed = (state ^ (state >> _S30)) * _MIX1
    mixed = (mixed ^ (mixed >> _S27)) * _MIX2
    mixed ^= mixed >> _S31
    return float(mixed >> _S11) * 2.0**-53


class Distributions(NamedTuple):
    """The distribution that each row's children were drawn from; room for [1 + nodes] rows of MAX_CANDIDATES."""

    sizes: Numbers  # [..] support
    tokens: Numbers  # [.., MAX_CANDIDATES]
    weights: Numbers  # [.., MAX_CANDIDATES] integers


@compiled
def heap_push(path_probs: Reals, heap: Numbers, place: int) -> None:
    """Restore the heap (largest path probability first) after an item was put at its end, `place`."""
    while place > 0:
        above = (place - 1) >> 1
        if path_probs[heap[above]] >= path_probs[heap[place]]:
            return
        heap[above], heap[place] = heap[place], heap[above]
        place = above


@compiled
def heap_pop(path_probs: Reals, heap: Numbers, size: int) -> int:
    """Take the item of the likeliest path; `size` counts items before."""
    top = heap[0]
    size -= 1
    heap[0] = heap[size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            return int(top)
        if child + 1 < size and path_probs[heap[child + 1]] > path_probs[heap[child]]:
            child += 1
        if path_probs[heap[place]] >= path_probs[heap[child]]:
            return int(top)
        heap[place], heap[child] = heap[child], heap[place]
        place = child


@compiled
def _make_distribution(probs: Reals, known: int, power: float, weights: Numbers) -> float:
    """Integer weights of the candidates, into `weights`. Returns how much of the probability they hold."""
    largest, mass = 0.0, 0.0
    for i in range(known):
        largest = max(largest, probs[i, 0])
        mass += probs[i, 0]
    for i in range(known):
        share = (probs[i, 0] / largest) ** power
        weights[i] = max(1, int(share * MAX_DISTRIBUTION_WEIGHT + 0.5))
    return min(mass, _MOST_CONFIDENT)


@compiled
def draw_place(left: Numbers, size: int, coin: float) -> int:
    """The place of a draw by the weights left, at least one of them positive. The caller zeroes its weight."""
    total = 0
    for i in range(size):
        total += left[i]
    point = int(coin * total)
    for i in range(size):
        point -= left[i]
        if point < 0:
            return i
    return 0


class _Rows(NamedTuple):
    """What is known of the rows drawn so far: [1 + nodes] each, `left` and `states` with a second axis."""

    states: Numbers  # [.., 2 * SOURCES]
    left: Numbers  # [.., MAX_CANDIDATES] weights not drawn yet
    depths: Numbers
    draws: Numbers
    paths: Reals
    confidences: Reals
    path_probs: Reals  # of drawing once more
    heap: Numbers


@inlined
def _open_row(
    tries: Tries,
    evidence: Evidence,
    shape: Shape,
    row: int,
    tree: Numbers,
    distributions: Distributions,
    rows: _Rows,
    scratch: Scratch,
) -> bool:
    """Make the distribution of a new row. False when nothing is known to follow it."""
    distributions.sizes[row] = 0
    if rows.depths[row] >= shape.depth:
        return False
    if row > 0:
        resolve_states(tries, rows.states, row, tree[1, row], tree[0, row], evidence.rules[MAX_MATCH])
    known = predict((tries[0][0], tries[1][0], tries[2][0]), rows.states, row, evidence, OPEN_FLOOR, scratch)
    if known == 0:
        return False
    distributions.sizes[row] = known
    rows.confidences[row] = _make_distribution(scratch.weights, known, shape.power, distributions.weights[row])
    for i in range(known):
        distributions.tokens[row, i] = scratch.candidates[i, 0]
        rows.left[row, i] = distributions.weights[row, i]
    rows.path_probs[row] = rows.paths[row] * rows.confidences[row]
    return bool(rows.path_probs[row] >= shape.floor)


@compiled
def grow_drawn(
    tries: Tries,
    context: Tokens,
    evidence: Evidence,
    packed: Reals,
    coins: np.uint64,
    tree: Numbers,
    scores: Reals,
    distributions: Distributions,
) -> int:
    """Draw a tree.

    Args:
        context: the sequence's last tokens, the root last.
        packed: a packed `Shape`.
        coins: seed of the draws; private to the draft, so independent of the target's coins.
        tree: [2, 1 + shape.nodes], tokens and parents, filled; row 0, the root, is left to the caller.
        scores: [1 + shape.nodes], filled likewise.
        distributions: filled, by row.

    Returns:
        Rows, the root among them, in draw order.
    """
    shape, scratch = unpack(packed), make_scratch()
    limit = shape.nodes + 1
    rows = _Rows(
        np.empty((limit, 2 * SOURCES), np.int32),
        np.empty((limit, MAX_CANDIDATES), np.int32),
        np.zeros(limit, np.int32),
        np.zeros(limit, np.int32),
        np.ones(limit),
        np.zeros(limit),
        np.zeros(limit),
        np.empty(limit + 1, np.int32),
    )
    start_states(tries, context, rows.states, scratch.state, evidence.rules[MAX_MATCH])
    row, size = 0, 0
    while row < limit:
        if _open_row(tries, evidence, shape, row, tree, distributions, rows, scratch):
            rows.heap[size] = row
            heap_push(rows.path_probs, rows.heap, size)
            size += 1
        row += 1
        if size == 0 or row == limit:
            return row
        parent = heap_pop(rows.path_probs, rows.heap, size)
        size -= 1
        coins += GOLDEN
        place = draw_place(rows.left[parent], distributions.sizes[parent], coin_of(coins))
        rows.left[parent, place] = 0
        rows.states[row] = UNKNOWN
        tree[0, row], tree[1, row] = distributions.tokens[parent, place], parent
        scores[row] = rows.path_probs[parent] / rows.paths[parent]
        rows.paths[row], rows.depths[row] = rows.path_probs[parent], rows.depths[parent] + 1
        rows.draws[parent] += 1
        rows.path_probs[parent] *= 1.0 - rows.confidences[parent]
        if (
            rows.draws[parent] < min(shape.breadth, distributions.sizes[parent])
            and rows.path_probs[parent] >= shape.floor
        ):
            rows.heap[size] = parent
            heap_push(rows.path_probs, rows.heap, size)
            size += 1
    return row
