"""Time of a mixture of experts on one GPU, by number of rows: the choice of experts, and what they make of the rows,
beside the bytes that must be read and beside torch's own grouped product.

Rows are random and so is the router, so rows choose different experts. Each time is that of a captured chain of
launches over different layers, whose weights do not fit the L2 cache together. Every shape and number of rows is first
compared with the definition in fp32. The floor is the router's weight and those of the experts that were chosen, over
the speed of a large copy.

    python -m benchmarks.kernels.experts --json FILE
    python -m benchmarks.kernels.experts --shapes qwen3-30b-a3b --rows 1 64 --sweep --json FILE

`--rehearse` runs a tiny shape on a CPU (`TRITON_INTERPRET=1`), where only the errors mean something.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.shared.gpu_timing import captured_us, copied_bytes_per_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import markdown_table, parser_of, settings_of, show, write_json
from tree_kernels.experts import Chosen, ExpertWeights, Routing, RowExperts
from tree_kernels.experts.triton_backend import TritonExperts
from tree_kernels.experts.triton_tiling import ExpertTiling, ExpertVectorTilings, choose_expert_tilings
from tree_kernels.linear import Norm, RowLinears, ScaledRows
from tree_kernels.linear.triton_tiling import VectorTiling


@dataclass(frozen=True)
class Shape:
    """Of one layer."""

    hidden: int
    inner: int
    experts: int
    routing: Routing
    corrects: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, Routing(8)),
    "mixtral-8x7b": Shape(4096, 14336, 8, Routing(2)),
    "glm-4.5-air": Shape(4096, 1408, 128, Routing(8, "sigmoid"), corrects=True),
    # Without its biases.
    "gpt-oss-20b": Shape(2880, 2880, 32, Routing(4, rounded=True)),
    "olmoe-1b-7b": Shape(2048, 1024, 64, Routing(8, renormalised=False)),
}
TINY = Shape(64, 48, 16, Routing(4))
# Rows for which tilings of products through registers are swept.
MAX_SWEPT_ROWS = 4
# Weights of all layers of a chain, which an H100 has room for.
CHAIN_BYTES = 24e9
MAX_LAYERS = 16
# Relative error in bf16: roundings of the hidden numbers of experts and of the sum.
TOLERANCE = 2e-2
# Share of choices that may differ from the definition's: near ties.
TIES = 2e-3


class ExpertLayers:
    """Layers of a shape with random weights, and rows for each."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = 3 * shape.experts * shape.inner * shape.hidden * self.dtype.itemsize
        count = min(MAX_LAYERS, max(2, int(CHAIN_BYTES / size))) if device.type == "cuda" else 1
        hidden, inner, experts = shape.hidden, shape.inner, shape.experts
        self.weights = [
            ExpertWeights(
                self._random(experts, 2 * inner, hidden, scale=hidden**-0.5),
                self._random(experts, hidden, inner, scale=inner**-0.5),
            )
            for _ in range(count)
        ]
        self.routers = [self._random(experts, hidden, scale=2 * hidden**-0.5) for _ in range(count)]
        self.correction = self._random(experts, scale=0.1).float() if shape.corrects else None
        self.norm = Norm(self._random(hidden), 1e-6)

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device) * scale

    def load(self, rows: int) -> None:
        """Take so many random rows for each layer, and residuals."""
        self.residual = self._random(rows, self.shape.hidden)
        self.rows = [RowLinears().scale_rows(self._random(rows, self.shape.hidden), self.norm) for _ in self.weights]

    def route(self, experts: RowExperts, layer: int) -> Chosen:
        return experts.route(self.rows[layer], self.routers[layer], self.correction, self.shape.routing)

    def mix(self, experts: RowExperts, layer: int, chosen: Chosen) -> tuple[Tensor, ScaledRows | None]:
        return experts.mix(self.rows[layer], chosen, self.weights[layer], self.residual, self.norm)

    def floor_bytes(self, layer: int, chosen: Chosen) -> int:
        """Of the router, and of every expert that a row chose."""
        weights = self.weights[layer]
        one = weights.gate_up[0].nbytes + weights.down[0].nbytes
        return self.routers[layer].nbytes + len(torch.unique(chosen.experts)) * one


