"""See `tree_kernels.feeding`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _fill_kernel(token_ids, awaited, filled, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows] int32 each; BLOCK of them per program."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row, mask=row < rows, other=0)
    said = tl.load(awaited - 1 - token, mask=token < 0, other=0)
    tl.store(filled + row, tl.where(token < 0, said, token), mask=row < rows)


def fill(token_ids: Tensor, awaited: Tensor) -> Tensor:
    """See `feeding.fill_awaited`."""
    filled = torch.empty_like(token_ids)
    _fill_kernel[(triton.cdiv(len(token_ids), _BLOCK),)](token_ids, awaited, filled, len(token_ids), BLOCK=_BLOCK)
    return filled
