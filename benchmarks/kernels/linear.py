"""Time of a decoder layer's fused linear launches on one GPU, beside cuBLAS's products alone.

Each is a captured chain of launches over weights that do not fit the L2 cache together, so programmatic dependent
launch has the effect that it has in a step.

    python -m benchmarks.kernels.linear [--sweep] [--int8] --json FILE

Every layer is first compared with its definition in fp32. Ours of more than 64 rows are cuBLAS's products with what
follows them, but for gate and up.

With `--int8` our weights are in int8, as in draft heads, and the floor is computed for them.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.shared.gpu_timing import captured_us, copied_bytes_per_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from tree_kernels.linear import HeadForm, HeadRows, Int8Weight, Norm, RowLinears, ScaledRows, Weight
from tree_kernels.linear.cublas_backend import CublasLinears
from tree_kernels.linear.triton_backend import TritonLinears
from tree_kernels.linear.triton_tiling import (
    MAX_BLOCK_ROWS,
    MIN_INNER,
    LinearTiling,
    VectorTiling,
    choose_linear_tiling,
)
from tree_kernels.linear.vector_backend import VectorLinears

# Relative error in bf16: one rounding, and sums in another order.
TOLERANCE = 1e-2
ROTATED_BYTES = 2.4e8
# Rows that one tile holds at most, read by tensor maps.
_MAPPED_ROWS = 128
# Of one program, on Hopper.
SHARED_BYTES = 227_000
# For each byte of a weight's number: the least that a launch must have in flight, or the memory idles. Memory of
# an H200, 4.3 MB a microsecond, delivers so much in its latency, about a microsecond; for bfloat16 it is twice as much.
LATENCY_BYTES = 4e6
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer of a shape: its weight is [outputs, inner]."""

    name: str
    kind: str
    outputs: int
    inner: int
    width: int = 128
    kv_heads: int = 8
    # RMSNorms of each head, as Qwen3 has them.
    normed: bool = False


LAYERS = (
    LinearLayer("8b qkv", "rotary", 6144, 4096),
    LinearLayer("8b o", "add", 4096, 4096),
    LinearLayer("8b gate_up", "gated", 28672, 4096),
    LinearLayer("8b down", "add", 4096, 14336),
    LinearLayer("8b lm_head", "plain", 128256, 4096),
    # Of one of two ranks, whose sums have the residual and the norm.
    LinearLayer("half 8b qkv", "rotary", 3072, 4096, kv_heads=4),
    LinearLayer("half 8b o", "plain", 4096, 2048),
    LinearLayer("half 8b gate_up", "gated", 14336, 4096),
    LinearLayer("half 8b down", "plain", 4096, 7168),
    LinearLayer("half 70b qkv", "rotary", 5120, 8192, kv_heads=4),
    LinearLayer("half 70b o", "plain", 8192, 4096),
    LinearLayer("half 70b gate_up", "gated", 28672, 8192),
    LinearLayer("half 70b down", "plain", 8192, 14336),
    LinearLayer("qwen3 8b qkv", "rotary", 6144, 4096, normed=True),
    LinearLayer("qwen3 8b gate_up", "gated", 24576, 4096),
    LinearLayer("qwen3 8b down", "add", 4096, 12288),
    LinearLayer("qwen3 8b lm_head", "plain", 151936, 4096),
    LinearLayer("qwen3.5 9b qkv", "rotary", 6144, 4096, width=256, kv_heads=4, normed=True),
    # Of a gated delta net: its heads and gate, and the gates of tokens.
    LinearLayer("qwen3.5 9b states", "plain", 12288, 4096),
    LinearLayer("qwen3.5 9b gates", "plain", 64, 4096),
    LinearLayer("qwen3 30b-a3b qkv", "rotary", 5120, 2048, kv_heads=4, normed=True),
    LinearLayer("qwen3 30b-a3b o", "add", 2048, 4096),
    LinearLayer("qwen3 30b-a3b lm_head", "plain", 151936, 2048),
    # Of an EAGLE-3 head for an 8B model; its other layers have the shapes above.
    LinearLayer("head qkv", "rotary", 6144, 8192),
    LinearLayer("head lm_head", "plain", 32000, 4096),
    LinearLayer("smollm2 qkv", "rotary", 960, 576, 64, 3),
    LinearLayer("smollm2 o", "add", 576, 576),
    LinearLayer("smollm2 gate_up", "gated", 3072, 576),
    LinearLayer("smollm2 down", "add", 576, 1536),
    LinearLayer("smollm2 lm_head", "plain", 49152, 576),
)


