"""Rotary embedding of queries and keys, in fp32 and rounded once.

Pairs of a head's numbers are i and i + half. A family whose pairs are neighbours, or turn the other way, has the rows
of its products in another order: the scores are the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_models.spec import RotarySpec


@dataclass(eq=False)
class Angles:
    """Cosines and sines of a pass's rows, [R, W] fp32 for W rotated numbers of a head, both halves equal."""

    cosines: Tensor
    sines: Tensor
    place_keys: Tensor | None = None  # [R, Hkv] bf16, the last numbers of keys
    query_scale: Tensor | None = None  # [R] fp32, that queries are multiplied with once they are rotated


class RotaryEmbedding(nn.Module):
    """Angles of positions: computed, or looked up where `tabulate` made a table, which takes two launches."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        super().__init__()
        self._scaling, self._query_scale = spec.scaling, spec.query_scale
        frequencies = torch.tensor(spec.frequencies + spec.frequencies, dtype=torch.float32, device=device)
        self.register_buffer("_frequencies", frequencies, persistent=False)
        self._frequencies: Tensor
        slopes = torch.tensor(spec.place_slopes, dtype=torch.bfloat16, device=device)
        self._slopes = slopes if spec.place_slopes else None
        self._table: Angles | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # No cast makes frequencies less exact.
        exact = self._frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._frequencies = exact.to(self._frequencies.device)
        return self

    def tabulate(self, positions: int) -> None:
        """Make the table for positions below `positions`."""
        with torch.inference_mode(False):
            self._table = self._computed(torch.arange(positions, device=self._frequencies.device))

    def forward(self, positions: Tensor) -> Angles:
        """Angles of integer positions [R]."""
        table = self._table
        if table is None:
            return self._computed(positions)
        scale, places = (None if one is None else one[positions] for one in (table.query_scale, table.place_keys))
        cosines, sines = (functional.embedding(positions, one) for one in (table.cosines, table.sines))
        return Angles(cosines, sines, places, scale)

    def _computed(self, positions: Tensor) -> Angles:
        places = positions.float()
        angles = places[:, None] * self._frequencies
        scale, grown = self._query_scale, None
        if scale is not None:
            grown = 1 + scale.beta * torch.log(1 + torch.floor((places + scale.ahead) / scale.length))
        falling = None if self._slopes is None else positions[:, None] * self._slopes
        return Angles(angles.cos() * self._scaling, angles.sin() * self._scaling, falling, grown)


def sines_of(rows: int, width: int) -> Tensor:
    """[rows, width] fp32: of each row's number the sines and the cosines at falling frequencies (fairseq's)."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies
    return functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))


def rotate_heads(heads: Tensor, angles: Angles) -> Tensor:
    """Rotate the first W numbers of [R, heads, D], in their type."""
    cosines, sines = angles.cosines[:, None], angles.sines[:, None]
    width = cosines.shape[-1]
    if not width:
        return heads
    if width == heads.shape[-1]:
        return _rotated(heads, cosines, sines)
    return torch.cat([_rotated(heads[..., :width], cosines, sines), heads[..., width:]], dim=-1)


def scaled_queries(query: Tensor, scale: Tensor) -> Tensor:
    """Queries [R, heads, D] times `scale` [R], in their type."""
    return (query * scale[:, None, None]).to(query.dtype)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    # Half precision times fp32 is fp32.
    return (heads * cosines + torch.cat([-second, first], dim=-1) * sines).to(heads.dtype)


def halves_order(spec: RotarySpec | None, heads: int, width: int) -> Tensor | None:
    """[heads * width] int64: which row of a published product stands at each place, so that neighbouring pairs become
    halves, and those that turn backwards change places; None where they lie so already, or nothing is rotated."""
    if spec is None or not (spec.interleaved or spec.backwards):
        return None
    within = torch.arange(width)
    if spec.interleaved:
        within[: spec.width] = torch.cat([torch.arange(0, spec.width, 2), torch.arange(1, spec.width, 2)])
    if spec.backwards:
        within[: spec.width] = within[: spec.width].roll(spec.width // 2)
    return (torch.arange(heads)[:, None] * width + within).flatten()
