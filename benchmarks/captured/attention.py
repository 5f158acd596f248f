"""Attention as captured steps have it, on one GPU: microseconds of one layer in every tiling that may be chosen, over
sequences, rows of each, and contexts; or of steps whose sequences have pages in common, read once and read by each.

    python -m benchmarks.captured.attention
        [--common] [--groups 1,4] [--heads 32] [--kv-heads 8] [--width 128] [--contexts 400,1200] [--seconds 240]
        [--json FILE]

Rows are random trees in bf16 over shuffled pages of 16 tokens. Each tiling's first output is compared with PyTorch's
backend; times are medians over replays of CUDA graphs of launches over caches in turn.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.shared.gpu_timing import captured_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import comma_separated, parser_of, show, write_json
from target_service.model.cuda_graphs.sizes import Bucket, capacity, padded
from tree_kernels.attention import AttentionBatch, TreeAttention, plan_integers
from tree_kernels.attention.triton_backend import TritonAttention
from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.attention.triton_tiling import SPECIALISED, Tiling

DEVICE = torch.device("cuda")
PAGE_SIZE = 16
# Caches that launches take turns at.
_COPIES = 4
# Tokens of each cache at most, and of a sequence.
_TOKENS, _LONGEST = 1_056_000, 16_000
_TOLERANCE = 1e-2
# (sequences, rows of each).
_STEPS = (
    *((1, rows) for rows in (1, 8, 16, 64, 128)),
    (2, 16),
    *((4, rows) for rows in (1, 4, 8, 16, 32)),
    *((8, rows) for rows in (1, 4, 8, 16, 24)),
    *((16, rows) for rows in (1, 4, 8, 12, 16)),
    *((24, rows) for rows in (4, 8)),
    *((32, rows) for rows in (1, 4, 8)),
    (48, 4),
    *((64, rows) for rows in (1, 4, 6)),
    (128, 2),
)
# (sequences, rows of each, sequences of the captured size, groups), and keys that each group has in common.
_COMMON_STEPS = (
    *((8, 16, 64, 1), (16, 8, 64, 1), (32, 4, 64, 1), (32, 8, 64, 1), (64, 1, 64, 1), (64, 4, 64, 1), (128, 2, 256, 1)),
    *((64, 1, 64, 4), (64, 4, 64, 4)),
)
_COMMON_KEYS = (512, 1024, 3072, 8192)
# Keys of each sequence behind those in common.
_OWN_KEYS = 250


class Caches(NamedTuple):
    """What every step of a run reads."""

    keys: Tensor  # [_COPIES, pages, PAGE_SIZE, kv_heads, width]
    values: Tensor
    heads: int

    @classmethod
    def draw(cls, options: argparse.Namespace) -> Caches:
        shape = (_COPIES, _TOKENS // PAGE_SIZE, PAGE_SIZE, options.kv_heads, options.width)
        keys, values = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        return cls(keys, values, options.heads)


def tilings() -> Iterator[Tiling]:
    for warps, stages, merge_rows, per_sm in ((4, 5, 0, 1), (4, 5, 0, 2), (4, 5, 16, 1), (4, 5, 16, 2)):
        yield from (Tiling(rows, 64, warps, stages, per_sm, merge_rows) for rows in (16, 32, 64))
    yield from (Tiling(16, 128, 4, 3, per_sm, merge_rows) for per_sm in (1, 2) for merge_rows in (0, 16))
    yield from (Tiling(rows, 128, 4, 3, 1) for rows in (32, 64))
    yield from (Tiling(128, 64, 8, 4, 1), Tiling(128, 128, 8, 5, 1), SPECIALISED)


def step_of(sequences: int, rows: int, keys: int, common: int = 0, groups: int = 1) -> AttentionBatch:
    """Trees of `rows` rows behind about `keys` keys, of which the first `common` are in the same pages in each of the
    `groups` of as many sequences."""
    rng = random.Random(sequences * rows + keys)
    free = list(range(_TOKENS // PAGE_SIZE))
    rng.shuffle(free)
    shared = [[free.pop() for _ in range(common // PAGE_SIZE)] for _ in range(groups)]
    # Of lengths that differ by less than a tile of keys.
    prefixes = tuple(keys + 13 * b % 60 for b in range(sequences))
    counts = [-(-(prefix + rows) // PAGE_SIZE) - len(shared[0]) for prefix in prefixes]
    pages = tuple((*shared[b * groups // sequences], *(free.pop() for _ in range(n))) for b, n in enumerate(counts))
    trees = tuple((0, *(rng.randrange(max(0, row - 3), row) for row in range(1, rows))) for _ in range(sequences))
    starts = tuple(range(0, sequences * rows + 1, rows))
    return AttentionBatch(starts, prefixes, pages, PAGE_SIZE, trees, (len(shared[0]),) * sequences if common else ())


def measure(caches: Caches, step: AttentionBatch, bucket: Bucket, tiling: Tiling | None = None) -> dict[str, Any]:
    """Error and time of a step in the plan of a captured size; a wrong result is not timed."""
    backend = TritonAttention(DEVICE, TritonSettings(tiling=tiling))
    largest = capacity(bucket, PAGE_SIZE, _LONGEST // PAGE_SIZE)
    integers = torch.zeros(plan_integers(largest), dtype=torch.int32, device=DEVICE)
    plan = backend.plan(largest, integers)
    packed = backend.pack(plan, padded(step, bucket))
    integers[: len(packed)].copy_(torch.frombuffer(packed, dtype=torch.int32))
    width = caches.keys.shape[-1]
    query = torch.randn(bucket.rows, caches.heads, width, device=DEVICE, dtype=torch.bfloat16)

    def run(copy: int) -> Tensor:
        return backend.run(plan, query, caches.keys[copy], caches.values[copy], width**-0.5)

    output = run(0)[: step.rows].float()
    plain = TreeAttention("reference", DEVICE)
    expected = plain.run(plain.plan(step), query[: step.rows], caches.keys[0], caches.values[0], width**-0.5).float()
    error = float((output - expected).norm() / expected.norm())
    found: dict[str, Any] = {"error": error}
    if error < _TOLERANCE:
        us, spread = captured_us([lambda copy=copy: run(copy) for copy in list(range(_COPIES)) * 2], 7)  # type: ignore[misc]
        found |= {"us": us, "spread_us": spread}
    plans = [plan] if plan.parts is None else list(plan.parts)
    return found | {"tilings": [asdict(layout.tiling) for one in plans for layout in one.schedules]}


def tiled(caches: Caches, sequences: int, rows: int, context: int) -> dict[str, Any]:
    """A step in the tiling that is chosen, and in those whose blocks its rows fill by a quarter to twice."""
    step, bucket = step_of(sequences, rows, context), Bucket(sequences * rows, sequences)
    packed = max(16, triton.next_power_of_2(rows * caches.heads // caches.keys.shape[-2]))
    tried = []
    for tiling in tilings():
        if packed // 4 <= tiling.block_rows <= 2 * packed:
            try:
                tried.append(measure(caches, step, bucket, tiling))
            except triton.runtime.errors.OutOfResources:
                continue
    return {"chosen": measure(caches, step, bucket), "tried": tried}


def in_parts(caches: Caches, sequences: int, rows: int, common: int, room: int, groups: int) -> dict[str, Any]:
    step, size = step_of(sequences, rows, common + _OWN_KEYS, common, groups), max(16, sequences * rows)
    return {
        "groups": groups,
        "by_each": measure(caches, replace(step, common_pages=()), Bucket(size, min(size, room))),
        "once": measure(caches, step, Bucket(size, min(size, room), common=True)),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--common", action="store_true", help="steps whose sequences have pages in common")
    parser.add_argument("--groups", type=comma_separated(int), default=[1, 4], help="those in so many groups")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--contexts", type=comma_separated(int), default=[400, 1200])
    parser.add_argument("--seconds", type=float, default=240.0, help="start no step after this time")
    options = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    caches = Caches.draw(options)
    rows: list[dict[str, Any]] = []
    common = [step for step in _COMMON_STEPS if step[-1] in options.groups]
    steps: Iterator[Any] = product(_COMMON_KEYS, common) if options.common else product(options.contexts, _STEPS)
    for keys, (sequences, each, *room) in steps:
        if time.monotonic() - started > options.seconds:
            show("the rest was not started in time")
            break
        if options.common:
            found = in_parts(caches, sequences, each, keys, *room)
            figures = [found["by_each"].get("us"), found["once"].get("us")]
        else:
            found = tiled(caches, sequences, each, keys)
            figures = [found["chosen"].get("us"), min(one["us"] for one in found["tried"] if "us" in one)]
        rows.append({"sequences": sequences, "rows": each, "keys": keys, **found})
        of = f"{sequences} x {each}" + (f" in {room[1]} groups" if options.common else "")
        show(f"{of}, {keys} keys: " + ", ".join(f"{us or float('nan'):.1f}" for us in figures) + " us")
    write_json(options.json, {"machine": describe(), "options": vars(options), "steps": rows})
    return int(any("us" not in one for row in rows for one in row.values() if isinstance(one, dict)))


if __name__ == "__main__":
    sys.exit(main())
