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
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tree_kernels.verification.records import NOT_FINITE
from tree_kernels.verification.walks import Walk, children_of

# Log-probabilities of paths that differ by less are equal, so that rounding decides nothing.
SAME_PATH = 1e-9


def typical_walk(
    parents: Sequence[int],
    token_ids: Sequence[int],
    probs_of: Callable[[int], Tensor | None],
    draw: Callable[[Tensor, int], int],
    threshold: Callable[[float], float],
    *,
    begins: bool,
) -> tuple[Walk, tuple[bool, ...]]:
    """The longest path of typical tokens, of several the most probable, and the model's own draw after it; and for each
    accepted row whether the model's own draw is another token.

    Args:
        parents: [rows], parents[i] < i; row 0 is the root.
        token_ids: [rows]; siblings carry different tokens.
        probs_of: the distribution [V] after a row, in fp64, of sum 1; None where its logits are no finite numbers, and
            nothing below it is typical. Called once for each row of a typical path.
        draw: the model's own draw from a distribution [V], at a depth below the root.
        threshold: the probability that a typical token exceeds, given the entropy of its distribution in nats.
        begins: no token was generated yet: the first one is the model's own draw, drafted or not.
    """
    # Log-probability and depth of each row that is reached by typical tokens. Parents come before their children.
    reached, depths = {0: 0.0}, {0: 0}
    cached: dict[int, Tensor | None] = {}
    for row, children in enumerate(children_of(parents)):
        if row not in reached or not children:
            continue
        probs = cached[row] = probs_of(row)
        if probs is None:
            continue
        own = draw(probs, 0) if begins and row == 0 else None
        # Given the entropy in nats.
        least = threshold(float(torch.special.entr(probs).sum()))
        tokens = [token_ids[child] for child in children]
        # All children at once: reading one number of a GPU waits for it.
        for child, token, probability in zip(children, tokens, probs[tokens].tolist(), strict=True):
            typical = probability > least if own is None else token == own
            if typical:
                reached[child], depths[child] = reached[row] + math.log(probability), depths[row] + 1
    path = path_to(parents, _last_row(reached, depths))
    rows = (0, *path)
    after = [cached[row] if row in cached else probs_of(row) for row in rows]
    own_tokens = [NOT_FINITE if probs is None else draw(probs, depth) for depth, probs in enumerate(after)]
    lossy = tuple(own != token_ids[row] for own, row in zip(own_tokens, path, strict=False))
    return Walk(path, own_tokens[-1]), lossy


def _last_row(reached: dict[int, float], depths: dict[int, int]) -> int:
    """The deepest row, of several the most probable, of several the first."""
    deepest = max(depths.values())
    likeliest = max(reached[row] for row, depth in depths.items() if depth == deepest)
    return min(row for row, depth in depths.items() if depth == deepest and reached[row] > likeliest - SAME_PATH)


def path_to(parents: Sequence[int], row: int) -> tuple[int, ...]:
    """Rows from below the root to `row`."""
    path: list[int] = []
    while row:
        path.append(row)
        row = parents[row]
    return tuple(path[::-1])
