"""Launches of sums over ranks. What they compute is `tree_kernels.rank_sums.added_parts`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tree_kernels.dependent_launch import dependent_launch
from tree_kernels.linear import PLAIN_SUM, Norm, ScaledRows, SumForm
from tree_kernels.linear.triton_backend import check_sum, or_other
from tree_kernels.rank_sums.memory import PLACES, SharedParts
from tree_kernels.rank_sums.triton_kernels import add_parts_kernel

# Loads of a thread, in bytes.
_LOAD = 16
# The place of a part that is summed alone.
_ALONE = PLACES - 1


class TritonRankSums:
    """Sums over ranks, each in one launch of one row a program. Every rank makes the same calls in the same order, in
    one stream.

    A layer writes its part to `place` and calls `add` next. Parts of consecutive sums lie in two places by
    turns: a rank that has met the others for a sum knows that all have done the one before. Since graphs are run in any
    order, the first sum of every pass is one of `summed`, or of another kind for which all ranks meet; `summed` has a
    place of its own, and ranks leave it together.
    """

    def __init__(self, memory: SharedParts) -> None:
        self._memory, self._turn = memory, 0
        # Of the largest part.
        self.most_bytes = memory.own[0].nbytes
        self._dependent = dependent_launch(memory.own.device)

    def can_sum(self, part: Tensor) -> bool:
        """Whether parts of this shape and type are summed here."""
        fits = part.dtype == self._memory.own.dtype and part.dim() == 2 and 0 < part.nbytes <= self.most_bytes
        return fits and part.shape[1] * part.element_size() % _LOAD == 0

    def place(self, rows: int, width: int) -> Tensor:
        """[rows, width] of numbers: where this rank writes its part of the next sum."""
        self._turn = 1 - self._turn
        return self._own(self._turn, rows, width)

    def add(
        self, part: Tensor, residual: Tensor | None = None, norm: Norm | None = None, form: SumForm = PLAIN_SUM
    ) -> tuple[Tensor, ScaledRows | None]:
        """See `added_parts`, of all ranks' parts. `part` [R, N] is what `place` gave, and has this rank's."""
        check_sum(None, residual, norm, form)
        return self._launch(self._turn, part, residual, norm, form)

    def summed(self, part: Tensor) -> Tensor:
        """[R, N], a new tensor: the sum of all ranks' parts [R, N]."""
        # Whatever was launched before, all ranks go on with the same place.
        self._turn = 0
        own = self._own(_ALONE, *part.shape).copy_(part)
        return self._launch(_ALONE, own, None, None, PLAIN_SUM)[0]

    def _own(self, place: int, rows: int, width: int) -> Tensor:
        return self._memory.own[place, : rows * width].view(rows, width)

    def _launch(
        self, place: int, part: Tensor, residual: Tensor | None, norm: Norm | None, form: SumForm
    ) -> tuple[Tensor, ScaledRows | None]:
        (rows, width), memory, post = part.shape, self._memory, form.norm
        output = torch.empty_like(part)
        scaled = None if norm is None else ScaledRows(torch.empty_like(output), None, norm.epsilon)
        post_weight, post_bias = (output, output) if post is None else (post.weight, or_other(post.bias, output))
        weight, shift = (output, output) if norm is None else (norm.weight, or_other(norm.bias, output))
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block * part.element_size() // (32 * _LOAD)))
        add_parts_kernel[(min(rows, memory.programs),)](
            tuple(one[place] for one in memory.parts), memory.signals, post_weight, post_bias,
            or_other(residual, output), weight, shift, output, output if scaled is None else scaled.rows, rows,
            0.0 if post is None else post.epsilon, 0.0 if norm is None else norm.epsilon,
            RANK=memory.rank, RANKS=len(memory.parts), LEAVES_TOGETHER=place == _ALONE, POST_NORMS=post is not None,
            POST_CENTERED=post is not None and post.centered, HAS_POST_BIAS=post is not None and post.bias is not None,
            MULTIPLIER=form.multiplier, ADDS=residual is not None, NORMS=norm is not None,
            CENTERED=norm is not None and norm.centered, HAS_NORM_BIAS=norm is not None and norm.bias is not None,
            WIDTH=width, BLOCK=block, num_warps=warps, **self._dependent,
        )  # fmt: skip
        return output, scaled
