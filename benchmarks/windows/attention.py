"""Sliding windows, capped scores and sinks on one GPU: microseconds of one layer.

    python -m benchmarks.windows.attention [--context 32768] [--sequences 1 8 32] [--json FILE]

A layer with a window over a long context is compared with full attention of the same rows over as many keys as the
window has; the bar is 1.2 x. Caps and sinks are compared with the same attention without them. Inputs, checks against
the fp32 definition and timing are those of `tree_attention`: random trees, CUDA graphs over caches in turn. What lies
before every window is NaN here, so that a launch that reads it shows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.attention_inputs import DEVICE, Case, Inputs, draw, measure
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from tree_kernels.attention import PLAIN, AttentionVariant
from tree_kernels.attention.triton_backend import TritonAttention

BAR = 1.2
# Query heads, key heads, width and window: Ministral's and Gemma 3's, Gemma 4's and gpt-oss's.
SHAPES = ((32, 8, 128, 1024), (16, 8, 256, 1024), (32, 8, 512, 1024), (64, 8, 64, 128))
ROWS = (1, 16, 64)


def timed(inputs: Inputs, variant: AttentionVariant) -> dict[str, Any]:
    """One layer's time and error."""
    backend = TritonAttention(DEVICE)
    plan = backend.plan(inputs.batch)

    def run(keys: Tensor, values: Tensor) -> Tensor:
        return backend.run(plan, inputs.query, keys, values, inputs.scale, variant)

    return dict(measure(replace(inputs, variant=variant), run))


def forget(inputs: Inputs, window: int) -> None:
    """Fill what lies before every window with NaN."""
    case, batch = inputs.case, inputs.batch
    whole = AttentionVariant(window).first_key(batch.prefix_lengths[0]) // case.page_size
    pages = torch.tensor([page for held in batch.pages for page in held[:whole]], device=DEVICE)
    for cache in (inputs.keys, inputs.values):
        cache[:, pages] = float("nan")


def run_shape(shape: tuple[int, int, int, int], sequences: int, rows: int, context: int) -> dict[str, Any]:
    """Every variant of a shape."""
    heads, kv_heads, width, window = shape
    case = Case(sequences, window, rows, heads, kv_heads, width)
    few = draw(case, 0)
    found = {"full": timed(few, PLAIN), "cap": timed(few, AttentionVariant(score_cap=50.0))}
    found["sinks"] = timed(few, AttentionVariant(sinks=torch.randn(heads, device=DEVICE)))
    del few
    many = draw(replace(case, context=context), 0, case.kv_bytes)
    forget(many, window)
    found["window"] = timed(many, AttentionVariant(window))
    found["window and sinks"] = timed(many, AttentionVariant(window, sinks=torch.randn(heads, device=DEVICE)))
    return {"case": str(case), "context": context, **found}


def line(found: dict[str, Any]) -> str:
    kinds = {name: one for name, one in found.items() if isinstance(one, dict)}
    wrong = [f"{name} {one['error']}" for name, one in kinds.items() if "us" not in one]
    if wrong:
        return f"{found['case']} | WRONG: {', '.join(wrong)}"
    base = kinds["full"]["us"]
    parts = (
        f"{name} {one['us']:.1f} +-{one['spread_us']:.1f} ({one['us'] / base:.2f}x)" for name, one in kinds.items()
    )
    return f"{found['case']} | us: {'  '.join(parts)}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=int, default=32768, help="tokens of each sequence")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    results = []
    for shape in SHAPES:
        for sequences in options.sequences:
            for rows in ROWS:
                results.append(run_shape(shape, sequences, rows, options.context))
                show(line(results[-1]))
                write_json(options.json, {"machine": describe(), "bar": "not all measured", "cases": results})
    right = [one for one in results if all("us" in part for part in one.values() if isinstance(part, dict))]
    ratios = [one["window"]["us"] / one["full"]["us"] for one in right]
    met = sum(ratio <= BAR for ratio in ratios)
    summary = f"window at most {BAR} x so many keys: {met}/{len(ratios)}, worst {max(ratios, default=0.0):.2f}"
    show(summary)
    write_json(options.json, {"machine": describe(), "bar": summary, "cases": results})
    return int(len(right) < len(results))


if __name__ == "__main__":
    sys.exit(main())
