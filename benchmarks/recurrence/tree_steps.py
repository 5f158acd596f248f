"""Time of recurrent layers over trees on one GPU: the launches of gated delta nets alone, and whole captured steps.

The shape is Qwen3.5-9B's, weights and states are random. Launches are timed over all its layers, each with its own
states, beside the time in which the memory reads and writes those once. Steps fold one token, or four behind a tree;
`benchmarks.engine.steps` compares them with fp32 for a few layers.

    python -m benchmarks.recurrence.tree_steps --json FILE
    python -m benchmarks.recurrence.tree_steps --layers 8 --checked --modes captured
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.engine.steps import MODES, StepLoad, run_shape
from benchmarks.random_models.shapes import config_of
from benchmarks.shared.gpu_timing import captured_us, copied_bytes_per_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from tree_kernels.attention import AttentionBatch
from tree_kernels.recurrence import (
    HeadsLayout,
    RecurrencePlan,
    RecurrentPass,
    RecurrentStates,
    ShortConvolution,
    StateRule,
    StateShape,
    TreeRecurrence,
)

SHAPE = "qwen3.5-9b"
TREES = (1, 16, 64)
SEQUENCES = (1, 16)
CONTEXT = 1024


class DeltaLayers:
    """The recurrent layers of the shape, without their products."""

    def __init__(self, sequences: int) -> None:
        config: Any = config_of(SHAPE)
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        self.shape = StateShape(
            2 * keys + values, config.linear_conv_kernel_dim, config.linear_num_value_heads,
            config.linear_key_head_dim, config.linear_value_head_dim,
        )  # fmt: skip
        self.count = config.layer_types.count("linear_attention")
        self.layout = HeadsLayout(
            StateRule.DELTA, config.linear_num_key_heads, 0, keys, 2 * keys, normed=True, scaling=128**-0.5
        )
        device = torch.device("cuda")
        self.states = RecurrentStates(self.count, sequences, max(TREES), self.shape, torch.bfloat16, device)
        for pool in (self.states.states, self.states.windows, self.states.inputs):
            pool.normal_()
        self.states.gates.uniform_(-1.0, 0.0)
        weight = torch.randn(self.shape.channels, self.shape.taps, device=device, dtype=torch.bfloat16)
        self.convolution = ShortConvolution(weight, silu=True)
        self.recurrence = TreeRecurrence("triton", device)
        self.slots = tuple(range(1, sequences + 1))

    def microseconds(self, rows: int) -> tuple[float, float]:
        """Of one layer's launches: median and spread."""
        batch = tree_batch(len(self.slots), rows)
        inputs = torch.randn(batch.rows, self.shape.channels, device="cuda", dtype=torch.bfloat16)
        gates = -torch.rand(batch.rows, self.shape.gates, device="cuda")
        self.states.lengths.fill_(CONTEXT - (4 if rows > 1 else 1))
        plan = self.recurrence.plan(batch, self.slots, self.states)
        return captured_us([partial(self._run, plan, layer, inputs, gates) for layer in range(self.count)])

    def _run(self, plan: RecurrencePlan, layer: int, inputs: torch.Tensor, gates: torch.Tensor) -> None:
        of_pass = RecurrentPass(self.recurrence, plan, self.states)
        convolved = of_pass.convolve(layer, inputs, gates, self.convolution)
        of_pass.mix(layer, convolved, gates, self.layout)


def tree_batch(sequences: int, rows: int) -> AttentionBatch:
    """A random tree of `rows` for each sequence."""
    drawn = random.Random(0)
    trees = tuple((0, *(drawn.randrange(row) for row in range(1, rows))) for _ in range(sequences))
    starts = tuple(range(0, sequences * rows + 1, rows))
    return AttentionBatch(starts, (CONTEXT,) * sequences, ((0,),) * sequences, 1 << 20, trees)


@torch.inference_mode()
def time_launches(bytes_per_us: float) -> list[dict[str, Any]]:
    """One layer's launches, by sequences and rows."""
    found = []
    for sequences in SEQUENCES:
        layers = DeltaLayers(sequences)
        state = 2 * 4 * sequences * layers.shape.heads * layers.shape.key_width * layers.shape.value_width
        nodes = layers.count * (
            layers.states.layer_bytes(layers.shape, max(TREES), torch.bfloat16)
            - layers.states.layer_bytes(layers.shape, 0, torch.bfloat16)
        )
        for rows in TREES:
            median, spread = layers.microseconds(rows)
            one = {"sequences": sequences, "rows": rows, "us": median, "spread": spread}
            one |= {"floor_us": state / bytes_per_us, "bytes_of_nodes_of_a_sequence": nodes}
            show(f"  {sequences} sequences of {rows} rows: {median:.1f} us a layer, floor {one['floor_us']:.1f}")
            found.append(one)
        show(f"  nodes of a sequence take {nodes / (1 << 20):.1f} MiB")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--modes", nargs="+", default=["captured", "compiled", "fused"], choices=list(MODES))
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each load")
    parser.add_argument("--layers", type=int, help="of the steps; without it all")
    parser.add_argument("--checked", action="store_true", help="compare steps with fp32 first")
    options = parser.parse_args(arguments)
    bytes_per_us = copied_bytes_per_us()
    show(f"a copy reads and writes {bytes_per_us / 1e6:.3f} TB/s")
    document: dict[str, Any] = {"machine": describe(), "bytes_per_us": bytes_per_us, "steps": []}
    document["launches"] = time_launches(bytes_per_us)
    write_json(options.json, document)
    torch.cuda.empty_cache()
    loads = tuple(StepLoad((rows,)) for rows in TREES)
    found = run_shape(
        SHAPE, options.modes, loads, options.seconds, layers=options.layers, bytes_per_ms=bytes_per_us * 1e3,
        checked=options.checked, profiled=True,
    )  # fmt: skip
    for result in found:
        document["steps"].append(result)
        write_json(options.json, document)


if __name__ == "__main__":
    main()
