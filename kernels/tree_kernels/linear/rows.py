"""Inputs and outputs of linear layers beside their products: norms, rows whose norm is half done, and heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: x * weight / sqrt(mean(x²) + epsilon). `weight` [H]."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Hidden rows whose norm is half done, or whole where `squares` is None.

    Attributes:
        rows: [R, H] the hidden rows times the norm's weight; without squares the normed rows.
        squares: [R, parts] fp32; their sum over the parts is that of the hidden row's squares.
        epsilon: of the norm.
    """

    rows: Tensor
    squares: Tensor | None
    epsilon: float

    @property
    def scale(self) -> Tensor:
        """[R, 1] fp32: the factor that finishes the norm."""
        if self.squares is None:
            return torch.ones(len(self.rows), 1, device=self.rows.device)
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / self.rows.shape[1] + self.epsilon)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Angles of the heads of R rows, and where their keys and values go.

    Attributes:
        cosines: [R, D], of the angles by which the numbers of a head are rotated; number i is paired with D / 2 + i.
        sines: [R, D].
        slots: [R] integers as in `paging.write_kv`: where keys and values go. On a GPU a negative one is left out.
        key_cache: [pages, page_size, Hkv, D], contiguous.
        value_cache: [pages, page_size, Hkv, D], contiguous.
    """

    cosines: Tensor
    sines: Tensor
    slots: Tensor
    key_cache: Tensor
    value_cache: Tensor


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Input of a draft head's first layer.

    Attributes:
        rows: [R, 2 * H] normed embeddings of tokens, and beside them normed features.
        cosines: [R, D] fp32, of the angles of rotary embedding.
        sines: [R, D] fp32.
    """

    rows: Tensor
    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What a draft head's input is made with, the same for every pass.

    Attributes:
        embedding: [V, H] of tokens.
        embedding_norm: over H.
        feature_norm: over H.
        frequencies: [D] fp32, the angle per position of each number of a head; both halves are equal.
        scaling: factor of cosines and sines.
    """

    embedding: Tensor
    embedding_norm: Norm
    feature_norm: Norm
    frequencies: Tensor
    scaling: float = 1.0
