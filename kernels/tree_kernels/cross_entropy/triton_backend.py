"""Triton: soft cross-entropy of a row, and its gradient in place of the logits; see `tree_kernels.cross_entropy`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens that a program reads at a time, and its warps: 8 values of each of five vectors in a thread's registers.
# Chosen, not measured.
_BLOCK, _WARPS = 2048, 8


def soft_cross_entropy_(logits: Tensor, probs: Tensor, distributions: Tensor, weights: Tensor | None) -> Tensor:
    """See `dispatch.soft_cross_entropy_`. Raises `ValueError` for rows that are not contiguous."""
    if logits.stride(-1) != 1 or probs.stride(-1) != 1:
        raise ValueError("expected contiguous rows of logits and probs")
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        factors = losses if weights is None else weights.contiguous()
        arrays = logits, probs, distributions.contiguous(), factors, losses
        sizes = logits.shape[1], logits.stride(0), probs.stride(0)
        gradient = weights is not None
        _row_kernel[(len(logits),)](*arrays, *sizes, GRADIENT=gradient, BLOCK=_BLOCK, num_warps=_WARPS)
    return losses


@triton.jit
def _row_kernel(  # type: ignore[no-untyped-def]
    logits, probs, distributions, weights, losses, vocabulary, logits_stride, probs_stride, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row). Each lane keeps the greatest of its logits, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    probs += tl.load(distributions + row) * probs_stride
    lanes = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    masses = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK):
        ids = start + lanes
        here = ids < vocabulary
        x = tl.load(logits + ids, mask=here, other=float("-inf")).to(tl.float32)
        target = tl.load(probs + ids, mask=here, other=0.0).to(tl.float32)
        higher = tl.maximum(peaks, x)
        # A lane beyond the vocabulary has seen nothing, and -inf - -inf is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(peaks - base) + tl.exp(x - base)
        peaks = higher
        masses += target
        products += tl.where(here, target * x, 0.0)
    peak = tl.max(peaks, 0)
    norm = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
    mass = tl.sum(masses, 0)
    tl.store(losses + row, mass * norm - tl.sum(products, 0))
    if GRADIENT:
        weight = tl.load(weights + row)
        for start in tl.range(0, vocabulary, BLOCK):
            ids = start + lanes
            here = ids < vocabulary
            x = tl.load(logits + ids, mask=here, other=float("-inf")).to(tl.float32)
            target = tl.load(probs + ids, mask=here, other=0.0).to(tl.float32)
            gradient = (tl.exp(x - norm) * mass - target) * weight
            tl.store(logits + ids, gradient.to(logits.dtype.element_ty), mask=here)
