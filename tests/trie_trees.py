"""The tree of one sequence from three tries, each by itself, as the trie drafter grows or draws it among others."""

from __future__ import annotations

import numpy as np

from draft_service.drafters.base import DraftSequence
from draft_service.ngram.drawn_growth import draw_tree
from draft_service.ngram.growth import TreeBounds, grow
from draft_service.ngram.prediction import Evidence, Tries, longest_match
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits


def build_tree(
    tries: Tries, sequence: DraftSequence, evidence: Evidence, limits: TreeLimits, breadth: int, floor: float
) -> TokenTree:
    greedy, coupled = (sequence.mode is mode for mode in (VerificationMode.GREEDY, VerificationMode.COUPLED))
    # Temperatures of tests are above the coldest.
    power = 1.0 if greedy else 1.0 / (sequence.sampling.temperature or 1.0)
    shape = TreeBounds(limits.max_nodes, limits.max_depth, breadth, floor, coupled, power)
    if sequence.mode is VerificationMode.REJECTION:
        return draw_tree(tries, sequence, evidence, shape)
    context = np.array(sequence.token_ids[-longest_match(evidence.trust) :], np.int32)
    tree, scores = np.zeros((2, shape.nodes + 1), np.int32), np.ones(shape.nodes + 1)
    seed, position = np.uint64(sequence.seed), np.uint64(len(sequence.token_ids))
    rows = grow(tries, context, evidence, shape, seed, position, tree, scores)
    tokens, parents = tree[:, :rows].tolist()
    return TokenTree((sequence.root, *tokens[1:]), tuple(parents), tuple(scores[:rows].tolist()))