# Of a product through matrix units, or of one row's through registers.
Tiling = LinearTiling | VectorTiling


def linears_of(tiling: Tiling) -> TritonLinears:
    if isinstance(tiling, VectorTiling):
        return VectorLinears(DEVICE, vectors=tiling)
    return TritonLinears(DEVICE, tiling=tiling)


def vector_tilings(layer: LinearLayer) -> Iterator[VectorTiling]:
    """Tilings of one row for `--sweep`."""
    for outputs, chunks, warps in itertools.product((1, 2, 4, 8), (1, 2, 4), (2, 4, 8)):
        tiling = VectorTiling(outputs, chunks, warps)
        # Loads of 16 bytes that a thread has in flight: each takes four registers.
        loads = outputs * chunks * (2 if layer.kind == "gated" else 1)
        if 4 <= loads <= 16 and chunks * tiling.block_inner <= layer.inner:
            yield tiling


def tilings(layer: LinearLayer, rows: int, weight_bytes: int = 2) -> Iterator[Tiling]:
    """Tilings for `--sweep`."""
    if rows == 1 and weight_bytes == 2 and layer.inner >= MIN_INNER:
        yield from vector_tilings(layer)
        return
    block_rows = choose_linear_tiling(rows, layer.outputs, layer.inner).block_rows
    outputs: tuple[int, ...] = (32, 64, 128, 256)
    splits: tuple[int, ...] = (1, 2)
    # `block_inner` and `stages`.
    blocks: tuple[tuple[int, int], ...] = (
        (64, 4), (64, 6), (64, 8), (128, 3), (128, 4), (128, 6), (256, 3), (256, 5),
    )  # fmt: skip
    if weight_bytes == 1:
        outputs, splits, blocks = (64, 128), (1, 2, 4), ((128, 4), (128, 6), (256, 3), (256, 4))
    elif layer.normed:
        # A tile is a head.
        outputs, splits = (layer.width,), (1, 2, 4, 8)
        blocks = ((64, 3), (64, 4), (64, 6), (64, 8), (128, 3), (128, 4))
    elif layer.inner < 2048:
        outputs, splits = (16, 32, 64), (1, 3)
        blocks = ((64, 5), (64, 9), (128, 5), (256, 3), (512, 3))
    if 32 < rows <= _MAPPED_ROWS and weight_bytes == 2 and layer.inner >= 2048:
        yield from mapped_tilings(layer, 1 << (rows - 1).bit_length())
        return
    warps = (4, 8) if layer.inner >= 2048 else (2 if rows < 64 else 4,)
    for block_outputs, split, (inner, stages), group in itertools.product(outputs, splits, blocks, warps):
        tiling = LinearTiling(block_rows, block_outputs, inner, split, group, stages, 8)
        if fits(tiling, layer, weight_bytes) and worth_trying(tiling, layer, weight_bytes):
            yield tiling


def mapped_tilings(layer: LinearLayer, block_rows: int) -> Iterator[LinearTiling]:
    """Those that read by tensor maps, for `--sweep`. Half of a block of gate and up is one of either."""
    outputs = {"rotary": (layer.width,), "gated": (128, 256)}.get(layer.kind, (64, 128, 256))
    splits = (1,) if layer.kind == "gated" or layer.outputs >= 8192 else (1, 2, 4)
    # `block_inner` and `stages`.
    blocks = ((64, 3), (64, 4), (64, 6), (128, 3), (128, 4), (256, 2))
    for block_outputs, split, (inner, stages), warps in itertools.product(outputs, splits, blocks, (4, 8)):
        tiling = LinearTiling(block_rows, block_outputs, inner, split, warps, stages, 0, mapped=True)
        # Groups of four warps have 64 outputs each, and no more than 128.
        if fits(tiling, layer, 2) and 16 * warps <= block_outputs <= 32 * warps:
            yield tiling


