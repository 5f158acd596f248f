"""Time of a decoder layer's linear launches on one GPU, with what is fused into them, beside cuBLAS's products alone.

Each is a captured chain of launches over weights that do not fit the L2 cache together, so programmatic dependent
launch counts as it does in a step. Run it from the repository's root:

    PYTHONPATH=kernels:protos:clients:. python -m benchmarks.kernels.linear [--sweep] [--eight-bits] --json FILE

With `--eight-bits` our weights are in eight bits, as those of a draft head are, and the floor is theirs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.shared.gpu_timing import captured_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, write_json
from tree_kernels.linear import HeadRows, Norm, ScaledRows, ScaledWeight, Weight
from tree_kernels.linear.triton_backend import TritonLinears
from tree_kernels.linear.triton_tiling import LinearTiling, choose_linear_tiling

BYTES_PER_US = 4.3e6
ROTATED_BYTES = 2.4e8
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Layer:
    """One linear layer of a shape: its weight is [outputs, inner]."""

    name: str
    kind: str
    outputs: int
    inner: int
    width: int = 128
    kv_heads: int = 8


LAYERS = (
    Layer("8b qkv", "rotary", 6144, 4096),
    Layer("8b o", "add", 4096, 4096),
    Layer("8b gate_up", "gated", 28672, 4096),
    Layer("8b down", "add", 4096, 14336),
    Layer("8b lm_head", "plain", 128256, 4096),
    # Of an EAGLE-3 head for an 8B model; the others are as above.
    Layer("head qkv", "rotary", 6144, 8192),
    Layer("head lm_head", "plain", 32000, 4096),
    Layer("smollm2 qkv", "rotary", 960, 576, 64, 3),
    Layer("smollm2 o", "add", 576, 576),
    Layer("smollm2 gate_up", "gated", 3072, 576),
    Layer("smollm2 down", "add", 576, 1536),
    Layer("smollm2 lm_head", "plain", 49152, 576),
)


def tilings(layer: Layer, rows: int, weight_bytes: int = 2) -> Iterator[LinearTiling]:
    """What `--sweep` tries."""
    block_rows = choose_linear_tiling(rows, layer.outputs, layer.inner).block_rows
    splits: tuple[int, ...] = (1, 2)
    outputs: tuple[int, ...] = (32, 64, 128, 256)
    if weight_bytes == 1:
        blocks: tuple[tuple[int, int], ...] = ((128, 4), (128, 6), (256, 3), (256, 4))
        outputs, splits = (64, 128), (1, 2, 4)
    elif layer.inner < 2048:
        blocks = ((64, 5), (64, 9), (128, 5), (256, 3), (512, 3))
        outputs, splits = (16, 32, 64), (1, 3)
    else:
        blocks = ((64, 4), (64, 6), (64, 8), (128, 3), (128, 4), (128, 6), (256, 3), (256, 5))
    warps = (4, 8) if layer.inner >= 2048 else (2 if rows < 64 else 4,)
    for some, parts, (inner, stages), group in itertools.product(outputs, splits, blocks, warps):
        programs = -(-layer.outputs // some) * parts
        held = (block_rows * 2 + some * weight_bytes) * inner * stages
        # What is on its way has to fill a processor's share of the memory's latency, and has to fit.
        fits = held <= 227_000 and (
            layer.inner < 2048 or held * programs >= 8e6 or (weight_bytes == 1 and held * programs >= 4e6)
        )
        whole = layer.inner % (parts * (inner if parts > 1 else 1)) == 0
        # Two groups of four warps each need a tile of their own, and parts enough programs of few.
        wide = (group == 4 or some >= 128) and (parts == 1 or layer.outputs < 8192)
        few = programs <= (900 if layer.inner > 2048 or parts == 1 else 132)
        if fits and whole and few and wide and (some <= layer.width or layer.kind != "rotary"):
            yield LinearTiling(block_rows, some, inner, parts, group, stages, 8)


class Chain:
    """Launches of one layer, one after the other, over different weights."""

    def __init__(self, layer: Layer, rows: int, eight_bits: bool, most: int = 200) -> None:
        torch.manual_seed(0)
        self.layer, self.rows = layer, rows
        weight_bytes = 1 if eight_bits else 2
        count = min(most, max(4, round(ROTATED_BYTES / (weight_bytes * layer.outputs * layer.inner))))
        self.plain = [self._random(layer.outputs, layer.inner) * layer.inner**-0.5 for _ in range(count)]
        self.weights: list[Weight] = list(self.plain)
        if eight_bits:
            self.weights = [ScaledWeight.of(weight) for weight in self.plain]
        self.input = self._random(rows, layer.inner)
        self.residual = self._random(rows, layer.outputs)
        self.norm = Norm(self._random(layer.outputs), 1e-5)
        self.scaled = ScaledRows(self.input, self._random(rows, 128).square().float(), 1e-5)
        keys, values = (self._random(rows, 1, layer.kv_heads, layer.width) for _ in range(2))
        cosines, sines = (self._random(rows, layer.width) for _ in range(2))
        self.heads = HeadRows(cosines, sines, torch.arange(rows, dtype=torch.int32, device="cuda"), keys, values)

    @staticmethod
    def _random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def launch(self, weight: Weight, linears: TritonLinears) -> None:
        kind = self.layer.kind
        if kind == "rotary":
            linears.rotary_linear(self.scaled, weight, None, self.heads)
        elif kind == "gated":
            linears.gated_linear(self.scaled, weight)
        elif kind == "add":
            linears.add_linear(self.input, weight, None, self.residual, self.norm)
        else:
            linears.add_linear(self.input, weight)

    def time(self, launch: Callable[[Any], Any], weights: Sequence[Weight]) -> dict[str, float]:
        """Microseconds of one launch: median over replays of the chain, and the quartiles' distance."""
        median, spread = captured_us([partial(launch, weight) for weight in weights])
        return {"us": median, "spread": spread}


