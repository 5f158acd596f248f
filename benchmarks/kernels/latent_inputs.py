"""What the latent-attention benchmark runs on, and how it checks. See `latent_attention.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.attention_inputs import BYTES_PER_US, FLOP_PER_US, ROTATED_BYTES
from tree_kernels.attention import AttentionBatch, sequence_mask, sequence_slots
from tree_kernels.latent_attention import HeadProjections, absorbed_queries, attend_expanded, expanded_values

# DeepSeek-V2's and -V3's widths of a head: queries and keys without their rotary part, and values.
PLAIN = VALUE = 128
# Keys up to which results are held to the expanded form too, which makes keys and values of all heads in fp32.
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
        """The larger of reading each vector once, and of multiplying each head's row with it once."""
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
    # [n, pages, page_size, L + P]: n copies with other contents, in other places.
    caches: Tensor
    projections: HeadProjections

    @property
    def query(self) -> Tensor:
        return absorbed_queries(self.plain, self.rotary, self.projections)

    @property
    def scale(self) -> float:
        return (PLAIN + self.case.rotary) ** -0.5

    @property
    def slots(self) -> Tensor:
        """[R] where the rows' own vectors are."""
        starts = self.batch.prefix_lengths
        own = [sequence_slots(self.batch, b)[start:] for b, start in enumerate(starts)]
        return torch.cat(own).to(self.plain.device, torch.int64 if self.plain.device.type == "cpu" else torch.int32)


def draw(case: LatentCase, seed: int, device: torch.device, dtype: torch.dtype) -> LatentInputs:
    """Random trees, shuffled pages, fresh numbers; weights that leave latents their size."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    per_sequence = -(-case.context // case.page_size)
    order = torch.randperm(case.batch * per_sequence).view(case.batch, per_sequence).tolist()
    parents = [(0, *(rng.randrange(i) for i in range(1, case.rows))) for _ in range(case.batch)]
    batch = AttentionBatch(
        query_starts=tuple(range(0, case.batch * case.rows + 1, case.rows)),
        prefix_lengths=(case.context - case.rows,) * case.batch,
        pages=tuple(map(tuple, order)),
        page_size=case.page_size,
        parents=tuple(parents),
    )
    copies = min(64, max(1, -(-ROTATED_BYTES // case.cache_bytes))) if device.type == "cuda" else 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    rows = case.batch * case.rows
    weight = normal(case.heads * (PLAIN + VALUE), case.latent) / case.latent**0.5
    return LatentInputs(
        case,
        batch,
        normal(rows, case.heads, PLAIN),
        normal(rows, case.heads, case.rotary),
        normal(copies, case.batch * per_sequence, case.page_size, case.latent + case.rotary),
        HeadProjections.of(weight, case.heads, PLAIN),
    )


def worst_error(inputs: LatentInputs, attended: Tensor) -> float:
    """Largest relative error over a few sequences, on the last copy; NaN if anything was left unwritten.

    Against the absorbed form in fp32 and, where it has room, against the expanded form, which is the definition.
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
        law = attend_expanded(inputs.plain, inputs.rotary, cache, inputs.projections, batch, inputs.scale)
        values = expanded_values(attended, inputs.projections).float()
        worst = max(worst, float((values - law).norm() / law.norm()))
    return worst
