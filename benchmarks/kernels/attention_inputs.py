"""Inputs of `tree_attention.py`, and how it checks and times attention over them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.shared.gpu_timing import BYTES_PER_US, FLOP_PER_US, captured_us
from tree_kernels.attention import (
    PLAIN,
    AttentionBatch,
    AttentionVariant,
    ancestor_mask,
    attend,
    sequence_mask,
    sequence_slots,
)

# More than four times the 60 MB of L2.
ROTATED_BYTES = 256 << 20
DTYPE = torch.bfloat16
TOLERANCE = 1e-2
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    rows: int
    query_heads: int = 32
    kv_heads: int = 8
    width: int = 128
    page_size: int = 16
    chain: bool = False  # rows of a prompt, each behind the one before, in place of trees

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.kv_heads * self.width * 4

    @property
    def floor_us(self) -> float:
        # A row of a chain sees half of the rows, on average.
        keys = self.context - self.rows / 2 if self.chain else self.context
        flop = 4 * self.rows * self.query_heads * self.width * keys * self.batch
        return max(self.kv_bytes / BYTES_PER_US, flop / FLOP_PER_US)

    def __str__(self) -> str:
        heads = f"{self.query_heads}/{self.kv_heads}x{self.width}"
        kind = " chain" if self.chain else ""
        return f"b{self.batch:3d} ctx{self.context:7d} rows{self.rows:4d} {heads:>9s} page{self.page_size:3d}{kind}"


@dataclass
class Inputs:
    case: Case
    batch: AttentionBatch
    query: Tensor
    # [n, pages, page_size, heads, width] each: n caches with different contents.
    keys: Tensor
    values: Tensor
    variant: AttentionVariant = PLAIN

    @property
    def scale(self) -> float:
        return float(self.case.width**-0.5)


def tree_batch(sequences: int, context: int, rows: int, page_size: int, seed: int) -> AttentionBatch:
    """Random trees of `rows` rows each, the last ones of `context` tokens in shuffled pages. Seeds torch as well."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    per_sequence = -(-context // page_size)
    order = torch.randperm(sequences * per_sequence).view(sequences, per_sequence).tolist()
    return AttentionBatch(
        query_starts=tuple(range(0, sequences * rows + 1, rows)),
        prefix_lengths=(context - rows,) * sequences,
        pages=tuple(map(tuple, order)),
        page_size=page_size,
        parents=tuple((0, *(rng.randrange(i) for i in range(1, rows))) for _ in range(sequences)),
    )


def rotated_copies(cache_bytes: int, most: int = 64) -> int:
    """Caches of this size that launches must take turns at, so that none is in L2 from the launch before."""
    return min(most, max(1, -(-ROTATED_BYTES // cache_bytes)))


def draw(case: Case, seed: int, read_bytes: int | None = None) -> Inputs:
    """Random inputs of a case, of whose caches a launch reads `read_bytes`; None for all."""
    batch = tree_batch(case.batch, case.context, case.rows, case.page_size, seed)
    if case.chain:
        batch = replace(batch, parents=(None,) * case.batch)
    pages = case.batch * len(batch.pages[0])
    shape = (rotated_copies(read_bytes or case.kv_bytes), pages, case.page_size, case.kv_heads, case.width)
    query = torch.randn(case.batch * case.rows, case.query_heads, case.width, device=DEVICE, dtype=DTYPE)
    keys, values = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return Inputs(case, batch, query, keys, values)


Attention = Callable[[Tensor, Tensor], Tensor]


def time_us(inputs: Inputs, attention: Attention, replays: int = 11) -> tuple[float, float]:
    """Median and quartile distance of one launch, in microseconds."""
    return rotated_us(lambda i: attention(inputs.keys[i], inputs.values[i]), len(inputs.keys), replays)


def rotated_us(launch: Callable[[int], object], copies: int, replays: int = 11) -> tuple[float, float]:
    """Median and quartile distance of one launch, in microseconds, over caches 0 .. `copies` - 1 in turn."""
    return captured_us([partial(launch, i % copies) for i in range(max(copies, 8))], replays)


def worst_error(inputs: Inputs, attention: Attention, causal: bool = False) -> float:
    """Largest relative error over a few sequences, on the last cache; NaN if an output was not written."""
    keys, values = inputs.keys[-1], inputs.values[-1]
    # Freed at once, so that the output is likely to get this memory.
    poison = torch.full_like(inputs.query, float("nan"))
    del poison
    output = attention(keys, values)
    batch, rows, worst = inputs.batch, inputs.case.rows, 0.0
    if not bool(output.isfinite().all()):
        return float("nan")
    for b in random.sample(range(inputs.case.batch), min(3, inputs.case.batch)):
        slots = sequence_slots(batch, b).to(DEVICE)
        mask = sequence_mask(batch, b, inputs.variant).to(DEVICE)
        if causal:
            mask[:, batch.prefix_lengths[b] :] = ancestor_mask(None, rows).to(DEVICE)
        own = slice(b * rows, (b + 1) * rows)
        seen = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
        expected = attend(inputs.query[own], *seen, mask, inputs.scale, inputs.variant)
        worst = max(worst, float((output[own].float() - expected).norm() / expected.norm()))
    return worst


def measure(inputs: Inputs, attention: Attention, causal: bool = False) -> dict[str, float]:
    """Error, and median and spread of the time; a wrong result is not timed."""
    error = worst_error(inputs, attention, causal)
    if not error < TOLERANCE:
        return {"error": error}
    median, spread = time_us(inputs, attention)
    return {"us": median, "spread_us": spread, "error": error}
