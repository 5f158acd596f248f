"""What a linear layer of few rows takes and gives beside its product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight [N, K] in integers of eight bits, from -127 to 127, times the scale of their row.

    Attributes:
        words: [N, K / 2] int16, contiguous: number k of a row, plus 128, in the low byte of word k, and number
            K / 2 + k in its high byte.
        scales: [N] fp32.
    """

    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> ScaledWeight:
        """The nearest to `weight` [N, K] whose rows are scaled by their largest number. Raises `ValueError` for an odd
        K."""
        if weight.shape[1] % 2:
            raise ValueError(f"expected an even number of columns, got {weight.shape[1]}")
        # A piece at a time, since each is wide for a moment.
        begins = range(0, len(weight), _ROUNDED_AT_ONCE)
        pieces = [_rounded(weight[begin : begin + _ROUNDED_AT_ONCE]) for begin in begins]
        return cls(torch.cat([words for words, _ in pieces]), torch.cat([scales for _, scales in pieces]))

    @property
    def shape(self) -> torch.Size:
        """N, K."""
        return torch.Size((self.words.shape[0], 2 * self.words.shape[1]))

    def wide(self) -> Tensor:
        """[N, K] fp32."""
        numbers = torch.cat((self.words & _BYTE, self.words >> 8 & _BYTE), dim=1) - _ZERO
        return numbers.float() * self.scales[:, None]


# What a linear layer multiplies with, [N, K] either way.
Weight = Tensor | ScaledWeight

_BYTE, _ZERO, _MOST = 255, 128, 127
# Rows of a weight. Chosen: 4,096 rows of 14,336 numbers take 235 MB in fp32.
_ROUNDED_AT_ONCE = 4096


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Words and scales of some rows."""
    wide = weight.float()
    # A row of zeros has any scale.
    scales = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * _MOST) / _MOST
    low, high = ((wide / scales[:, None]).round_().to(torch.int16) + _ZERO).chunk(2, dim=1)
    return (high << 8) | low, scales


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