def staged_bytes(tiling: LinearTiling, weight_bytes: int) -> int:
    """Bytes of one program in shared memory, over all stages."""
    return (tiling.block_rows * 2 + tiling.block_outputs * weight_bytes) * tiling.block_inner * tiling.stages


def fits(tiling: LinearTiling, layer: LinearLayer, weight_bytes: int) -> bool:
    """Whether shared memory holds a program's stages, splits have whole blocks, and a tile is in one head."""
    splits = tiling.splits
    whole = layer.inner % (splits * (tiling.block_inner if splits > 1 else 1)) == 0
    in_one_head = layer.kind != "rotary" or tiling.block_outputs <= layer.width
    if layer.normed and tiling.block_outputs != layer.width:
        return False
    return staged_bytes(tiling, weight_bytes) <= SHARED_BYTES and whole and in_one_head


def worth_trying(tiling: LinearTiling, layer: LinearLayer, weight_bytes: int) -> bool:
    """Whether a tiling may be among the fastest."""
    outputs, splits = tiling.block_outputs, tiling.splits
    programs = -(-layer.outputs // outputs) * splits
    in_flight = staged_bytes(tiling, weight_bytes) * programs
    if layer.inner >= 2048 and in_flight < LATENCY_BYTES * weight_bytes:
        return False
    # Two groups of four warps need half of a tile each.
    if tiling.warps > 4 and outputs < 128:
        return False
    # Splits are for few programs, and should not make many.
    if splits > 1 and not layer.normed and (layer.outputs >= 8192 or (layer.inner <= 2048 and programs > 132)):
        return False
    return programs <= 900 or (layer.inner <= 2048 and splits > 1)


class LinearChain:
    """Launches of one layer, one after the other, over different weights."""

    def __init__(self, layer: LinearLayer, rows: int, int8: bool, most: int = 200) -> None:
        torch.manual_seed(0)
        self.layer, self.rows = layer, rows
        weight_bytes = 1 if int8 else 2
        count = min(most, max(4, round(ROTATED_BYTES / (weight_bytes * layer.outputs * layer.inner))))
        self.plain = [self._random(layer.outputs, layer.inner) * layer.inner**-0.5 for _ in range(count)]
        self.weights: list[Weight] = list(self.plain)
        if int8:
            self.weights = [Int8Weight.of(weight) for weight in self.plain]
        self.input = self._random(rows, layer.inner)
        self.residual = self._random(rows, layer.outputs)
        self.norm = Norm(self._random(layer.outputs), 1e-5)
        # What norms rows whole is before the product where there are many.
        squares = None if rows > MAX_BLOCK_ROWS else self._random(rows, 128).square().float()
        self.scaled = ScaledRows(self.input, squares, 1e-5)
        keys, values = (self._random(rows, 1, layer.kv_heads, layer.width) for _ in range(2))
        cosines, sines = (self._random(rows, layer.width) for _ in range(2))
        self.heads = HeadRows(cosines, sines, torch.arange(rows, dtype=torch.int32, device="cuda"), keys, values)
        head_norm = Norm(self._random(layer.width), 1e-6) if layer.normed else None
        self.form = HeadForm(head_norm, head_norm)

    @staticmethod
    def _random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def launch(self, weight: Weight, linears: RowLinears) -> Tensor:
        kind = self.layer.kind
        if kind == "rotary":
            return linears.rotary_linear(self.scaled, weight, None, self.heads, form=self.form)
        if kind == "gated":
            return linears.gated_linear(self.scaled, weight)
        if kind == "add":
            return linears.add_linear(self.input, weight, None, self.residual, self.norm)[0]
        return linears.add_linear(self.input, weight)[0]

    def error(self, linears: TritonLinears) -> float:
        """Relative, against the definition in fp32; of keys too."""
        found, expected = ([], [])  # type: tuple[list[Tensor], list[Tensor]]
        for results, way in ((found, linears), (expected, RowLinears())):
            output = self.launch(self.weights[0], way)
            results += [output.float().flatten(), self.heads.key_cache.float().flatten()]
        return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))

    def time(self, launch: Callable[[Any], Any], weights: Sequence[Weight]) -> dict[str, float]:
        """Microseconds of one launch: median over replays of the chain, and the distance between the quartiles."""
        median, spread = captured_us([partial(launch, weight) for weight in weights])
        return {"us": median, "spread": spread}


