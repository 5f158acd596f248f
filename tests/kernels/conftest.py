"""Random ragged batches over a shuffled paged cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tree_kernels.attention import AttentionBatch


@dataclass(frozen=True)
class Case:
    """Inputs of one attention call; slots that no sequence owns hold NaN, so that reading one shows."""

    batch: AttentionBatch
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scale: float


# One sequence of a batch: keys before the tail, rows of the tail, and what the tail is.
Spec = tuple[int, int, str]


def parents_of(kind: str, rows: int, rng: random.Random) -> tuple[int, ...] | None:
    if kind == "causal":
        return None
    if kind == "chain":
        return tuple(max(i - 1, 0) for i in range(rows))
    if kind == "star":
        return (0,) * rows
    return tuple(rng.randrange(i) if i else 0 for i in range(rows))


def make_case(
    specs: list[Spec],
    *,
    page_size: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    width: int = 64,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    shuffled: bool = True,
    spare_pages: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(prefix + rows) // page_size) + spare_pages for prefix, rows, _ in specs]
    total = sum(needed) + 2
    order = list(range(total))
    if shuffled:
        rng.shuffle(order)
    pages = tuple(tuple(order[sum(needed[:b]) :][: needed[b]]) for b in range(len(specs)))
    starts = tuple(sum(rows for _, rows, _ in specs[:b]) for b in range(len(specs) + 1))
    batch = AttentionBatch(
        query_starts=starts,
        prefix_lengths=tuple(prefix for prefix, _, _ in specs),
        pages=pages,
        page_size=page_size,
        parents=tuple(parents_of(kind, rows, rng) for _, rows, kind in specs),
    )
    caches = []
    for head_width in (width, value_width or width):
        cache = torch.full((total, page_size, kv_heads, head_width), float("nan"))
        flat = cache.flatten(0, 1)
        for b, (prefix, rows, _) in enumerate(specs):
            keys = torch.arange(prefix + rows)
            slots = torch.tensor(pages[b], dtype=torch.int64)[keys // page_size] * page_size + keys % page_size
            flat[slots] = torch.randn(len(keys), kv_heads, head_width, generator=generator)
        caches.append(cache.to(device=device, dtype=dtype))
    query = torch.randn(starts[-1], kv_heads * group, width, generator=generator).to(device=device, dtype=dtype)
    return Case(batch, query, caches[0], caches[1], width**-0.5)


CaseMaker = Callable[..., Case]


@pytest.fixture(scope="session")
def attention_case() -> CaseMaker:
    return make_case
