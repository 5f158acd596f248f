"""Sampled trees for REJECTION verification: children drawn without replacement from distributions of integer weights.

Every decision to draw once more depends only on earlier draws: on the row's distribution, its number of draws, and the
path above it. So whether a child exists never depends on its own token, as the target's recursive rejection sampling
requires; for the same reason the score of the i-th draw does not depend on its token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_service.compiling import Numbers, Reals, compiled, inlined, largest
from draft_service.drafters.base import MOST_CONFIDENT, DraftSequence
from draft_service.ngram.arrays import Tokens
from draft_service.ngram.growth import OPEN_FLOOR, TreeBounds
from draft_service.ngram.prediction import (
    MAX_CANDIDATES,
    SOURCES,
    UNKNOWN,
    Evidence,
    Scratch,
    Tries,
    longest_match,
    make_scratch,
    predict,
    resolve_states,
    start_states,
)
from draft_service.noise import GOLDEN, coin_of, draw_place, first_coin
from outrider.tree import MAX_DISTRIBUTION_WEIGHT, DraftDistribution, TokenTree


class Distributions(NamedTuple):
    """The distribution that each row's children were drawn from; room for [1 + nodes] rows of MAX_CANDIDATES."""

    sizes: Numbers  # [..] support
    tokens: Numbers  # [.., MAX_CANDIDATES]
    weights: Numbers  # [.., MAX_CANDIDATES] integers


@compiled
def _make_distribution(probs: Reals, known: int, power: float, weights: Numbers) -> float:
    """Write integer weights of the candidates into `weights`. Returns their total probability."""
    largest, mass = 0.0, 0.0
    for i in range(known):
        largest = max(largest, probs[i, 0])
        mass += probs[i, 0]
    for i in range(known):
        share = (probs[i, 0] / largest) ** power
        weights[i] = max(1, int(share * MAX_DISTRIBUTION_WEIGHT + 0.5))
    return min(mass, MOST_CONFIDENT)


class _Rows(NamedTuple):
    """State of the rows drawn so far: [1 + nodes] each, `left` and `states` with a second axis."""

    states: Numbers  # [.., 2 * SOURCES]
    left: Numbers  # [.., MAX_CANDIDATES] weights not drawn yet
    depths: Numbers
    draws: Numbers
    paths: Reals
    confidences: Reals
    path_probs: Reals  # of drawing once more; 0 for rows that are not drawn from


@inlined
def _open_row(
    tries: Tries,
    evidence: Evidence,
    shape: TreeBounds,
    row: int,
    tree: Numbers,
    distributions: Distributions,
    rows: _Rows,
    scratch: Scratch,
) -> None:
    """Make the distribution of a new row, if a continuation is known."""
    distributions.sizes[row] = 0
    if rows.depths[row] >= shape.depth:
        return
    if row > 0:
        resolve_states(tries, rows.states, row, tree[1, row], tree[0, row], longest_match(evidence.trust))
    known = predict((tries[0][0], tries[1][0], tries[2][0]), rows.states, row, evidence, OPEN_FLOOR, scratch)
    if known == 0:
        return
    distributions.sizes[row] = known
    rows.confidences[row] = _make_distribution(scratch.weights, known, shape.power, distributions.weights[row])
    for i in range(known):
        distributions.tokens[row, i] = scratch.candidates[i, 0]
        rows.left[row, i] = distributions.weights[row, i]
    rows.path_probs[row] = rows.paths[row] * rows.confidences[row]


@compiled
def grow_drawn(
    tries: Tries,
    context: Tokens,
    evidence: Evidence,
    shape: TreeBounds,
    coins: np.uint64,
    tree: Numbers,
    scores: Reals,
    distributions: Distributions,
) -> int:
    """Draw a tree. Returns rows, the root among them, in draw order.

    Args:
        context: the sequence's last tokens, the root last.
        coins: seed of the draws; private to the draft, so independent of the target's coins.
        tree: [2, 1 + shape.nodes], tokens and parents, filled; row 0, the root, is left to the caller.
        scores: [1 + shape.nodes], filled likewise.
        distributions: filled, by row.
    """
    scratch = make_scratch()
    limit = shape.nodes + 1
    rows = _Rows(
        np.empty((limit, 2 * SOURCES), np.int32),
        np.empty((limit, MAX_CANDIDATES), np.int32),
        np.zeros(limit, np.int32),
        np.zeros(limit, np.int32),
        np.ones(limit),
        np.zeros(limit),
        np.zeros(limit),
    )
    start_states(tries, context, rows.states, scratch.state, longest_match(evidence.trust))
    for row in range(1, limit):
        _open_row(tries, evidence, shape, row - 1, tree, distributions, rows, scratch)
        parent = largest(rows.path_probs, row)
        if rows.path_probs[parent] <= 0.0 or rows.path_probs[parent] < shape.floor:
            return row
        coins += GOLDEN
        place = draw_place(rows.left[parent], distributions.sizes[parent], coin_of(coins))
        rows.left[parent, place] = 0
        rows.states[row] = UNKNOWN
        tree[0, row], tree[1, row] = distributions.tokens[parent, place], parent
        scores[row] = rows.path_probs[parent] / rows.paths[parent]
        rows.paths[row], rows.depths[row] = rows.path_probs[parent], rows.depths[parent] + 1
        rows.draws[parent] += 1
        rows.path_probs[parent] *= 1.0 - rows.confidences[parent]
        if rows.draws[parent] >= min(shape.breadth, distributions.sizes[parent]):
            rows.path_probs[parent] = 0.0
    return limit


def draw_tree(tries: Tries, sequence: DraftSequence, evidence: Evidence, shape: TreeBounds) -> TokenTree:
    """Draw the tree of one sequence from its tries (own, tenant's, shared)."""
    context = np.array(sequence.token_ids[-longest_match(evidence.trust) :], dtype=np.int32)
    room = shape.nodes + 1
    tree, scores = np.zeros((2, room), np.int32), np.ones(room)
    drawn = Distributions(
        np.empty(room, np.int32), np.empty((room, MAX_CANDIDATES), np.int32), np.empty((room, MAX_CANDIDATES), np.int32)
    )
    # Makes the draft's coins independent of other uses of the request's seed.
    coins = np.uint64(first_coin(sequence.seed, 0xD1B54A32D192ED03, len(sequence.token_ids)))
    rows = grow_drawn(tries, context, evidence, shape, coins, tree, scores, drawn)
    tree[0, 0] = sequence.root
    tokens, parents = tree[:, :rows].tolist()
    distributions = {row: _distribution(drawn, row) for row in set(parents[1:])}
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores[:rows].tolist()), distributions)


def _distribution(distributions: Distributions, row: int) -> DraftDistribution:
    size = distributions.sizes[row]
    return DraftDistribution(
        tuple(distributions.tokens[row, :size].tolist()), tuple(distributions.weights[row, :size].tolist())
    )
