"""What the layers of a rank need of the other ranks, and what they do with it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tree_kernels.linear import Norm, ScaledRows, SumForm


class RowSums(Protocol):
    """Sums over ranks in one launch with what a layer does behind them. Every rank makes the same calls."""

    def place(self, rows: int, width: int) -> Tensor:
        """[rows, width] of numbers: where this rank writes its part of the next sum, which `add` makes."""

    def add(self, part: Tensor, residual: Tensor, norm: Norm | None, form: SumForm) -> tuple[Tensor, ScaledRows | None]:
        """See `tree_kernels.rank_sums.added_parts`; `part` [R, H] is what `place` gave."""


class RankGroup(Protocol):
    """One rank among `size`. Every rank makes the same calls in the same order, with tensors of the same shapes."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sums_of(self, residual: Tensor) -> RowSums | None:
        """What adds parts of all ranks to a residual [R, H]; None where `summed` does, as for the first sum of a
        pass, and of what drafts behind it."""

    def summed(self, part: Tensor) -> Tensor:
        """[..]: the sum of all ranks' parts [..], the same on every rank bit for bit. `part` may be overwritten."""

    def joined(self, part: Tensor) -> Tensor:
        """[.., size * W]: all ranks' parts [.., W] beside one another, in the order of the ranks."""

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""

    def alone(self) -> AbstractContextManager[None]:
        """While the block runs, calls reach no other rank: a sum is this one's part, and what is joined are copies of
        it. For launches that are collected and not run, of which sums over GPUs would wait for the others; these wait
        for the end of the block, in `least`."""


def looked_up(table: Tensor, token_ids: Tensor, ranks: RankGroup | None) -> Tensor:
    """[R, W] of token ids [R], in a table of which each rank has so many rows [V', W], all of it where there is one:
    a token's row is one rank's, to which the others add zeros."""
    if ranks is None:
        return functional.embedding(token_ids, table)
    held = len(table)
    own = token_ids - ranks.rank * held
    elsewhere = (own < 0) | (own >= held)
    rows = functional.embedding(own.clamp(0, held - 1), table)
    return ranks.summed(rows.masked_fill_(elsewhere[:, None], 0.0))


def rms_over_ranks(rows: Tensor, epsilon: float, ranks: RankGroup, groups: int = 1) -> Tensor:
    """[R, W] in fp32: rows without their root mean square over all ranks' numbers, or those of ranks in turn that are
    in one of so many groups. Numbers that several ranks have in common count for each."""
    own, wide = ranks.rank * groups // ranks.size, rows.float()
    squares = wide.new_zeros(len(rows), groups)
    squares[:, own] = wide.square().sum(-1)
    mean = ranks.summed(squares)[:, own, None] * groups / (ranks.size * rows.shape[1])
    return wide * torch.rsqrt(mean + epsilon)
