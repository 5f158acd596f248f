"""Tokens that the device knows before the host does: what the last step said, fed to the next."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_awaited(token_ids: Tensor, awaited: Tensor) -> Tensor:
    """`token_ids` with every -1 - i replaced by `awaited[i]`.

    Args:
        token_ids: [R] int32.
        awaited: [any] int32, longer than the largest i.

    Returns:
        [R] int32, a new tensor.
    """
    if token_ids.is_cuda:
        # Only here: Triton may be absent. One launch, where PyTorch takes four.
        from tree_kernels._triton_feeding import fill

        return fill(token_ids, awaited)
    return torch.where(token_ids < 0, awaited[(-1 - token_ids).clamp(min=0)], token_ids)
