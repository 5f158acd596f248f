"""Soft cross-entropy of the head's distribution against the target's, in pieces: all logits would not fit in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tree_kernels.cross_entropy import soft_cross_entropy_

# Rows whose logits are in memory at a time, as fp32 too where PyTorch computes the loss.
_ROWS = 8192


def soft_cross_entropy(
    lm_input: Tensor, lm_head: Tensor, probs: Tensor, distributions: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over rows of weight * -sum_v target(v) * log head(v), and [R] the unweighted losses, without gradient.

    The target's probabilities are not renormalised over the draft vocabulary: a row weighs as much as the probability
    that the vocabulary covers, where EAGLE-3 drops or keeps the row depending on its most probable token.

    Args:
        lm_input: [R, H] input of the lm_head.
        lm_head: [V', H].
        probs: [N, V'] the target's probabilities.
        distributions: [R] int64 index in `probs` of each row's distribution.
        weights: [R] fp32.
    """
    apply: Any = _SoftCrossEntropy.apply
    total, rows = apply(lm_input, lm_head, probs, distributions, weights)
    return total, rows


class _SoftCrossEntropy(torch.autograd.Function):
    """Computes the gradient together with the value, while the logits of a piece are in memory."""

    @staticmethod
    def forward(
        ctx: Any, lm_input: Tensor, lm_head: Tensor, probs: Tensor, distributions: Tensor, weights: Tensor
    ) -> Any:
        of_lm_input, of_head = ctx.needs_input_grad[:2]
        lm_input_grad = torch.empty_like(lm_input) if of_lm_input else None
        # None for a frozen lm_head.
        head_grad = torch.zeros(lm_head.shape, dtype=torch.float32, device=lm_head.device) if of_head else None
        rows = torch.empty(len(lm_input), dtype=torch.float32, device=lm_input.device)
        for start in range(0, len(lm_input), _ROWS):
            piece = slice(start, start + _ROWS)
            grad = lm_input[piece] @ lm_head.T
            unused = lm_input_grad is None and head_grad is None
            # In place: `grad` held the logits, and holds their gradient from here on.
            rows[piece] = soft_cross_entropy_(grad, probs, distributions[piece], None if unused else weights[piece])
            if lm_input_grad is not None:
                lm_input_grad[piece] = grad @ lm_head
            if head_grad is not None:
                head_grad += (grad.T @ lm_input[piece]).float()
        ctx.save_for_backward(lm_input_grad, None if head_grad is None else head_grad.to(lm_head.dtype))
        ctx.mark_non_differentiable(rows)
        return (rows * weights).sum(), rows

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        lm_input_grad, head_grad = ctx.saved_tensors
        grads = (None if grad is None else (grad * upstream[0]).to(grad.dtype) for grad in (lm_input_grad, head_grad))
        return *grads, None, None, None


@torch.no_grad()
def most_probable(lm_input: Tensor, lm_head: Tensor) -> Tensor:
    """[R] int64 the most probable token of each row, as an index in the draft vocabulary."""
    return torch.cat([(piece @ lm_head.T).argmax(-1) for piece in torch.split(lm_input, _ROWS)])
