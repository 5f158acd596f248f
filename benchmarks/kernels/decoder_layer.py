"""Time of a whole decoder layer by what computes its linear layers: the plain form, compiled; kernels for few rows;
cuBLAS with a kernel after each product. `preparing.MAX_ROWS` and `preparing.MANY_ROWS` are chosen by it.

Layers follow each other in a captured graph as they do in a step, attention included. Each has its own weights and
keys, so none has them in the L2 cache. Outputs are compared before they are timed.

    python -m benchmarks.kernels.decoder_layer --device cuda --json FILE

On a CPU (`TRITON_INTERPRET=1`, `--shape tiny`) only the outputs mean something, not the times.
"""

from __future__ import annotations

import time
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.engine.steps import CONTEXT, PAGE_SIZE, StepLoad, decoder_of, step
from benchmarks.random_models.shapes import SHAPES
from benchmarks.shared.gpu_timing import captured_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, settings_of, show, write_json
from target_service.model.cuda_graphs.runner import _RECOMPILE_LIMIT
from target_service.model.forward import pass_over
from target_service.model.runner import ModelRunner, runner_over
from tree_kernels.linear.cublas_backend import CublasLinears
from tree_kernels.linear.triton_backend import TritonLinears
from tree_models.fused.forms import FusedForm, LinearsByRows
from tree_models.fused.preparing import LayerOptions, prepare_decoder
from tree_models.layers.decoder import Decoder

TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
OWN, FEW, MANY = "own", "few", "many"


def build(shape: str, layers: int, device: torch.device) -> Decoder:
    """`layers` layers of a shape with random weights and a small vocabulary; bf16 on a GPU, fp32 elsewhere."""
    sizes: dict[str, Any] = {"model_type": "llama"} | (TINY if shape == "tiny" else SHAPES[shape])
    sizes |= {"num_hidden_layers": layers, "vocab_size": 256, "max_position_embeddings": 8192}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return decoder_of(AutoConfig.for_model(**sizes), device, dtype)


class Layers:
    """Prepared layers and the inputs of one step, which is run by each kind of linear layer."""

    def __init__(self, runner: ModelRunner, decoder: Decoder) -> None:
        self._runner, self._decoder = runner, decoder
        device = runner.device
        self._ways = {
            OWN: LinearsByRows(()),
            FEW: LinearsByRows(((inf, TritonLinears(device)),)),
            MANY: LinearsByRows(((inf, CublasLinears(device)),)),
        }
        if prepare_decoder(decoder, LayerOptions(compiled=device.type == "cuda")) != decoder.layer_count:
            raise ValueError("the layers of this shape are not fused")

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(self._ways)

    def load(self, rows: int, sequences: int) -> None:
        """Prepare a step of `rows` rows, spread over sequences of `CONTEXT` keys."""
        batch = step(load_of(rows, sequences), self._runner.vocabulary_size, rows)
        device, attention = self._runner.device, self._runner.attention
        slots = torch.tensor(batch.slots, device=device)
        self._step = pass_over(attention, attention.plan(batch.attention), slots, self._runner.cache)
        generator = torch.Generator(device).manual_seed(rows)
        shape = rows, self._runner.hidden_size
        self._hidden = torch.randn(shape, generator=generator, device=device).to(self._runner.dtype)
        self._angles = self._decoder.angles_of(0, torch.tensor(batch.positions, device=device))

    def use(self, way: str) -> None:
        """Compute linear layers this way from now on."""
        for form in self._decoder.forms:
            assert isinstance(form, FusedForm)
            form.linears = self._ways[way]

    def run(self) -> Tensor:
        """[R, H] from all layers, one after the other."""
        hidden, carried = self._hidden, None
        for layer, form in zip(self._decoder.layers, self._decoder.forms, strict=True):
            assert form is not None
            done = form.compute_layer(hidden, carried, self._angles, self._step)
            hidden, carried = (layer(hidden, self._angles, self._step), None) if done is None else done
        return hidden

    def added(self) -> Tensor:
        """[R, H] fp32: the sum that all layers add to the rows."""
        return self.run().float() - self._hidden.float()

    def time(self) -> dict[str, float]:
        """Microseconds of one layer: median over replays of all, and the distance between the quartiles."""
        count = self._decoder.layer_count
        if self._runner.device.type == "cuda":
            median, spread = captured_us([self.run], replays=21)
            return {"us": median / count, "spread": spread / count}
        begin = time.perf_counter()
        self.run()
        return {"us": (time.perf_counter() - begin) * 1e6 / count, "spread": 0.0}


def load_of(rows: int, sequences: int) -> StepLoad:
    each, more = divmod(rows, sequences)
    return StepLoad(tuple(each + (index < more) for index in range(sequences)))


@torch.inference_mode()
def measure(layers: Layers, rows: int, sequences: int) -> dict[str, Any]:
    layers.load(rows, sequences)
    result: dict[str, Any] = {"rows": rows, "sequences": sequences}
    expected: Tensor | None = None
    for way in layers.ways:
        layers.use(way)
        # Twice: compiling and the set-up of libraries must come before the graph.
        for _ in range(2):
            found = layers.added()
        # The model's own code comes first.
        expected = found if expected is None else expected
        result[way] = layers.time() | {"error": float((found - expected).norm() / expected.norm())}
    return result


def table(results: list[dict[str, Any]], ways: tuple[str, ...]) -> str:
    """Microseconds of a layer, a line for each number of rows."""
    heads = "".join(f"{way + ' us':>16s}" for way in ways)
    lines = [f"rows{heads}   {MANY} / {OWN}   error of {FEW}, {MANY} against {OWN}"]
    for one in results:
        cells = "".join(f"{one[way]['us']:9.1f} ± {one[way]['spread']:4.1f}" for way in ways)
        share = one[MANY]["us"] / one[OWN]["us"]
        lines.append(f"{one['rows']:4d}{cells}   {share:10.3f}   {one[FEW]['error']:.1e} {one[MANY]['error']:.1e}")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-8b", choices=["llama-8b", "smollm2-135m", "tiny"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 96, 128, 192, 256, 384, 512])
    parser.add_argument("--sequences", type=int, default=32, help="that the rows are spread over")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    device = torch.device(options.device)
    decoder = build(options.shape, options.layers, device)
    largest = max(max(load_of(rows, options.sequences).rows) for rows in options.rows)
    pages = options.sequences * -(-(CONTEXT + largest) // PAGE_SIZE)
    attention: Any = "triton" if device.type == "cuda" else "torch"
    settings: dict[str, Any] = {"num_pages": pages, "page_size": PAGE_SIZE, "attention": attention}
    runner = runner_over(decoder, None, end_token_ids=(), **settings)
    for cache in runner.cache.keys + runner.cache.values:
        cache.normal_()
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        layers = Layers(runner, decoder)
        results = [measure(layers, rows, options.sequences) for rows in options.rows]
    show(table(results, layers.ways))
    write_json(options.json, {"machine": describe(), "settings": settings_of(options), "results": results})


if __name__ == "__main__":
    main()
