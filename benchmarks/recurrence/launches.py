"""Time of each launch of a gated delta net's layer on one GPU, as a captured step launches them, and what they compute.

The shape is Qwen3.5-9B's, inputs and states are random, the convolution and the states are all there is of a layer.
Each launch is timed over all layers, each with its own states, beside the time in which the memory reads and writes
the states once. Before, outputs and states are compared with those of the plain form. `--sweep` times the launches of
states in other tiles too.

    python -m benchmarks.recurrence.launches --json FILE
    python -m benchmarks.recurrence.launches --sweep
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.recurrence.tree_steps import CONTEXT, TREES, DeltaLayers, tree_batch
from benchmarks.shared.gpu_timing import BYTES_PER_US, captured_us
from benchmarks.shared.report import parser_of, provenance, show, write_json
from tree_kernels.attention import AttentionBatch
from tree_kernels.recurrence import RecurrentPass, RecurrentStates, TreeRecurrence, triton_backend
from tree_kernels.recurrence.triton_backend import PassTensors, StateTiles

# Sequences, and rows of each.
LOADS = ((1, 1), (8, 1), (32, 1), (64, 1), (8, 16), (1, 16), (1, 64))
KERNELS = ("convolve_kernel", "mix_single_kernel", "mix_few_kernel", "prepare_kernel", "mix_many_kernel")
# Columns and warps of one row, with what else fits a processor; and of few rows, with programs of each processor.
SINGLE = ((32, 4), (16, 2), (16, 1), (32, 2), (64, 4), (64, 8), (128, 8), (128, 16), (8, 1))
FEW = ((32, 4, 2), (32, 4, 4), (16, 4, 2), (16, 2, 4), (64, 4, 2), (64, 8, 1), (32, 8, 1))
# Relative errors, of outputs in bf16 and of states in fp32. What is folded into a state was rounded to bf16. Of sums
# that differ by 2^-22 about one in 16,000 is rounded the other way, a step of 2^-8: together 3e-5 of what is folded.
ALLOWED = 5e-3, 1e-4


class _Launches:
    """Stands where a kernel does, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names
        self.kept: list[partial[object]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.kept.append(partial(self.kernel[grid], *arguments, **options))
            self.kept[-1]()

        return launch


@contextmanager
def _keeping() -> Iterator[dict[str, _Launches]]:
    """Keep all launches within, by kernel."""
    found = {name: _Launches(getattr(triton_backend, name)) for name in KERNELS}
    for name, each in found.items():
        setattr(triton_backend, name, each)
    try:
        yield found
    finally:
        for name, each in found.items():
            setattr(triton_backend, name, each.kernel)


class LayerLoad:
    """A pass over sequences that have pending keys, as the steps before leave them: one, or four behind a tree."""

    def __init__(self, layers: DeltaLayers, sequences: int, rows: int) -> None:
        self.layers, self.pending = layers, 4 if rows > 1 else 1
        self.batch = tree_batch(sequences, rows)
        self.slots = tuple(range(1, sequences + 1))
        shape, count = layers.shape, self.batch.rows
        # Parts of wider rows, as those of a product are.
        self.inputs = torch.randn(count, shape.channels + 4096, device="cuda", dtype=torch.bfloat16)
        self.inputs = self.inputs[:, : shape.channels]
        self.gates = torch.rand(count, shape.gates, device="cuda")
        self.gates[:, : shape.heads] *= -1.0

    @property
    def floor_us(self) -> float:
        """In which memory reads and writes the states of one layer."""
        shape = self.layers.shape
        return 2 * 4 * len(self.slots) * shape.heads * shape.key_width * shape.value_width / BYTES_PER_US

    def passed(self, recurrence: TreeRecurrence, states: RecurrentStates, layers: Sequence[int]) -> list[Tensor]:
        """Outputs [R, H, Dv] of each layer."""
        states.lengths.fill_(CONTEXT - self.pending)
        if recurrence.backend == "triton":
            # As captured: any sequence may have any rows.
            plan = recurrence.capturable.plan_on_device(self.batch, tensors_of(self.batch, self.slots), states)
        else:
            plan = recurrence.plan(self.batch, self.slots, states)  # type: ignore[assignment]
        of_pass, found = RecurrentPass(recurrence, plan, states), []
        for layer in layers:
            convolved = of_pass.convolve(layer, self.inputs, self.gates, self.layers.convolution)
            found.append(of_pass.mix(layer, convolved, self.gates, self.layers.layout))
        return found

    def errors(self) -> tuple[float, float]:
        """Relative, of outputs and of states, of one layer beside the plain form."""
        own, slots, outputs = self.layers.states, list(self.slots), []
        pools = [own.states, own.windows, own.inputs, own.gates]
        before = [pool[0].clone() for pool in pools]
        behind = []
        for recurrence in (self.layers.recurrence, TreeRecurrence("torch", "cuda")):
            for pool, kept in zip(pools, before, strict=True):
                pool[0].copy_(kept)
            outputs.append(self.passed(recurrence, own, [0])[0].float())
            behind.append(own.states[0, slots].clone())
        for pool, kept in zip(pools, before, strict=True):
            pool[0].copy_(kept)
        return _difference(*outputs), _difference(*behind)

    def times(self) -> dict[str, float]:
        """Microseconds of each launch of one layer, and of all of them."""
        every = range(self.layers.count)
        with _keeping() as kept:
            self.passed(self.layers.recurrence, self.layers.states, every)
        there = {name.removesuffix("_kernel"): each.kept for name, each in kept.items() if each.kept}
        found = {name: captured_us(launches, replays=5)[0] for name, launches in there.items()}
        whole = [launch for of_layer in zip(*there.values(), strict=True) for launch in of_layer]
        found["all"] = captured_us(whole, replays=5)[0] * len(there)
        return found


def tensors_of(batch: AttentionBatch, slots: Sequence[int]) -> PassTensors:
    """The integers of a pass of trees, on the GPU."""
    parents = [parent for tree in batch.parents for parent in tree or ()]
    lists = batch.query_starts, batch.prefix_lengths, [0] * batch.sequences, parents, slots
    return PassTensors(*(torch.tensor(one, dtype=torch.int32, device="cuda") for one in lists))


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def measured(loads: Sequence[tuple[int, int]], tiles: StateTiles, layers: DeltaLayers) -> list[dict[str, Any]]:
    """Errors and times of some loads."""
    layers.recurrence.capturable.tiles = tiles
    found = []
    for sequences, rows in loads:
        load = LayerLoad(layers, sequences, rows)
        errors = load.errors()
        # Written so that NaN fails.
        right = all(error <= allowed for error, allowed in zip(errors, ALLOWED, strict=True))
        times = load.times()
        shown = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
        error = " and ".join(f"{one:.0e}" for one in errors)
        show(f"  {sequences:2} x {rows:2}: {shown} us; floor {load.floor_us:.1f}; {error}{'' if right else '   WRONG'}")
        of_load = {"sequences": sequences, "rows": rows, "us": times, "floor_us": load.floor_us}
        found.append(of_load | {"errors": errors, "right": right})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tiles of states too")
    options = parser.parse_args(arguments)
    layers, usual = DeltaLayers(max(sequences for sequences, _ in LOADS)), StateTiles()
    layers.states.gates[..., : layers.shape.heads].uniform_(-1.0, 0.0)
    layers.states.gates[..., layers.shape.heads :].uniform_(0.0, 1.0)
    document: dict[str, Any] = provenance("recurrence.launches")
    show(f"us a layer, {layers.count} layers, a window of {max(TREES)} rows")
    document["loads"], document["tiles"] = measured(LOADS, usual, layers), []
    write_json(options.json, document)
    tried: list[tuple[StateTiles, str, Sequence[tuple[int, int]]]] = []
    tried += [(replace(usual, single=tile), f"one row: {tile}", LOADS[:4]) for tile in SINGLE]
    tried += [(replace(usual, few=tile, few_wide=tile), f"few rows: {tile}", ((8, 16), (1, 16))) for tile in FEW]
    for tiles, tile, loads in tried if options.sweep else []:
        show(tile)
        try:
            found = measured(loads, tiles, layers)
        # A tile may need more than a processor has.
        except Exception as error:  # a tile that does not compile is no result, and the others are
            show(f"  {type(error).__name__}: {error}")
            continue
        document["tiles"].append({"tile": tile, "loads": found})
        write_json(options.json, document)


if __name__ == "__main__":
    main()