def grouped(layers: ExpertLayers, layer: int, chosen: Chosen) -> Tensor:
    """[R, H] by torch's product of groups of rows: what a model's own code can do at best."""
    weights, rows = layers.weights[layer], layers.rows[layer]
    normed = (rows.rows.float() * rows.scale).to(layers.dtype)
    experts, order = chosen.experts.flatten().sort()
    bounds = torch.arange(1, layers.shape.experts + 1, device=layers.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, bounds, out_int32=True)
    gathered = normed[order // layers.shape.routing.top_k]
    product = torch._grouped_mm(gathered, weights.gate_up.transpose(1, 2), offs=ends)
    gate, up = product.chunk(2, dim=-1)
    outputs = torch._grouped_mm(functional.silu(gate) * up, weights.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(outputs)
    back[order] = outputs
    shape = *chosen.experts.shape, layers.shape.hidden
    return layers.residual + (back.view(shape) * chosen.weights[..., None]).sum(1).to(layers.dtype)


def check(layers: ExpertLayers, experts: RowExperts, rows: int) -> dict[str, float]:
    """Relative errors against the definition in fp32, of a few rows at a time; raises `ValueError` for more."""
    chosen = layers.route(experts, 0)
    found, scaled = layers.mix(experts, 0, chosen)
    assert scaled is not None
    own = RowExperts().route(layers.rows[0], layers.routers[0], layers.correction, layers.shape.routing)
    both = torch.stack([one.experts.sort(dim=1).values for one in (chosen, own)])
    different = float((both[0] != both[1]).float().mean())
    expected = torch.cat([expected_rows(layers, chosen, slice(at, at + 2)) for at in range(0, min(rows, 16), 2)])
    some = slice(0, len(expected))
    added = found[some].float() - layers.residual[some].float()
    # Beside what is added, rounding the sum to bf16 counts.
    error = float((added - expected).norm() / (expected.norm() + layers.residual[some].float().norm()))
    normed = (scaled.rows.float() * scaled.scale)[some]
    exact = RowLinears().norm_rows(found[some].float(), layers.norm)
    norm_error = float((normed - exact).norm() / exact.norm())
    if not (error <= TOLERANCE and norm_error <= TOLERANCE and different <= TIES * layers.shape.routing.top_k):
        raise ValueError(f"{rows} rows: errors {error:.3g} and {norm_error:.3g}, other experts {different:.3g}")
    return {"error": error, "norm_error": norm_error, "other_experts": different}


def expected_rows(layers: ExpertLayers, chosen: Chosen, some: slice) -> Tensor:
    """[rows, H] fp32: what experts add to some rows, by the definition."""
    rows, weights = layers.rows[0], layers.weights[0]
    squares = None if rows.squares is None else rows.squares[some]
    part = ScaledRows(rows.rows[some].float(), squares, rows.epsilon)
    used, experts = torch.unique(chosen.experts[some], return_inverse=True)
    taken = Chosen(experts.to(torch.int32), chosen.weights[some])
    own = ExpertWeights(weights.gate_up[used.long()].float(), weights.down[used.long()].float())
    return RowExperts().mix(part, taken, own)[0]


def timed(launches: list[Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Microseconds of one launch: the median over replays, and the distance between the quartiles."""
    if device.type == "cuda":
        median, spread = captured_us(launches)
        return {"us": median, "spread": spread}
    begin = time.perf_counter()
    for launch in launches:
        launch()
    return {"us": (time.perf_counter() - begin) * 1e6 / len(launches), "spread": 0.0}


def measure(layers: ExpertLayers, rows: int, bytes_per_us: float, sweep: bool) -> dict[str, Any]:
    """Errors and times of so many rows."""
    layers.load(rows)
    experts = TritonExperts(layers.device)
    result: dict[str, Any] = {"rows": rows, **check(layers, experts, rows)}
    chosen = [layers.route(experts, layer) for layer in range(len(layers.weights))]
    read = [layers.floor_bytes(layer, one) for layer, one in enumerate(chosen)]
    result["floor_us"] = sum(read) / len(read) / bytes_per_us
    every = range(len(layers.weights))

    def whole(layer: int) -> None:
        layers.mix(experts, layer, layers.route(experts, layer))

    ways: dict[str, Callable[[int], object]] = {
        "layer": whole,
        "route": lambda layer: layers.route(experts, layer),
        "mix": lambda layer: layers.mix(experts, layer, chosen[layer]),
    }
    for name, way in ways.items():
        result[name] = timed([lambda layer=layer, way=way: way(layer) for layer in every], layers.device)  # type: ignore[misc]
    with contextlib.suppress(RuntimeError, AttributeError):
        launches: list[Callable[[], object]] = [
            lambda layer=layer: grouped(layers, layer, chosen[layer])  # type: ignore[misc]
            for layer in every
        ]
        result["grouped_mm"] = timed(launches, layers.device)
    tried = vectors_swept if rows <= MAX_SWEPT_ROWS else swept
    result["tilings"] = list(tried(layers, chosen)) if sweep else []
    result["tilings"].sort(key=lambda one: one["us"])
    return result


def swept(layers: ExpertLayers, chosen: list[Chosen]) -> Iterator[dict[str, Any]]:
    """Times of `mix` by the tiling of one product, the other's as it is chosen."""
    rows, top_k = chosen[0].experts.shape
    shape = layers.shape
    usual = choose_expert_tilings(rows, top_k, shape.experts, shape.hidden, shape.inner)
    blocks = ((64, 4), (64, 6), (64, 8), (128, 3), (128, 4), (128, 5), (256, 2), (256, 3))
    sizes = itertools.product(
        {8, 16, usual.gated.block_rows, 2 * usual.gated.block_rows}, (32, 64, 128), blocks, (4, 8)
    )
    for block_rows, outputs, (inner, stages), warps in sizes:
        staged = (block_rows + outputs) * inner * 2 * stages
        if staged > 220_000 or (warps == 8 and outputs < 128):
            continue
        tiling = ExpertTiling(block_rows, outputs, inner, warps, stages)
        for product in ("gated", "down"):
            experts = TritonExperts(layers.device, tilings=replace(usual, **{product: tiling}))
            launches: list[Callable[[], object]] = [
                lambda layer=layer, experts=experts: layers.mix(experts, layer, chosen[layer])  # type: ignore[misc]
                for layer in range(len(chosen))
            ]
            with contextlib.suppress(OutOfResources, PTXASError):
                yield {"product": product} | asdict(tiling) | timed(launches, layers.device)


def vectors_swept(layers: ExpertLayers, chosen: list[Chosen]) -> Iterator[dict[str, Any]]:
    """Times of `mix` through registers by the tiling of one product, the other's as first guessed."""
    usual = ExpertVectorTilings(VectorTiling(2, 2, 4), VectorTiling(2, 1, 4))
    sizes = (1, 2, 4), (2, 1, 4), (2, 2, 4), (4, 1, 4), (4, 2, 4), (2, 1, 8), (4, 1, 8)
    gated = [VectorTiling(*each) for each in sizes]
    down = [VectorTiling(outputs, 1, warps) for outputs in (1, 2, 4) for warps in (1, 2, 4)]
    for product, tilings in (("gated", gated), ("down", down)):
        for tiling in tilings:
            experts = TritonExperts(layers.device, vectors=replace(usual, **{product: tiling}))
            launches: list[Callable[[], object]] = [
                lambda layer=layer, experts=experts: layers.mix(experts, layer, chosen[layer])  # type: ignore[misc]
                for layer in range(len(chosen))
            ]
            with contextlib.suppress(OutOfResources, PTXASError):
                yield {"product": product} | asdict(tiling) | timed(launches, layers.device)


def line(result: dict[str, Any]) -> list[str]:
    """One of the table."""
    peer = result.get("grouped_mm", {}).get("us")
    times = [result[name]["us"] for name in ("layer", "route", "mix")]
    cells = [f"{result['floor_us']:.1f}", *(f"{one:.1f}" for one in times), f"{times[0] / result['floor_us']:.2f}"]
    return [str(result["rows"]), *cells, "-" if peer is None else f"{peer:.1f}", f"{result['error']:.1e}"]


@torch.inference_mode()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--sweep", action="store_true", help="also other tilings")
    parser.add_argument("--rehearse", action="store_true", help="a tiny shape on a CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.rehearse else "cuda")
    shapes = {"tiny": TINY} if options.rehearse else {name: SHAPES[name] for name in options.shapes}
    bytes_per_us = 1e4 if options.rehearse else copied_bytes_per_us()
    show(f"a copy reads and writes {bytes_per_us / 1e6:.3f} TB/s; microseconds of one layer")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, shape in shapes.items():
        layers = ExpertLayers(shape, device)
        found[name] = []
        for rows in options.rows:
            found[name].append(measure(layers, rows, bytes_per_us, options.sweep))
            document = {"machine": describe(), "settings": settings_of(options), "bytes_per_us": bytes_per_us}
            write_json(options.json, document | {"results": found})
            for product in ("gated", "down"):
                best = [one for one in found[name][-1]["tilings"] if one["product"] == product]
                for tiling in best[:4]:
                    show(f"    {rows} rows: {tiling}")
        head = ["rows", "floor", "layer", "route", "mix", "layer / floor", "torch._grouped_mm", "error"]
        show(f"{name}\n" + markdown_table(head, map(line, found[name])))
        del layers
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
