"""Inputs and outputs of linear layers beside their products: norms, rows whose norm is half done, and heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm, x * weight / sqrt(mean(x²) + epsilon); `centered`, a LayerNorm: the mean is taken off first.

    A weight that a checkpoint keeps less one, as Gemma's, is given whole and in fp32.
    """

    weight: Tensor  # [H], of any floating dtype
    epsilon: float
    bias: Tensor | None = None  # [H], added at the end
    centered: bool = False

    @property
    def halves(self) -> bool:
        """Whether rows times the weight can be multiplied first and divided by their root mean square later."""
        return not self.centered and self.bias is None


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Hidden rows whose norm is half done, or whole where `squares` is None."""

    rows: Tensor  # [R, H] the hidden rows times the norm's weight; without squares the normed rows
    squares: Tensor | None  # [R, parts] fp32; their sum over the parts is that of the hidden row's squares
    epsilon: float  # of the norm

    @property
    def scale(self) -> Tensor:
        """[R, 1] fp32: the factor that finishes the norm."""
        if self.squares is None:
            return torch.ones(len(self.rows), 1, device=self.rows.device)
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / self.rows.shape[1] + self.epsilon)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Angles of the heads of R rows, and where their queries, keys and values go."""

    # [R, T], of the angles by which the first T numbers of a head are rotated, those behind them not at all. Columns i
    # and T / 2 + i are for the two numbers of pair i.
    cosines: Tensor
    sines: Tensor  # [R, T]
    slots: Tensor  # [R] integers as in `paging.write_kv`: where keys and values go
    key_cache: Tensor  # [pages, page_size, Hkv, D], contiguous
    value_cache: Tensor  # [pages, page_size, Hkv, D], contiguous
    queries: Tensor | None = None  # [R, Hq, D], contiguous; None for new memory

    def room_for_queries(self, rows: Tensor, count: int) -> Tensor:
        """[R, count, D] for queries of so many heads, in the dtype of `rows` [R, any]."""
        shape = len(rows), count, self.key_cache.shape[-1]
        if self.queries is None:
            return rows.new_empty(shape)
        if self.queries.shape != shape or self.queries.dtype != rows.dtype:
            raise ValueError(f"expected queries {list(shape)} of {rows.dtype}, got room for {list(self.queries.shape)}")
        return self.queries


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Input of a draft head's first layer."""

    rows: Tensor  # [R, 2 * H] normed embeddings of tokens, and beside them normed features
    cosines: Tensor  # [R, D] fp32, of the angles of rotary embedding
    sines: Tensor  # [R, D] fp32
    features: Tensor  # [R, H] the features, not normed


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What a draft head's input is made with, the same for every pass."""

    embedding: Tensor  # [V, H] of tokens
    embedding_norm: Norm  # over H
    feature_norm: Norm  # over H
    frequencies: Tensor  # [D] fp32, the angle per position of each number of a head; both halves are equal
    scaling: float = 1.0  # factor of cosines and sines
