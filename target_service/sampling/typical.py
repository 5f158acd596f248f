"""Typical acceptance: drafted tokens that are probable enough are kept, whatever the model would have drawn.

The only rule here that is not lossless: paths are longer, and the text is one that the model alone would not have
generated. Source: Medusa (arXiv 2401.10774), section 2.3.2, and `evaluate_posterior` of its code, with two differences:
the token after the accepted path is the request's own draw, by temperature and seed, where Medusa's code takes the most
probable one; and entropies are exact, where Medusa's code adds 1e-5 inside the logarithm.

At temperature 0 all probability is on the most probable token, so nothing else is kept: greedy decoding, as in Medusa's
code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.sampling import TypicalAcceptance
from outrider.tree import TokenTree
from tree_kernels.verification import Walk

# The distribution [V] after a row, in fp64, of sum 1.
ProbsOf = Callable[[int], Tensor]
# The model's own draw from a distribution [V], at a depth below the root.
Draw = Callable[[Tensor, int], int]


def typical_walk(
    tree: TokenTree, probs_of: ProbsOf, draw: Draw, rule: TypicalAcceptance, *, begins: bool
) -> tuple[Walk, tuple[bool, ...]]:
    """The longest path of typical tokens, of several the most probable, and the model's own draw after it.

    Args:
        tree: rows to verify, the root first.
        probs_of: called once for each row of a typical path.
        draw: see `Draw`.
        rule: which tokens are typical.
        begins: no token was generated yet: the first one is the model's own draw, drafted or not.

    Returns:
        The walk, and for each accepted row whether the model's own draw is another token.
    """
    # log-probability of the path to each row that is reached by typical tokens. Parents come before their children.
    reached = {0: 0.0}
    cached: dict[int, Tensor] = {}
    for row, children in enumerate(tree.children):
        if row not in reached or not children:
            continue
        probs = cached[row] = probs_of(row)
        own = draw(probs, 0) if begins and row == 0 else None
        threshold = rule.threshold(entropy_of(probs))
        tokens = [tree.token_ids[child] for child in children]
        # All children at once: reading one number of a GPU waits for it.
        for child, token, probability in zip(children, tokens, probs[tokens].tolist(), strict=True):
            typical = probability > threshold if own is None else token == own
            if typical:
                reached[child] = reached[row] + math.log(probability)
    path = path_to(tree, max(reached, key=lambda row: (tree.depths[row], reached[row], -row)))
    rows = (0, *path)
    own_tokens = [draw(cached[row] if row in cached else probs_of(row), depth) for depth, row in enumerate(rows)]
    lossy = tuple(own != tree.token_ids[row] for own, row in zip(own_tokens, path, strict=False))
    return Walk(path, own_tokens[-1]), lossy


def entropy_of(probs: Tensor) -> float:
    """Entropy in nats of a distribution [V] of sum 1."""
    return float(torch.special.entr(probs).sum())


def path_to(tree: TokenTree, row: int) -> tuple[int, ...]:
    """Rows from below the root to `row`."""
    path: list[int] = []
    while row:
        path.append(row)
        row = tree.parents[row]
    return tuple(path[::-1])
