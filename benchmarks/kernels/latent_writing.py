"""What a latent layer computes between its projections and its attention, on one GPU: in one launch, and by the code
of the models.

    python -m benchmarks.kernels.latent_writing [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.kernels.latent_writing --rehearse

That is the norm of the latents, rotary embedding of keys and queries, writing the cache's new rows, and copying the
queries' rotary parts after their absorbed ones: `norm_rope_write`, beside the functions of transformers' DeepSeek-V2
(pairs) and -V3 (pairs to halves) with a write and a copy after them. Every case has random inputs, is compared with the
definition in fp32, and is then timed in CUDA graphs of several launches over different caches; medians over replays
with the distance of the quartiles. A few rows take as long as one: the number of launches matters.

`--rehearse` checks tiny cases on the CPU in Triton's interpreter, and times nothing.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.shared.gpu_timing import captured_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from tree_kernels.latent_attention import LatentRows, RotaryAngles, write_latents
from tree_kernels.latent_attention.norm_rope import normed, rotated
from tree_kernels.latent_attention.triton_writing import norm_rope_write_rows

# DeepSeek's widths: a head's part of a query without rotary embedding, a latent, and a rotary part.
PLAIN, LATENT, ROTARY = 128, 512, 64
ROWS = (1, 4, 16, 64)
# Of DeepSeek-V2-Lite and -V3.
HEADS = (16, 128)
# Caches that launches take turns at, so that none has its rows in L2 from the launch before.
_COPIES = 16
_PAGES, _PAGE_SIZE = 256, 16
# Of bf16, for the norm and each rotation; a wrong pair or slot gives a far larger error.
TOLERANCE = 2e-2


class WritingInputs(NamedTuple):
    rows: LatentRows
    rotary: RotaryAngles
    # [n, pages, page_size, L + P].
    caches: Tensor
    slots: Tensor
    # [R, H, L + P].
    absorbed: Tensor


def draw(count: int, heads: int, pairs_out: bool, device: torch.device) -> WritingInputs:
    """Random rows at random positions, for shuffled slots."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copies, pages = (_COPIES, _PAGES) if device.type == "cuda" else (2, 8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    frequencies = 10000.0 ** (-torch.arange(0, ROTARY, 2, device=device) / ROTARY)
    angles = torch.randint(8192, (count, 1), device=device) * frequencies
    rows = LatentRows(normal(count, LATENT + ROTARY), normal(count, heads, PLAIN + ROTARY), normal(LATENT), 1e-6)
    slots = torch.randperm(pages * _PAGE_SIZE, device=device)[:count].to(torch.int32)
    caches = normal(copies, pages, _PAGE_SIZE, LATENT + ROTARY)
    rotary = RotaryAngles(angles.cos(), angles.sin(), True, pairs_out)
    return WritingInputs(rows, rotary, caches, slots, normal(count, heads, LATENT + ROTARY))


def as_models_have_it(inputs: WritingInputs) -> Callable[[Tensor], None]:
    """Norm, rotary embedding and new rows of a cache, by the code of transformers' models."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    rows, rotary = inputs.rows, inputs.rotary
    numbers = torch.complex(rotary.cosines, rotary.sines).unsqueeze(0)
    both = [torch.cat([angle, angle], -1).to(rows.vectors.dtype) for angle in (rotary.cosines, rotary.sines)]

    def run(cache: Tensor) -> None:
        latents, keys = rows.vectors[:, :LATENT], rows.vectors[:, LATENT:]
        queries = rows.queries.transpose(0, 1).unsqueeze(0)
        plain, own = queries[..., :PLAIN], queries[..., PLAIN:]
        keys = keys[None, None]
        if rotary.pairs_out:
            own, keys = apply_rotary_emb(own, keys, numbers)
        else:
            own, keys = apply_rotary_pos_emb_interleave(own, keys, *(angle.unsqueeze(0) for angle in both))
        whole = torch.cat([plain, own], dim=-1)
        write_latents(normed(latents, rows.weight, rows.epsilon), keys[0, 0], cache, inputs.slots)
        inputs.absorbed[..., LATENT:] = whole[0].transpose(0, 1)[..., PLAIN:]

    return run


def worst_error(inputs: WritingInputs, run: Callable[[Tensor], None]) -> float:
    """The larger error of vectors and of queries against the definition in fp32; infinite if other rows changed."""
    rows, cache = inputs.rows, inputs.caches[-1]
    wide = replace(rows, vectors=rows.vectors.float(), queries=rows.queries.float(), weight=rows.weight.float())
    expected = cache.flatten(0, 1).to(torch.float32, copy=True)
    slots = inputs.slots.long()
    latents = normed(wide.vectors[:, :LATENT], wide.weight, wide.epsilon)
    expected[slots] = torch.cat([latents, rotated(wide.vectors[:, LATENT:], inputs.rotary)], dim=1)
    others = torch.ones(len(expected), dtype=torch.bool, device=expected.device)
    others[slots] = False
    queries = rotated(wide.queries[..., PLAIN:], inputs.rotary)
    inputs.absorbed.fill_(float("nan"))
    run(cache)
    found = cache.float().flatten(0, 1)
    if not torch.equal(found[others], expected[others]):
        return float("inf")
    pairs = (found[slots], expected[slots]), (inputs.absorbed[..., LATENT:].float(), queries)
    return max(float((mine - own).norm() / own.norm()) for mine, own in pairs)


def measured(inputs: WritingInputs, run: Callable[[Tensor], None]) -> dict[str, float]:
    """Error, and median and spread of the time; a wrong result is not timed, nor is anything on a CPU."""
    error = worst_error(inputs, run)
    if not error < TOLERANCE or inputs.caches.device.type == "cpu":
        return {"error": error}
    launches = [lambda cache=cache: run(cache) for cache in inputs.caches]
    median, spread = captured_us(launches)
    return {"error": error, "us": median, "spread_us": spread}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny cases on the CPU, checked and not timed")
    parser.add_argument("--seed", type=int, help="of the inputs; by default another in every run")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    torch.manual_seed(seed)
    device = torch.device("cpu" if options.rehearse else "cuda")
    cases: list[dict[str, Any]] = []
    heads = (2,) if options.rehearse else HEADS
    for count, width, pairs_out in ((r, h, p) for p in (True, False) for h in heads for r in ROWS):
        inputs = draw(count, width, pairs_out, device)

        def one_launch(cache: Tensor, inputs: WritingInputs = inputs) -> None:
            norm_rope_write_rows(inputs.rows, inputs.rotary, cache, inputs.slots, inputs.absorbed)

        found = {"one_launch": measured(inputs, one_launch)}
        if not options.rehearse:
            found["as_models_have_it"] = measured(inputs, as_models_have_it(inputs))
        cases.append({"rows": count, "heads": width, "layout": "pairs" if pairs_out else "halves", **found})
        show(json.dumps(cases[-1]))
    write_json(options.json, {"machine": {**describe(), "seed": seed}, "cases": cases})
    return int(not all(case["one_launch"]["error"] < TOLERANCE for case in cases))


if __name__ == "__main__":
    sys.exit(main())
