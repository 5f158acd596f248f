"""Soft cross-entropy, row by row: the definition in PyTorch, and the choice of backend.

PyTorch goes over the logits a dozen times, in fp32; the kernel reads them twice and writes them once.
"""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec

import torch
from torch import Tensor

log = logging.getLogger(__name__)
# Sizes on which the kernel is checked before it is used: rows, tokens (more than one block of it, and no multiple of
# one) and distributions.
_TRIAL_ROWS, _TRIAL_TOKENS, _TRIAL_DISTRIBUTIONS = 7, 5003, 3


def soft_cross_entropy_(
    logits: Tensor, probs: Tensor, distributions: Tensor, weights: Tensor | None, *, backend: str = "auto"
) -> Tensor:
    """[R] fp32: -sum_v target(v) * log softmax(logits)(v) of each row. Sums are taken in fp32.

    Args:
        logits: [R, V'], in any floating type. With `weights` they are overwritten with the gradient of the weighted
            sum, in their type.
        probs: [N, V'] target probabilities, which may sum to less than one.
        distributions: [R] int64 row of `probs` for each row.
        weights: [R] fp32; None computes no gradient and leaves the logits unchanged.
        backend: `torch`, `triton`, or `auto`: Triton for tensors on a GPU, if its results agree, else PyTorch.
    """
    if backend == "auto":
        backend = "triton" if logits.is_cuda and _trusts(logits.device, logits.dtype, probs.dtype) else "torch"
    if backend == "triton":
        from tree_kernels.cross_entropy import triton_backend

        return triton_backend.soft_cross_entropy_(logits, probs, distributions, weights)
    target, wide = probs.index_select(0, distributions).float(), logits.float()
    mass, norm = target.sum(-1), wide.logsumexp(-1)
    losses: Tensor = mass * norm - (target * wide).sum(-1)
    if weights is not None:
        # In fp32 `wide` is the logits themselves, which are overwritten in any case.
        share = wide.sub_(norm[:, None]).exp_().mul_(mass[:, None]).sub_(target)
        logits.copy_(share.mul_(weights[:, None]))
    return losses


def _trusts(device: torch.device, dtype: torch.dtype, probs_dtype: torch.dtype) -> bool:
    """As `_trusted`, but where memory ran out: not now, and the next call tries again."""
    try:
        return _trusted(device, dtype, probs_dtype)
    except torch.OutOfMemoryError as error:
        log.warning("this loss is computed by PyTorch, since there was no memory to try Triton: %s", error)
        return False


@functools.cache
def _trusted(device: torch.device, dtype: torch.dtype, probs_dtype: torch.dtype) -> bool:
    """Whether the kernel is available and agrees with PyTorch on this device. Raises `OutOfMemoryError` where there was
    no memory to try it."""
    if find_spec("triton") is None:
        return False
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(_TRIAL_ROWS, _TRIAL_TOKENS, generator=generator)
    probs = torch.randn(_TRIAL_DISTRIBUTIONS, 2 * _TRIAL_TOKENS, generator=generator).softmax(-1)[:, :_TRIAL_TOKENS]
    rows = torch.arange(_TRIAL_ROWS).remainder(_TRIAL_DISTRIBUTIONS)
    weights = torch.rand(_TRIAL_ROWS, generator=generator)
    given = (probs.to(device, probs_dtype), rows.to(device), weights.to(device))
    found, expected = (logits.to(device, dtype, copy=True) for _ in range(2))
    plain = soft_cross_entropy_(expected, *given, backend="torch")
    try:
        losses = soft_cross_entropy_(found, *given, backend="triton")
        same = _close(losses, plain) and _close(found, expected)
    except torch.OutOfMemoryError:
        raise
    # Whatever a compiler or driver raises, PyTorch can do it.
    except Exception as error:
        if "out of memory" in str(error):
            # In Triton's words.
            raise torch.OutOfMemoryError(str(error)) from None
        log.warning("the loss is computed by PyTorch, since Triton cannot: %s", error)
        return False
    if not same:
        log.warning("the loss is computed by PyTorch, since Triton makes something else of it here")
    return same


def _close(found: Tensor, expected: Tensor) -> bool:
    difference = (found.float() - expected.float()).norm()
    # A rounding of bf16 is 0.004, and a wrong row more than 1. Written so that NaN fails.
    return bool(difference <= 0.01 * expected.float().norm())