def compile_some(work: list[tuple[Layer, int, LinearTiling]], eight_bits: bool) -> None:
    """Fill Triton's cache on the disk."""
    chains: dict[tuple[Layer, int], Chain] = {}
    for layer, rows, tiling in work:
        chain = chains.get((layer, rows))
        if chain is None:
            chains = {(layer, rows): (chain := Chain(layer, rows, eight_bits, most=1))}
            chain.weights = chain.weights[:1]
        try:
            chain.launch(chain.weights[0], TritonLinears(DEVICE, tiling=tiling))
        except (OutOfResources, PTXASError):
            continue


def compile_all(work: list[tuple[Layer, int, LinearTiling]], eight_bits: bool) -> None:
    processes = max(1, (os.cpu_count() or 4) - 2)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(partial(compile_some, eight_bits=eight_bits), [work[index::processes] for index in range(processes)])


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def measure(layer: Layer, rows: int, tried: list[LinearTiling], eight_bits: bool) -> dict[str, Any]:
    chain = Chain(layer, rows, eight_bits)
    floor = ((1 if eight_bits else 2) * layer.outputs * layer.inner) / BYTES_PER_US
    result: dict[str, Any] = {"layer": layer.name, "rows": rows, "floor_us": floor, "tilings": []}
    result["cublas"] = chain.time(lambda weight: functional.linear(chain.input, weight), chain.plain)
    chosen = TritonLinears(DEVICE)
    result["ours"] = chain.time(lambda weight: chain.launch(weight, chosen), chain.weights)
    for tiling in tried:
        linears = TritonLinears(DEVICE, tiling=tiling)
        try:
            found = chain.time(partial(chain.launch, linears=linears), chain.weights)
        except (OutOfResources, PTXASError):
            continue
        result["tilings"].append({**asdict(tiling), **found})
    result["tilings"].sort(key=lambda one: one["us"])
    ours, cublas = result["ours"]["us"], result["cublas"]["us"]
    say(f"{layer.name:16s} rows {rows:3d} floor {floor:7.2f} cuBLAS {cublas:7.2f} ours {ours:7.2f} us")
    for one in result["tilings"][:5]:
        sizes = " ".join(
            str(one[name]) for name in ("block_outputs", "block_inner", "splits", "stages", "warps", "ahead")
        )
        say(f"    {one['us']:7.2f} ± {one['spread']:.2f}  outputs, inner, splits, stages, warps, ahead: {sizes}")
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--layers", nargs="+", default=[layer.name for layer in LAYERS])
    parser.add_argument("--sweep", action="store_true", help="also try other tilings")
    parser.add_argument("--eight-bits", action="store_true", help="of our weights, which are bfloat16 without it")
    arguments = parser.parse_args()
    layers = [layer for layer in LAYERS if layer.name in arguments.layers]
    points = list(itertools.product(layers, arguments.rows))
    eight_bits = arguments.eight_bits
    weight_bytes = 1 if eight_bits else 2
    tried = {point: list(tilings(*point, weight_bytes)) if arguments.sweep else [] for point in points}
    compile_all([(*point, tiling) for point, some in tried.items() for tiling in some], eight_bits)
    results = [measure(*point, tried[point], eight_bits) for point in points]
    write_json(arguments.json, {"machine": describe(), "eight_bits": eight_bits, "results": results})


if __name__ == "__main__":
    main()
