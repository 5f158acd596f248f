"""Calls the compiled growth for one sequence, in the way its verification mode asks for, and wraps the result."""

from __future__ import annotations

import numpy as np

from draft_service.drafter import DraftSequence
from draft_service.drawn_growth import grow_drawn
from draft_service.prediction import MAX_CANDIDATES, Evidence, Tries
from draft_service.tree_growth import Shape, grow
from outrider.frames import TreeLimits
from outrider.sampling import VerificationMode
from outrider.tree import DraftDistribution, TokenTree

# Below this temperature the target's law is a point, and raising frequencies further only overflows.
_COLDEST = 0.1
# How far the race over relative frequencies is taken for the target's own (fitted with benchmarks/draft_quality.py).
_SHARPNESS = 1.0
_MASK64 = (1 << 64) - 1
# Keeps the draft's coins apart from everything else that is made from the request's seed.
_COIN_SALT = 0xD1B54A32D192ED03


def build_tree(
    tries: Tries, sequence: DraftSequence, evidence: Evidence, limits: TreeLimits, breadth: int, floor: float
) -> TokenTree:
    """Grow the tree of one sequence from its tries (own, tenant's, shared)."""
    context = np.array(sequence.token_ids[-evidence.max_match :], dtype=np.int32)
    sampled = sequence.mode is not VerificationMode.GREEDY
    shape = Shape(
        nodes=limits.max_nodes,
        depth=limits.max_depth,
        breadth=breadth,
        floor=floor,
        coupled=sequence.mode is VerificationMode.COUPLED,
        power=1.0 / max(sequence.sampling.temperature or 1.0, _COLDEST) if sampled else 1.0,
        sharpness=_SHARPNESS,
        seed=np.uint64(sequence.seed),
        position=np.uint64(len(sequence.token_ids)),
    )
    rows = limits.max_nodes + 1
    tokens, parents = np.empty(rows, np.int32), np.empty(rows, np.int32)
    scores = np.empty(rows, np.float64)
    laws: dict[int, DraftDistribution] = {}
    if sequence.mode is VerificationMode.REJECTION:
        sizes, law_tokens = np.empty(rows, np.int32), np.empty((rows, MAX_CANDIDATES), np.int32)
        weights = np.empty((rows, MAX_CANDIDATES), np.int32)
        coins = np.uint64((sequence.seed ^ _COIN_SALT) * (2 * len(sequence.token_ids) + 1) & _MASK64)
        rows = grow_drawn(tries, context, evidence, shape, coins, tokens, parents, scores, sizes, law_tokens, weights)
        laws = {
            int(row): DraftDistribution(
                tuple(law_tokens[row, : sizes[row]].tolist()), tuple(weights[row, : sizes[row]].tolist())
            )
            for row in np.unique(parents[1:rows])
        }
    else:
        rows = grow(tries, context, evidence, shape, tokens, parents, scores)
    tokens[0], parents[0], scores[0] = sequence.root, 0, 1.0
    return TokenTree(tuple(tokens[:rows].tolist()), tuple(parents[:rows].tolist()), tuple(scores[:rows].tolist()), laws)
