"""What linear layers take and give beside their products: norms, rows on their way, and where heads go."""

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
    """Hidden rows whose norm is half done, or whole where no squares are.

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
        """[R, 1] fp32: what is left to multiply with."""
        if self.squares is None:
            return torch.ones(len(self.rows), 1, device=self.rows.device)
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / self.rows.shape[1] + self.epsilon)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Where the heads of R rows stand and go.

    Attributes:
        cosines: [R, D], of the angles that each number of a head is turned by; the halves of a head turn together.
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
    """What a draft head's first layer reads.

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
    """What a draft head makes its input of, the same for every pass.

    Attributes:
        embedding: [V, H] of tokens.
        embedding_norm: over H.
        feature_norm: over H.
        frequencies: [D] fp32, an angle by position for each number of a head; both halves turn alike.
        scaling: cosines and sines are multiplied by it.
    """

    embedding: Tensor
    embedding_norm: Norm
    feature_norm: Norm
    frequencies: Tensor
    scaling: float = 1.0
