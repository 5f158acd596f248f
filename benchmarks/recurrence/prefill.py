"""Time of recurrent layers over prompts on one GPU: the launches of a gated delta net, beside flash-linear-attention's,
and whole passes.

The shape is Qwen3.5-9B's, weights and states are random. One layer's launches are its convolution, the states of its
heads and what is kept of them; flash-linear-attention's, where it is installed, are its convolution and its chunked
rule, with lengths of queries and keys divided there, as vLLM and transformers run it. Passes of a prompt are eager, as
they are served above the captured sizes.

    python -m benchmarks.recurrence.prefill --json FILE
    python -m benchmarks.recurrence.prefill --rows 2048 --layers 8
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.engine.steps import PAGE_SIZE, fill_caches, runner_of
from benchmarks.random_models.shapes import config_of
from benchmarks.recurrence.tree_steps import SHAPE, DeltaLayers
from benchmarks.shared.gpu_timing import captured_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import median_and_spread, parser_of, show, write_json
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from tree_kernels.attention import AttentionBatch
from tree_kernels.recurrence import RecurrencePlan, RecurrentPass

ROWS = (128, 512, 2048, 8192)
# Layers whose launches follow one another in a measurement: their memory is more than the cache's.
_LAYERS = 4


def prompt_batch(rows: int) -> AttentionBatch:
    """The first rows of one sequence."""
    return AttentionBatch((0, rows), (0,), (tuple(range(-(-rows // PAGE_SIZE))),), PAGE_SIZE, (None,))


class PromptLayers(DeltaLayers):
    """Recurrent layers of the shape over a prompt, and the same by flash-linear-attention."""

    def __init__(self, rows: int) -> None:
        super().__init__(1)
        self.rows = rows
        self.inputs = torch.randn(rows, self.shape.channels, device="cuda", dtype=torch.bfloat16)
        self.gates = torch.rand(rows, self.shape.gates, device="cuda")
        self.gates[:, : self.shape.heads] *= -0.5

    def own_us(self) -> tuple[float, float]:
        """Of one layer's launches: median and spread."""
        plan = self.recurrence.plan(prompt_batch(self.rows), self.slots, self.states)
        return captured_us([partial(self._run, plan, layer, self.inputs, self.gates) for layer in range(_LAYERS)])

    def _output(self, plan: RecurrencePlan) -> torch.Tensor:
        of_pass = RecurrentPass(self.recurrence, plan, self.states)
        convolved = of_pass.convolve(0, self.inputs, self.gates, self.convolution)
        return of_pass.mix(0, convolved, self.gates, self.layout)

    def peer_us(self) -> tuple[float, float, float]:
        """Of flash-linear-attention's launches, and how far its outputs are from ours, relative. Raises `ImportError`
        where it is not installed."""
        compute = self._peer()
        plan = self.recurrence.plan(prompt_batch(self.rows), self.slots, self.states)
        own, other = self._output(plan).float(), compute().float()
        return *captured_us([compute] * _LAYERS), float((own - other).norm() / own.norm())

    def _peer(self) -> Callable[[], torch.Tensor]:
        causal_conv1d = import_module("fla.modules.convolution").causal_conv1d
        chunk_gated_delta_rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        shape, keys = self.shape, self.layout.value_at // 2
        group = shape.heads // self.layout.key_heads
        decays, betas = (one[None].contiguous() for one in self.gates.chunk(2, dim=-1))

        def compute() -> torch.Tensor:
            mixed, _ = causal_conv1d(self.inputs[None], self.convolution.weight, activation="silu")
            query, key, value = mixed.split([keys, keys, shape.heads * shape.value_width], dim=-1)
            query, key = (
                part.unflatten(-1, (-1, shape.key_width)).repeat_interleave(group, dim=2) for part in (query, key)
            )
            output, _ = chunk_gated_delta_rule(
                query, key, value.unflatten(-1, (-1, shape.value_width)), g=decays, beta=betas.bfloat16(),
                scale=self.layout.scaling, output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            found: torch.Tensor = output[0]
            return found

        return compute


@torch.inference_mode()
def time_launches(rows: Sequence[int]) -> list[dict[str, Any]]:
    """One layer's launches, by rows."""
    found = []
    for count in rows:
        layers = PromptLayers(count)
        us, spread = layers.own_us()
        one: dict[str, Any] = {"rows": count, "us": us, "spread": spread}
        said = f"  {count} rows: {us:.0f} us a layer ({spread:.0f})"
        try:
            peer, peer_spread, apart = layers.peer_us()
        except Exception as error:
            # Its own kernels may not run in a graph or on this version.
            one["peer_error"] = f"{type(error).__name__}: {error}"[:300]
            said += f", flash-linear-attention: {one['peer_error']}"
        else:
            one |= {"peer_us": peer, "peer_spread": peer_spread, "apart": apart}
            said += f", flash-linear-attention {peer:.0f} ({peer_spread:.0f}), {us / peer:.2f} times, {apart:.1e} apart"
        show(said)
        found.append(one)
    return found


def prompt_pass(rows: int, vocabulary: int) -> ForwardInput:
    """The first rows of a sequence with random tokens."""
    drawn = random.Random(0)
    tokens = tuple(drawn.randrange(vocabulary) for _ in range(rows))
    places = tuple(range(rows))
    return ForwardInput(tokens, places, places, prompt_batch(rows), (rows - 1,), state_slots=(1,))


@torch.inference_mode()
def time_pass(runner: ModelRunner, rows: int, repeats: int = 7) -> dict[str, Any]:
    """Milliseconds on the device of a pass that reads a prompt."""
    batch, times = prompt_pass(rows, runner.vocabulary_size), []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        runner.forward(batch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    median, spread = median_and_spread(times[2:])
    show(f"  a pass of {rows} rows: {median:.2f} ms ({spread:.2f}), {rows / median * 1e3:,.0f} tokens a second")
    return {"rows": rows, "ms": median, "spread": spread}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--layers", type=int, help="of the passes; without it all")
    options = parser.parse_args(arguments)
    document: dict[str, Any] = {"machine": describe(), "shape": SHAPE, "launches": time_launches(options.rows)}
    write_json(options.json, document)
    torch.cuda.empty_cache()
    config = config_of(SHAPE, options.layers)
    runner = runner_of(config, torch.bfloat16, "triton", -(-max(options.rows) // PAGE_SIZE))
    fill_caches(runner)
    document["passes"] = [time_pass(runner, rows) for rows in options.rows]
    write_json(options.json, document)


if __name__ == "__main__":
    main()
