"""From a row of logits to the distribution that a token is drawn from, by temperature and filters."""

from __future__ import annotations

import torch
from torch import Tensor


def distribution_of(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution [V] in fp64 of logits [V] after temperature, min_p, top_k and top_p, in this order.

    Of equally probable tokens a filter keeps the lower ids. `top_p` is a share of what the filters before it left.
    Logits are of any floating dtype, at least one finite. Temperature 0 gives the likeliest token, the first of equals,
    probability 1; a top_k of 0, a top_p of 1 and a min_p of 0 are no filters.
    """
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, logits.argmax()[None], 1.0)
    # The largest logit becomes 0 first, so that no temperature, however small, makes it infinite.
    distribution = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
    if min_p > 0:
        distribution = torch.where(distribution >= min_p * distribution.max(), distribution, 0.0)
    kept = _most_probable(distribution, top_k) if 0 < top_k < len(distribution) else None
    if top_p < 1:
        kept = _nucleus(distribution, kept, top_p)
    if kept is not None:
        values = distribution[kept]
        distribution = torch.zeros_like(distribution).index_copy_(0, kept, values)
    return distribution / distribution.sum()


def _most_probable(distribution: Tensor, count: int) -> Tensor:
    """Ids of the `count` most probable tokens, most probable first, lower ids first among equals.

    [at most count]: tokens of probability 0 are left out, since sorting all of them would take most of the time.
    """
    threshold = torch.topk(distribution, count).values[-1]
    # Every token at the threshold takes part, so that which of them stay is decided by id alone.
    candidates = distribution >= threshold if threshold > 0 else distribution > 0
    ids = candidates.nonzero()[:, 0]
    order = torch.sort(distribution[ids], descending=True, stable=True).indices
    return ids[order[:count]]


def _nucleus(distribution: Tensor, ranked: Tensor | None, top_p: float) -> Tensor:
    """Ids of the smallest set of most probable tokens that reaches `top_p`; at least one.

    `ranked` are the remaining tokens, most probable first; None for the whole vocabulary [V]. `top_p` is a share of
    their total probability.
    """
    if ranked is None:
        share = top_p * distribution.sum()
        # Without top_k, top_p sorts this many of the most probable tokens first, and the whole vocabulary only if it
        # has to.
        ranked = _most_probable(distribution, min(1024, len(distribution)))
        if distribution[ranked].sum() < share:
            ranked = _most_probable(distribution, len(distribution))
    else:
        share = top_p * distribution[ranked].sum()
    values = distribution[ranked]
    before = values.cumsum(0) - values
    return ranked[before < share]
