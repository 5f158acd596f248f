"""Time to read a long prompt on one GPU, by the rows of a pass, beside what its products and its attention take alone.

    python -m benchmarks.host.prompts --json FILE [--shape llama-8b] [--tokens 6000] [--rows 256,512,1024,2048]

The prompt is read in passes of so many rows, as the engine reads one that is alone: captured up to `--captured` rows,
by eager passes above. Weights are random. The floor is the time of the same products by cuBLAS over as many rows, and
of PyTorch's causal attention over the whole prompt, one after the other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.engine.steps import PAGE_SIZE, fill_caches, runner_of
from benchmarks.random_models.shapes import SHAPES, config_of
from benchmarks.shared.machine import describe
from benchmarks.shared.report import comma_separated, markdown_table, median_and_spread, parser_of, show, write_json
from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from tree_models.fused.preparing import LayerOptions

_REPEATS = 5
# Kernels that the table of a pass lists.
_LISTED = 12


@dataclass(frozen=True)
class PromptFigure:
    """Milliseconds of a whole prompt in passes of so many rows: until the logits of its last token are on the host, and
    on the device alone."""

    rows: int
    captured: bool
    wall_ms: float
    device_ms: float
    spread: float


def passes_of(runner: ModelRunner, tokens: int, rows: int) -> Iterator[ForwardInput]:
    """The passes that read a prompt, of which the last has the logits of its last token."""
    pages = list(range(runner.cache.pages_for(tokens)))
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        ids = tuple(token % runner.vocabulary_size for token in range(begin, end))
        batch = ForwardInput.of_sequence(ids, tuple(range(begin, end)), pages, runner.cache, None)
        yield replace(batch, logit_rows=(end - begin - 1,))


@torch.inference_mode()
def time_prompt(runner: ModelRunner, tokens: int, rows: int) -> PromptFigure:
    """The figure of one width; the first two prompts are not counted."""
    wall, device = [], []
    for repeat in range(2 + _REPEATS):
        own, last = _Timed(), None
        for batch in passes_of(runner, tokens, rows):
            last = runner.forward(batch)
        assert last is not None, "a prompt has tokens"
        taken = own.end(last)
        if repeat >= 2:
            wall.append(taken[0])
            device.append(taken[1])
    captured = isinstance(runner, CapturedRunner) and any(bucket.rows >= rows for bucket in runner.buckets)
    middle, spread = median_and_spread(wall)
    return PromptFigure(rows, captured, round(middle, 2), round(median_and_spread(device)[0], 2), round(spread, 2))


class _Timed:
    """Milliseconds on the host and on the device from its making to `end`."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._start.record()
        self._at = time.perf_counter()

    def end(self, result: torch.Tensor) -> tuple[float, float]:
        self._stop.record()
        result.float().sum().item()
        wall = (time.perf_counter() - self._at) * 1e3
        return wall, float(self._start.elapsed_time(self._stop))


def milliseconds(launch: Callable[[], object], repeats: int = 10) -> float:
    """Of one launch on the device, the mean of several in a row."""
    for _ in range(3):
        launch()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        launch()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / repeats


@torch.inference_mode()
def floor_of(config: Any, tokens: int, rows: int) -> dict[str, float]:
    """Milliseconds of a prompt's products, in pieces of `rows`, and of its attention, of all layers."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    hidden, inner = config.hidden_size, config.intermediate_size
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    products = 0.0
    for inputs, outputs in (
        (hidden, (heads + 2 * kv_heads) * width),
        (heads * width, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ):
        weight = torch.randn(outputs, inputs, **make) * 0.02
        full, rest = divmod(tokens, rows)
        for count, times in ((rows, full), (rest, 1)):
            if count and times:
                piece = torch.randn(count, inputs, **make)
                products += times * milliseconds(partial(torch.matmul, piece, weight.T))
    query = torch.randn(1, heads, tokens, width, **make)
    key, value = (torch.randn(1, kv_heads, tokens, width, **make) for _ in range(2))
    attention = milliseconds(lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
    layers = config.num_hidden_layers
    return {"products_ms": round(layers * products, 2), "attention_ms": round(layers * attention, 2)}


@torch.inference_mode()
def kernels_of(runner: ModelRunner, tokens: int, rows: int) -> dict[str, float]:
    """Milliseconds of a prompt by kernel, the longest first."""
    batches = list(passes_of(runner, tokens, rows))
    for batch in batches:
        runner.forward(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in batches:
            runner.forward(batch)
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type.name == "CUDA":
            found[event.name[:90]] += (event.time_range.end - event.time_range.start) / 1e3
    return {name: round(taken, 2) for name, taken in found.most_common(_LISTED)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="of the shape; all by default")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rows", type=comma_separated(int), default=[256, 512, 1024, 1536, 2048, 3072, 6000])
    parser.add_argument("--captured", type=int, default=2048, help="rows of the largest captured pass")
    parser.add_argument("--profiled", type=int, default=2048, help="rows of the passes whose kernels are listed")
    options = parser.parse_args()
    config = config_of(options.shape, options.layers)
    plain = runner_of(config, torch.bfloat16, "triton", -(-options.tokens // PAGE_SIZE) + 1)
    runner = CapturedRunner(plain, CaptureOptions(options.captured, 1, LayerOptions(compiled=False)))
    fill_caches(runner)
    figures = []
    for rows in options.rows:
        figures.append(time_prompt(runner, options.tokens, rows))
        show(f"{figures[-1]}")
    floors = {rows: floor_of(config, options.tokens, rows) for rows in options.rows}
    kernels = kernels_of(runner, options.tokens, options.profiled)
    table = [
        [
            str(one.rows),
            "captured" if one.captured else "eager",
            f"{one.wall_ms:.1f}",
            f"{one.device_ms:.1f}",
            f"{floors[one.rows]['products_ms']:.1f}",
            f"{floors[one.rows]['attention_ms']:.1f}",
        ]
        for one in figures
    ]
    show(markdown_table(["rows of a pass", "", "ms", "on the device", "products alone", "attention alone"], table))
    show(markdown_table(["kernel", "ms"], [[name, f"{taken:.2f}"] for name, taken in kernels.items()]))
    document = {
        "machine": describe(),
        "shape": options.shape,
        "tokens": options.tokens,
        "figures": [asdict(one) for one in figures],
        "floors": floors,
        "kernels": {"rows": options.profiled, "ms": kernels},
    }
    write_json(options.json, document)


if __name__ == "__main__":
    main()
