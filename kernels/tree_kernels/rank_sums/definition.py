"""What a sum over ranks computes, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tree_kernels.linear import PLAIN_SUM, Norm, ScaledRows, SumForm
from tree_kernels.linear.layers import normed


def added_parts(
    parts: Sequence[Tensor], residual: Tensor | None = None, norm: Norm | None = None, form: SumForm = PLAIN_SUM
) -> tuple[Tensor, ScaledRows | None]:
    """[R, N] in the parts' type: the sum of all ranks' parts [R, N] in the order of the ranks, joined to the residual
    [R, N] by `form`, in fp32 and rounded once; and its rows normed whole, where a norm was given."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if form.norm is not None:
        total = normed(total, form.norm)
    total = total * form.multiplier
    if residual is not None:
        total = total + residual.float()
    output = total.to(parts[0].dtype)
    if norm is None:
        return output, None
    return output, ScaledRows(normed(output, norm).to(output.dtype), None, norm.epsilon)
