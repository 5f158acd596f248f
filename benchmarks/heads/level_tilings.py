"""Tilings of the int8 products of a head's levels, on one GPU: what reading a pass and growing trees behind it takes
with each of them, the rest as chosen.

    python -m benchmarks.heads.level_tilings --json FILE
    python -m benchmarks.heads.level_tilings --passes 32x1:1 --products qkv down

A product alone, in a chain of launches over other weights, finds other tilings the fastest than the levels do, whose
launches prefetch beside one another. Processes compile all of them first; then one process times them. Results are not
compared with anything here: `benchmarks.kernels.linear --int8` does that.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.heads.pass_drafting import DraftedPasses, milliseconds
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from draft_service.neural.cuda_graphs.pass_drafter import shape_for
from target_service.model.cuda_graphs.sizes import Bucket
from tree_kernels.linear import triton_backend
from tree_kernels.linear.triton_tiling import LinearTiling, choose_linear_tiling

# Rows and sequences of captured passes, and how many of these are under way.
PASSES = ("32x1:1", "128x16:8", "256x64:32")
# Outputs and numbers of each, in a head for an 8B model with a draft vocabulary of 32,000.
PRODUCTS = {"qkv": (6144, 8192), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
            "lm_head": (32000, 4096)}  # fmt: skip
# Outputs, inner, splits, warps, stages, ahead.
Sizes = tuple[int, int, int, int, int, int]
# Bytes of a processor's shared memory, on Hopper.
_SHARED_BYTES = 227_000
# Times that a growth is recorded anew, of which the fastest counts.
_RECORDED = 3


def sizes_of(outputs: int, inner: int) -> Iterator[Sizes]:
    """Those to try: programs for every processor of an H200, and no more than fit on one at a time eight times over."""
    blocks = ((128, 6), (256, 3), (256, 4), (256, 6), (512, 3))
    for block, splits, (step, stages), ahead in itertools.product((32, 64, 128), (1, 2, 4, 8), blocks, (8, 16)):
        # Rows are at most 64, in 16 bits.
        staged = (64 * 2 + block) * step * stages
        if 128 <= outputs // block * splits <= 1024 and inner % (splits * step) == 0 and staged <= _SHARED_BYTES:
            yield block, step, splits, 4, stages, ahead


@contextmanager
def tiled_as(product: tuple[int, int], sizes: Sizes) -> Iterator[None]:
    """Have int8 products of so many outputs and numbers tiled so, whatever their rows."""

    def choose(rows: int, outputs: int, inner: int, *, int8: bool = False, **others: bool) -> LinearTiling:
        chosen = choose_linear_tiling(rows, outputs, inner, int8=int8, **others)
        tried = int8 and (outputs, inner) == product
        return LinearTiling(chosen.block_rows, *sizes) if tried else chosen

    with patch.object(triton_backend, "choose_linear_tiling", choose):
        yield


class Levels:
    """Growths behind captured passes of a target of one layer."""

    def __init__(self, passes: Mapping[str, tuple[int, int, int]]) -> None:
        self._passes = passes
        self._drafted = DraftedPasses(1, {Bucket(rows, room) for rows, room, _ in passes.values()})
        # Recorded graphs share their memory as long as one of them is there.
        self._kept: list[Callable[[], None]] = []

    def levels(self, name: str) -> int:
        """Of a tree behind a pass."""
        return shape_for(self._drafted.tree, self._passes[name][2]).num_steps

    def record(self, name: str) -> Callable[[], None]:
        """What follows a pass."""
        rows, room, sequences = self._passes[name]
        done = self._drafted.runner._empty(self._drafted.runner._captured[Bucket(rows, room)])
        self._kept.append(self._drafted.replay_of(done, sequences, grows=True))
        return self._kept[-1]

    def milliseconds(self, name: str) -> float:
        """Of what follows a pass, the least of some recordings."""
        return min(milliseconds(self.record(name)) for _ in range(_RECORDED))


def compile_some(work: list[tuple[str, Sizes]], passes: Mapping[str, tuple[int, int, int]]) -> None:
    """Compile the growths of tilings into Triton's cache on disk."""
    with torch.inference_mode():
        levels = Levels(passes)
        for product, sizes in work:
            with tiled_as(PRODUCTS[product], sizes):
                for name in passes:
                    try:
                        levels.record(name)
                    except (OutOfResources, PTXASError):
                        break


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--passes", nargs="+", default=PASSES, help="ROWSxSEQUENCES:UNDER_WAY of captured passes")
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    arguments = parser.parse_args()
    passes: dict[str, tuple[int, int, int]] = {}
    for name in arguments.passes:
        rows, room, sequences = map(int, name.replace("x", ":").split(":"))
        passes[name] = rows, room, sequences
    work = [(product, sizes) for product in arguments.products for sizes in sizes_of(*PRODUCTS[product])]
    with torch.inference_mode():
        # First by itself, so that the others find what they have in common.
        levels = Levels(passes)
        for name in passes:
            levels.record(name)
        count = max(1, (os.cpu_count() or 4) - 2)
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            pool.map(partial(compile_some, passes=passes), [work[index::count] for index in range(count)])
        results: list[dict[str, Any]] = []
        for name in passes:
            chosen = levels.milliseconds(name)
            show(f"{name}: {chosen:.3f} ms, {levels.levels(name)} levels")
            tried = []
            for product, sizes in work:
                with tiled_as(PRODUCTS[product], sizes):
                    try:
                        took = levels.milliseconds(name)
                    except (OutOfResources, PTXASError):
                        continue
                tried.append({"product": product, "sizes": sizes, "us_more": round(1e3 * (took - chosen), 1)})
            tried.sort(key=lambda one: one["us_more"])
            for product in arguments.products:
                best = [(one["us_more"], one["sizes"]) for one in tried if one["product"] == product]
                show(f"    {product}: {best[:4]}")
            results.append({"pass": name, "levels": levels.levels(name), "chosen_ms": chosen, "tried": tried})
            write_json(arguments.json, {"machine": describe(), "results": results})


if __name__ == "__main__":
    main()
