"""Inputs of `latent_attention.py`, and how it checks attention over them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.attention_inputs import rotated_copies, tree_batch
from benchmarks.shared.gpu_timing import BYTES_PER_US, FLOP_PER_US
from tree_kernels.attention import AttentionBatch, sequence_mask, sequence_slots
from tree_kernels.latent_attention import HeadProjections, absorbed_queries, attend_expanded, expanded_values

# DeepSeek-V2's and -V3's widths of a head: queries and keys without their rotary part, and values.
PLAIN = VALUE = 128
# Keys up to which results are also compared with the expanded form, which needs fp32 keys and values of all heads.
_EXPANDED_KEYS = 8192


@dataclass(frozen=True)
class LatentCase:
    batch: int
    context: int
    rows: int
    heads: int = 16
    page_size: int = 16
    latent: int = 512
    rotary: int = 64

    @property
    def cache_bytes(self) -> int:
        """Of one layer in 16 bits."""
        return self.batch * self.context * (self.latent + self.rotary) * 2

    @property
    def floor_us(self) -> float:
        """The larger of the times to read each vector once, and to multiply each head's row with it once."""
        flop = 2 * (2 * self.latent + self.rotary) * self.rows * self.heads * self.context * self.batch
        return max(self.cache_bytes / BYTES_PER_US, flop / FLOP_PER_US)

    def __str__(self) -> str:
        return f"b{self.batch:3d} ctx{self.context:7d} rows{self.rows:3d} heads{self.heads:4d} page{self.page_size:3d}"


@dataclass
class LatentInputs:
    case: LatentCase
    batch: AttentionBatch
    # [R, H, PLAIN] and [R, H, P].
    plain: Tensor
    rotary: Tensor
    # [n, pages, page_size, L + P]: n caches with different contents.
    caches: Tensor
    projections: HeadProjections

    @property
    def query(self) -> Tensor:
        return absorbed_queries(self.plain, self.rotary, self.projections)

    @property
    def scale(self) -> float:
        return float((PLAIN + self.case.rotary) ** -0.5)

    @property
    def slots(self) -> Tensor:
        """[R] slots of the rows' own vectors."""
        starts = self.batch.prefix_lengths
        own = [sequence_slots(self.batch, b)[start:] for b, start in enumerate(starts)]
        return torch.cat(own).to(self.plain.device, torch.int64 if self.plain.device.type == "cpu" else torch.int32)


def draw(case: LatentCase, seed: int, device: torch.device, dtype: torch.dtype) -> LatentInputs:
    """Random inputs of a case; weights keep the size of latents."""
    batch = tree_batch(case.batch, case.context, case.rows, case.page_size, seed)
    copies = rotated_copies(case.cache_bytes) if device.type == "cuda" else 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    rows = case.batch * case.rows
    weight = normal(case.heads * (PLAIN + VALUE), case.latent) / case.latent**0.5
    return LatentInputs(
        case,
        batch,
        normal(rows, case.heads, PLAIN),
        normal(rows, case.heads, case.rotary),
        normal(copies, case.batch * len(batch.pages[0]), case.page_size, case.latent + case.rotary),
        HeadProjections.of(weight, case.heads, PLAIN),
    )


def worst_error(inputs: LatentInputs, attended: Tensor) -> float:
    """Largest relative error over a few sequences, on the last cache; NaN if an output was not written.

    Compared with the absorbed form in fp32 and, for few keys, with the expanded form, which is the definition.
    """
    case, batch, cache = inputs.case, inputs.batch, inputs.caches[-1]
    if not bool(attended.isfinite().all()):
        return float("nan")
    query, worst = inputs.query.float(), 0.0
    for b in random.sample(range(case.batch), min(2, case.batch)):
        own = slice(b * case.rows, (b + 1) * case.rows)
        vectors = cache.flatten(0, 1)[sequence_slots(batch, b).to(cache.device)].float()
        scores = torch.einsum("rhw,kw->hrk", query[own], vectors) * inputs.scale
        scores.masked_fill_(~sequence_mask(batch, b).to(cache.device), float("-inf"))
        expected = torch.einsum("hrk,kl->rhl", scores.softmax(-1), vectors[:, : case.latent])
        worst = max(worst, float((attended[own].float() - expected).norm() / expected.norm()))
    if case.batch * case.context <= _EXPANDED_KEYS and case.heads <= 16:
        expected = attend_expanded(inputs.plain, inputs.rotary, cache, inputs.projections, batch, inputs.scale)
        values = expanded_values(attended, inputs.projections).float()
        worst = max(worst, float((values - expected).norm() / expected.norm()))
    return worst
