"""Weights in int8: weight-only, one scale a row (W8A16)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BYTE, _ZERO, _MOST = 255, 128, 127
# Rows of a weight. Chosen, not measured: 4,096 rows of 14,336 numbers take 235 MB in fp32.
_QUANTIZED_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [N, K] of integers from -127 to 127, times the scale of their row."""

    # [N, K / 2] int16, contiguous: number k of a row, plus 128, in the low byte of word k, K / 2 + k in its high one.
    words: Tensor
    row_scales: Tensor  # [N] fp32

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """`weight` [N, K] rounded, its rows scaled by their largest number. Raises `ValueError` for an odd K."""
        if weight.shape[1] % 2:
            raise ValueError(f"expected an even number of columns, got {weight.shape[1]}")
        # A piece at a time, since each is in fp32 for a moment.
        begins = range(0, len(weight), _QUANTIZED_AT_ONCE)
        pieces = [_quantized(weight[begin : begin + _QUANTIZED_AT_ONCE]) for begin in begins]
        return cls(torch.cat([words for words, _ in pieces]), torch.cat([scales for _, scales in pieces]))

    @property
    def shape(self) -> torch.Size:
        """N, K."""
        return torch.Size((self.words.shape[0], 2 * self.words.shape[1]))

    def dequantized(self) -> Tensor:
        """[N, K] fp32."""
        numbers = torch.cat((self.words & _BYTE, self.words >> 8 & _BYTE), dim=1) - _ZERO
        return numbers.float() * self.row_scales[:, None]


# Weight of a linear layer, [N, K] in either form.
Weight = Tensor | Int8Weight


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Words and scales of some rows."""
    wide = weight.float()
    # A row of zeros has any scale.
    scales = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * _MOST) / _MOST
    low, high = ((wide / scales[:, None]).round_().to(torch.int16) + _ZERO).chunk(2, dim=1)
    return (high << 8) | low, scales