def compile_some(work: list[tuple[LinearLayer, int, Tiling]], int8: bool) -> None:
    """Compile tilings into Triton's cache on disk."""
    chains: dict[tuple[LinearLayer, int], LinearChain] = {}
    for layer, rows, tiling in work:
        chain = chains.get((layer, rows))
        if chain is None:
            chains = {(layer, rows): (chain := LinearChain(layer, rows, int8, most=1))}
        with contextlib.suppress(OutOfResources, PTXASError):
            chain.launch(chain.weights[0], linears_of(tiling))


def compile_all(work: list[tuple[LinearLayer, int, Tiling]], int8: bool) -> None:
    processes = max(1, (os.cpu_count() or 4) - 2)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(partial(compile_some, int8=int8), [work[index::processes] for index in range(processes)])


def measure(layer: LinearLayer, rows: int, tried: list[Tiling], int8: bool, bytes_per_us: float) -> dict[str, Any]:
    chain = LinearChain(layer, rows, int8)
    floor = ((1 if int8 else 2) * layer.outputs * layer.inner) / bytes_per_us
    result: dict[str, Any] = {"layer": layer.name, "rows": rows, "floor_us": floor, "tilings": []}
    result["cublas"] = chain.time(lambda weight: functional.linear(chain.input, weight), chain.plain)
    many = CublasLinears(DEVICE) if rows > MAX_BLOCK_ROWS and not int8 else TritonLinears(DEVICE)
    chosen = VectorLinears(DEVICE) if rows == 1 else many
    if rows == 1:
        by_units = partial(chain.launch, linears=TritonLinears(DEVICE))
        result["matrix_units"] = chain.time(by_units, chain.weights)
    result["error"] = chain.error(chosen)
    if not result["error"] <= TOLERANCE:
        raise ValueError(f"{layer.name} of {rows} rows: an error of {result['error']:.3g}")
    result["ours"] = chain.time(lambda weight: chain.launch(weight, chosen), chain.weights)
    for tiling in tried:
        try:
            found = chain.time(partial(chain.launch, linears=linears_of(tiling)), chain.weights)
        except (OutOfResources, PTXASError):
            continue
        result["tilings"].append({**asdict(tiling), **found})
    result["tilings"].sort(key=lambda one: one["us"])
    ours, cublas = result["ours"]["us"], result["cublas"]["us"]
    units = f", by matrix units {result['matrix_units']['us']:7.2f}" if rows == 1 else ""
    show(f"{layer.name:16s} rows {rows:3d} floor {floor:7.2f} cuBLAS {cublas:7.2f} ours {ours:7.2f} us{units}")
    for one in result["tilings"][:5]:
        sizes = ", ".join(f"{name} {value}" for name, value in one.items() if name not in ("us", "spread"))
        show(f"    {one['us']:7.2f} ± {one['spread']:.2f}  {sizes}")
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--layers", nargs="+", default=[layer.name for layer in LAYERS])
    parser.add_argument("--sweep", action="store_true", help="also try other tilings")
    parser.add_argument("--int8", action="store_true", help="our weights in int8; without it in bfloat16")
    arguments = parser.parse_args()
    layers = [layer for layer in LAYERS if layer.name in arguments.layers]
    points = list(itertools.product(layers, arguments.rows))
    int8: bool = arguments.int8
    weight_bytes = 1 if int8 else 2
    tried = {point: list(tilings(*point, weight_bytes)) if arguments.sweep else [] for point in points}
    compile_all([(*point, tiling) for point, some in tried.items() for tiling in some], int8)
    bytes_per_us = copied_bytes_per_us()
    results = []
    for point in points:
        results.append(measure(*point, tried[point], int8, bytes_per_us))
        document = {"machine": describe(), "bytes_per_us": bytes_per_us, "eight_bits": int8, "results": results}
        write_json(arguments.json, document)


if __name__ == "__main__":
    main()
