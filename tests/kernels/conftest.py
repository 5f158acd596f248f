"""Random ragged batches over a shuffled paged cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tree_kernels.attention import PLAIN, AttentionBatch, AttentionVariant
from tree_kernels.latent_attention import HeadProjections, absorbed_queries, attend_expanded


@dataclass(frozen=True)
class Case:
    """Inputs of one attention call; slots that no sequence owns hold NaN, so that reading one shows."""

    batch: AttentionBatch
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scale: float
    variant: AttentionVariant = PLAIN


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
    window: int | None = None,
    score_cap: float | None = None,
    sinks: bool = False,
    chunked: bool = False,
    slopes: bool = False,
    queries_only: bool = False,
) -> Case:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    counts = [prefix if queries_only else prefix + rows for prefix, rows, _ in specs]
    needed = [-(-count // page_size) + spare_pages for count in counts]
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
        queries_only=queries_only,
    )
    caches = []
    for head_width in (width, value_width or width):
        cache = torch.full((total, page_size, kv_heads, head_width), float("nan"))
        flat = cache.flatten(0, 1)
        for b, (prefix, _, _) in enumerate(specs):
            keys = torch.arange(counts[b])
            slots = torch.tensor(pages[b], dtype=torch.int64)[keys // page_size] * page_size + keys % page_size
            flat[slots] = torch.randn(len(keys), kv_heads, head_width, generator=generator)
            # What no window reaches is as good as nobody's.
            flat[slots[: AttentionVariant(window, chunked=chunked).first_key(prefix)]] = float("nan")
        caches.append(cache.to(device=device, dtype=dtype))
    query = torch.randn(starts[-1], kv_heads * group, width, generator=generator).to(device=device, dtype=dtype)
    logits = torch.randn(kv_heads * group, generator=generator).to(device) if sinks else None
    falling = 2.0 ** -torch.arange(1.0, kv_heads * group + 1, device=device) if slopes else None
    variant = AttentionVariant(window, score_cap, logits, chunked, falling)
    return Case(batch, query, *caches, width**-0.5, variant)


CaseMaker = Callable[..., Case]


@pytest.fixture(scope="session")
def attention_case() -> CaseMaker:
    return make_case


@dataclass(frozen=True)
class LatentCase:
    """One layer's inputs; slots that no sequence owns hold NaN, so that reading one shows."""

    batch: AttentionBatch
    # [R, H, N] and [R, H, P].
    plain: Tensor
    rotary: Tensor
    # [pages, page_size, L + P].
    cache: Tensor
    projections: HeadProjections
    latent: int
    scale: float

    @property
    def query(self) -> Tensor:
        return absorbed_queries(self.plain, self.rotary, self.projections)

    def expanded(self) -> Tensor:
        """[R, H, V] in fp32 by the definition."""
        return attend_expanded(self.plain, self.rotary, self.cache, self.projections, self.batch, self.scale)


def make_latent_case(
    specs: list[Spec],
    *,
    heads: int = 4,
    latent: int = 32,
    rotary: int = 16,
    plain: int = 24,
    value: int = 20,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shuffled: bool = True,
    spare_pages: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LatentCase:
    case = make_case(
        specs,
        page_size=page_size,
        kv_heads=1,
        group=heads,
        width=latent + rotary,
        dtype=dtype,
        shuffled=shuffled,
        spare_pages=spare_pages,
        device=device,
        seed=seed,
    )
    generator = torch.Generator().manual_seed(seed + 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    # So that keys and values of a head are as large as a latent.
    weight = random(heads * (plain + value), latent) / latent**0.5
    rows = case.batch.rows
    return LatentCase(
        case.batch,
        random(rows, heads, plain),
        random(rows, heads, rotary),
        case.key_cache.squeeze(2),
        HeadProjections.of(weight, heads, plain),
        latent,
        (plain + rotary) ** -0.5,
    )


LatentCaseMaker = Callable[..., LatentCase]


@pytest.fixture(scope="session")
def latent_case() -> LatentCaseMaker:
    return make_latent_case
