"""Levels of random trees in the tails of sequences, and what attends there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tree_kernels.attention import PLAIN, AttentionVariant
from tree_kernels.level_attention import TailLevel

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """Trees of one sequence each, None for a sequence without a tail; symbols of `level_attention.dispatch`."""

    prefixes: tuple[int | None, ...]
    levels: int
    width: int
    page_size: int = 16
    kv_heads: int = 2
    group: int = 2
    widths: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    processors: int = 1
    variant: AttentionVariant = PLAIN


CAPPED = AttentionVariant(score_cap=2.0, sinks=torch.ones(4))
CASES = {
    "one part": Case((40, 3), 3, 4),
    "no keys before": Case((0, 0), 2, 1),
    "a sequence without a tail": Case((17, None, 30), 3, 2, page_size=4),
    "parts": Case((130, 7), 3, 4, processors=40),
    "more parts than tiles": Case((33, 90), 2, 8, processors=200, page_size=1),
    "blocks of rows": Case((70,), 3, 16, group=8, kv_heads=1, processors=9),
    "64 rows": Case((100,), 3, 21, kv_heads=1, processors=16),
    "a chain": Case((60, 61), 5, 1, group=1, processors=20),
    "three heads a group, wide values": Case((50,), 3, 3, group=3, widths=(24, 40), processors=12),
    "capped, with sinks": Case((90,), 3, 4, processors=30, variant=CAPPED),
    "half precision": Case((90,), 3, 4, dtype=torch.float16, processors=10),
}


def levels_of(case: Case, device: torch.device) -> Iterator[TailLevel]:
    """The root, and every level below that is expanded."""
    rng, tail = random.Random(len(case.prefixes) * 100 + case.width), 1 + case.levels * case.width
    parents, starts, pages, page_starts = list[list[int]](), [0], list[int](), list[int]()
    held = sum(-(-((prefix or 0) + tail) // case.page_size) for prefix in case.prefixes)
    free = rng.sample(range(held + 3), held)
    for prefix in case.prefixes:
        # Some places of a level are not taken: their parent is the root.
        own = [0] * (1 + case.width)
        for row in range(1 + case.width, tail):
            above = 1 + ((row - 1) // case.width - 1) * case.width
            own.append(rng.choice([0, *range(above, above + case.width)]))
        parents.append(own)
        starts.append(starts[-1] + (0 if prefix is None else tail))
        page_starts.append(len(pages))
        if prefix is not None:
            pages += [free.pop() for _ in range(-(-(prefix + tail) // case.page_size))]

    def on_device(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    common = starts, [prefix or 0 for prefix in case.prefixes], page_starts, [*pages, 0], parents
    tensors = [on_device(values) for values in common]
    yield TailLevel(*tensors, 0, 1, 0)
    for level in range(case.levels):
        first = 1 + level * case.width
        yield TailLevel(*tensors, first, first + case.width, level + 1)


def inputs_of(case: Case, level: TailLevel, device: torch.device) -> tuple[Tensor, Tensor, Tensor, float, Any]:
    """Query, caches, scale and variant; keys behind those of the level are NaN."""
    generator = torch.Generator().manual_seed(level.first)
    rows, pages = len(case.prefixes) * (level.end - level.first), int(level.page_table.max()) + 1
    query = torch.randn(rows, case.kv_heads * case.group, case.widths[0], generator=generator)
    shape = pages, case.page_size, case.kv_heads
    keys, values = (torch.randn(*shape, width, generator=generator) for width in case.widths)
    for b, prefix in enumerate(case.prefixes):
        if prefix is not None:
            of_tail = torch.arange(prefix + level.end, prefix + level.parents.shape[1])
            page = level.page_table[level.page_starts[b] + of_tail.to(device) // case.page_size].long().cpu()
            keys[page, of_tail % case.page_size] = values[page, of_tail % case.page_size] = float("nan")
    sinks = None if case.variant.sinks is None else case.variant.sinks.to(device)
    variant = AttentionVariant(score_cap=case.variant.score_cap, sinks=sinks)
    query, keys, values = (one.to(device, case.dtype) for one in (query, keys, values))
    return query, keys, values, SCALE, variant
