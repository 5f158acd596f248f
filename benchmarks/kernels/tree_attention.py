"""Tree attention on one GPU: microseconds of one layer, against its floors and against other kernels.

    python -m benchmarks.kernels.tree_attention
        [--grid small|full|prompts] [--tune] [--xqa] [--dense] [--json FILE]

Every case has random inputs, checks each implementation against the fp32 reference, then replays CUDA graphs of
several launches over different caches, so that no launch has its keys in L2. Times are medians over replays, divided
by the launches; the spread is the distance between the quartiles. The floor is the larger of the times to read keys and
values once and to compute the products once. FlashInfer is measured where it is installed, at width 128; its first use
compiles for half a minute. `--dense` adds PyTorch's own attention, at 16 and 64 rows of four shapes. The grid of
prompts has rows of one prompt, behind up to 6,144 tokens, also beside FlashInfer's FA3 and PyTorch's kernels for that.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels.attention_inputs import DEVICE, Case, Inputs, draw, measure, time_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from tree_kernels.attention.triton_backend import TritonAttention
from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.attention.triton_tiling import Tiling


def cases(grid: str) -> Iterator[Case]:
    """The usual shapes first, so that a run which `--seconds` cuts short has the most important figures."""
    if grid == "prompts":
        behind = (0, 1024, 3072, 6144)
        yield from (Case(1, prefix + rows, rows, chain=True) for rows in (768, 2048, 512) for prefix in behind)
        return
    shapes = [(1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (8, 32768), (64, 1024), (64, 8192)]
    few = grid == "small"
    yield from (Case(batch, context, n) for batch, context in shapes for n in (1, 16, 64))
    for batch, context in ((1, 1024), (1, 8192), (8, 1024), (64, 1024)):
        yield from (Case(batch, context, n, query_heads=9, kv_heads=3, width=64) for n in (1, 16, 64))
    yield from (Case(batch, context, 256) for batch, context in (shapes[::2] if few else shapes))
    if not few:
        yield from (Case(batch, context, n) for batch, context in shapes for n in (8, 32))
    for batch, context in ((1, 1024), (8, 8192)) if few else ((1, 1024), (1, 32768), (8, 8192), (64, 1024)):
        for n in (64,) if few else (16, 64):
            case = Case(batch, context, n)
            yield replace(case, page_size=1)
            yield replace(case, page_size=64)
            yield replace(case, query_heads=64)
            yield replace(case, width=64)
            yield replace(case, query_heads=64, width=64, page_size=64)


def tilings(case: Case) -> list[Tiling]:
    """Tilings for `--tune`."""
    packed = max(16, triton.next_power_of_2(case.rows * case.query_heads // case.kv_heads))
    shapes = [(16, 64, 4, 5, 1), (16, 64, 4, 5, 2), (16, 64, 4, 5, 3), (16, 128, 4, 3, 1), (16, 128, 4, 3, 2)]
    shapes += [(32, 64, 4, 5, 1), (32, 128, 4, 3, 1), (32, 128, 4, 3, 2)]
    shapes += [(64, 64, 4, 5, 1), (64, 64, 4, 5, 2), (64, 64, 4, 4, 2), (64, 128, 4, 3, 1)]
    shapes += [(128, 128, 8, 3, 1), (128, 128, 8, 5, 1), (256, 64, 16, 5, 1)]
    if case.chain:
        # Of many rows, which are bound by products: more warps for a block, or two programs that take turns.
        shapes = [(64, 64, 4, 4, 2), (64, 128, 4, 3, 1), (128, 128, 8, 3, 1), (128, 128, 8, 5, 1), (256, 64, 16, 5, 1)]
        shapes += [(64, 64, 4, 3, 3), (128, 64, 4, 3, 1), (128, 64, 4, 3, 2), (128, 64, 8, 3, 2), (128, 64, 8, 4, 1)]
        shapes += [(128, 128, 8, 4, 1), (256, 64, 8, 3, 1)]
        return [Tiling(*shape, 0, apart) for shape in shapes for apart in (False, True)]
    # Merging in the same launch pays where groups are cut in two at most.
    merges = (0,) if 2 * case.batch * case.kv_heads * packed < 132 * 16 else (0, 16)
    return [
        Tiling(*shape, merge, apart)
        for shape in shapes
        for merge in merges
        for apart in (False, True)
        if packed // 4 <= shape[0] <= packed and (shape[0] >= 64 or not apart)
    ]


def ours(inputs: Inputs, settings: TritonSettings) -> dict[str, Any]:
    backend = TritonAttention(DEVICE, settings)
    started = time.perf_counter()
    plan = backend.plan(inputs.batch)
    host_us = (time.perf_counter() - started) * 1e6

    def run(keys: Tensor, values: Tensor) -> Tensor:
        return backend.run(plan, inputs.query, keys, values, inputs.scale)

    def run_and_schedule(keys: Tensor, values: Tensor) -> Tensor:
        plan.clear_schedules()
        return run(keys, values)

    result = measure(inputs, run)
    if "us" not in result:
        return dict(result)
    with_schedule, _ = time_us(inputs, run_and_schedule)
    return {**result, "plan_host_us": host_us, "plan_device_us": with_schedule - result["us"]}


def tuned(inputs: Inputs) -> dict[str, Any]:
    """The fastest tiling, and the times of all."""
    found: list[tuple[float, Tiling]] = []
    for tiling in tilings(inputs.case):
        backend = TritonAttention(DEVICE, TritonSettings(tiling=tiling))
        plan = backend.plan(inputs.batch)

        def run(keys: Tensor, values: Tensor, backend: TritonAttention = backend, plan: Any = plan) -> Tensor:
            return backend.run(plan, inputs.query, keys, values, inputs.scale)

        try:
            us, _ = time_us(inputs, run, 5)
        except triton.runtime.errors.OutOfResources:
            continue
        found.append((us, tiling))
    found.sort(key=lambda pair: pair[0])
    best = ours(inputs, TritonSettings(tiling=found[0][1]))
    return {**best, "tiling": asdict(found[0][1]), "tried": [(us, asdict(tiling)) for us, tiling in found]}


def line(case: Case, found: dict[str, Any]) -> str:
    if "us" not in found["ours"]:
        return f"{case} | WRONG: error {found['ours']['error']} against the reference"
    mine = found["ours"]["us"]
    peers = "  ".join(
        f"{name} {run['us']:.1f} ({run['us'] / mine:.2f}x)"
        for name, run in found.items()
        if name != "ours" and "us" in run
    )
    return (
        f"{case} | floor {case.floor_us:7.1f} | ours {mine:7.1f} +-{found['ours']['spread_us']:.1f} us "
        f"{mine / case.floor_us:5.2f}x floor {case.kv_bytes / mine / 1e3:5.0f} GB/s "
        f"plan {found['ours']['plan_device_us']:4.1f} us | {peers}"
    )


def bars(results: list[tuple[Case, dict[str, Any]]]) -> dict[str, str]:
    """The bars of the design: cases that met each / cases measured, and the worst ratio."""
    bounds: dict[str, list[tuple[float, bool]]] = {}

    def note(name: str, ratio: float, passed: bool) -> None:
        bounds.setdefault(name, []).append((ratio, passed))

    for case, found in results:
        if "us" not in found["ours"]:
            continue
        mine = found["ours"]["us"]
        share = mine / case.floor_us
        if case.rows == 16 and case.batch * case.context >= 65536:
            note("16 rows, >= 64k keys: at most 1.3 x floor", share, share <= 1.3)
        if case.rows == 64:
            note("64 rows: at most 2 x floor", share, share <= 2)
        for peer, least, rows in (
            ("fa2_causal", 1.0, None), ("fa3_causal", 1.0, None), ("fa2_mask", 2.0, 64), ("xqa", 1.7, 64),
        ):  # fmt: skip
            if "us" in found.get(peer, {}) and rows in (None, case.rows):
                ratio = found[peer]["us"] / mine
                note(f"at least {least} x {peer}" + (f" at {rows} rows" if rows else ""), -ratio, ratio >= least)
    return {
        name: f"{sum(passed for _, passed in noted)}/{len(noted)}, worst {abs(max(ratio for ratio, _ in noted)):.2f}"
        for name, noted in bounds.items()
    }


# The shapes that PyTorch's own attention is compiled for.
_DENSE_CASES = {Case(*shape, rows) for shape in ((1, 1024), (1, 32768), (8, 8192), (64, 1024)) for rows in (16, 64)}


def run_case(case: Case, seed: int, options: argparse.Namespace, scratch: list[Tensor]) -> dict[str, Any]:
    inputs = draw(case, seed)
    found: dict[str, Any] = {"ours": tuned(inputs) if options.tune else ours(inputs, TritonSettings())}
    if options.split_keys:
        found["ours_fixed_split"] = ours(inputs, TritonSettings(options.split_keys))
    if options.dense and (case in _DENSE_CASES or case.chain):
        # Only here: FlexAttention's import alone takes seconds.
        from benchmarks.kernels.attention_dense_peers import flex_run, lower_right_runs, sdpa_run

        if case.chain:
            found.update(lower_right_runs(inputs))
        else:
            found["sdpa"], found["flex"] = sdpa_run(inputs), flex_run(inputs)
    if importlib.util.find_spec("flashinfer") and not options.tune and case.width == 128:
        # Only here: FlashInfer may be absent.
        from benchmarks.kernels.attention_peers import flashinfer_runs, xqa_run

        found.update(flashinfer_runs(inputs))
        if options.xqa and not case.chain and case.rows in (16, 64) and case.page_size == 16 and case.query_heads == 32:
            found["xqa"] = xqa_run(inputs, scratch[0], scratch[1])
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--grid", choices=("small", "full", "prompts"), default="full")
    parser.add_argument("--rows", type=int, nargs="*", help="only these numbers of rows")
    parser.add_argument("--tune", action="store_true", help="try many tilings and keep the fastest; no peers")
    parser.add_argument("--xqa", action="store_true", help="measure FlashInfer's XQA too (one build per shape)")
    parser.add_argument("--dense", action="store_true", help="measure PyTorch's own attention too, in a few cases")
    parser.add_argument("--split-keys", type=int, default=0, help="measure this fixed split size too")
    parser.add_argument("--seconds", type=float, default=420.0, help="start no case after this time")
    options = parser.parse_args()
    started = time.monotonic()
    scratch = []
    if options.xqa:
        scratch = [torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)]
        scratch.append(torch.zeros(8 << 20, dtype=torch.uint32, device=DEVICE))
    results: list[tuple[Case, dict[str, Any]]] = []
    skipped = []
    for seed, case in enumerate(cases(options.grid)):
        if options.rows and case.rows not in options.rows:
            continue
        if time.monotonic() - started > options.seconds:
            skipped.append(str(case))
            continue
        results.append((case, run_case(case, seed, options, scratch)))
        show(line(*results[-1]))
    summary = bars(results)
    show("\n".join([*(f"{name}: {met}" for name, met in summary.items()), f"{len(skipped)} cases not started in time"]))
    rows = [{**asdict(case), "floor_us": case.floor_us, **found} for case, found in results]
    document = {"machine": describe(), "bars": summary, "skipped": skipped, "cases": rows}
    write_json(options.json, document)
    return int(any("us" not in found["ours"] for _, found in results))


if __name__ == "__main__":
    sys.exit(main())
