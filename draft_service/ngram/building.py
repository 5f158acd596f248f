"""Calls the compiled growth for one sequence, in the way its verification mode asks for, and wraps the result."""

from __future__ import annotations

import numpy as np

from draft_service.drafters.base import DraftSequence
from draft_service.ngram.drawn_growth import Distributions, grow_drawn
from draft_service.ngram.growth import Shape, grow, pack
from draft_service.ngram.prediction import MAX_CANDIDATES, MAX_MATCH, Evidence, Tries
from outrider.sampling import VerificationMode
from outrider.tree import DraftDistribution, TokenTree
from outrider.wire.frames import TreeLimits

# Below this temperature the target's distribution is a point, and raising frequencies further only overflows.
_COLDEST = 0.1
# How far the race over relative frequencies is taken for the target's own (fitted with
# benchmarks/drafters/draft_quality.py).
SHARPNESS = 0.5
_MASK64 = (1 << 64) - 1
# Keeps the draft's coins apart from everything else that is made from the request's seed.
_COIN_SALT = 0xD1B54A32D192ED03


def race_power(sequence: DraftSequence) -> float:
    """The exponent on probabilities in the race of a sampled sequence."""
    return 1.0 / max(sequence.sampling.temperature or 1.0, _COLDEST)


def build_tree(
    tries: Tries, sequence: DraftSequence, evidence: Evidence, limits: TreeLimits, breadth: int, floor: float
) -> TokenTree:
    """Grow the tree of one sequence from its tries (own, tenant's, shared)."""
    context = np.array(sequence.token_ids[-int(evidence.rules[MAX_MATCH]) :], dtype=np.int32)
    sampled = sequence.mode is not VerificationMode.GREEDY
    shape = pack(
        Shape(
            nodes=limits.max_nodes,
            depth=limits.max_depth,
            breadth=breadth,
            floor=floor,
            coupled=sequence.mode is VerificationMode.COUPLED,
            power=race_power(sequence) if sampled else 1.0,
            sharpness=SHARPNESS,
        )
    )
    rows = limits.max_nodes + 1
    tree, scores = np.empty((2, rows), np.int32), np.empty(rows, np.float64)
    distributions: dict[int, DraftDistribution] = {}
    if sequence.mode is VerificationMode.REJECTION:
        room = (rows, MAX_CANDIDATES)
        drawn = Distributions(np.empty(rows, np.int32), np.empty(room, np.int32), np.empty(room, np.int32))
        coins = np.uint64((sequence.seed ^ _COIN_SALT) * (2 * len(sequence.token_ids) + 1) & _MASK64)
        rows = grow_drawn(tries, context, evidence, shape, coins, tree, scores, drawn)
        distributions = {row: _distribution(drawn, row) for row in set(tree[1, 1:rows].tolist())}
    else:
        seed, position = np.uint64(sequence.seed), np.uint64(len(sequence.token_ids))
        rows = grow(tries, context, evidence, shape, seed, position, tree, scores)
    tree[0, 0], tree[1, 0], scores[0] = sequence.root, 0, 1.0
    tokens, parents = tree[:, :rows].tolist()
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores[:rows].tolist()), distributions)


def _distribution(distributions: Distributions, row: int) -> DraftDistribution:
    size = distributions.sizes[row]
    return DraftDistribution(
        tuple(distributions.tokens[row, :size].tolist()), tuple(distributions.weights[row, :size].tolist())
    )
