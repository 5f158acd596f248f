"""Latent attention over trees on one GPU: microseconds of one layer, beside its floor, one row, and other kernels.

    python -m benchmarks.kernels.latent_attention [--grid pages] [--sweep] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.kernels.latent_attention --rehearse

Every case has random inputs, is checked against the fp32 reference (and for few keys against the expanded form), and is
then timed: CUDA graphs of several launches over different caches, so that no launch has its latents in L2; medians over
replays, divided by the launches, with the distance of the quartiles. `layer` includes the rest of a layer's attention:
absorbing queries, writing new vectors, expanding outputs. Beside them are the expanded form through the tree-attention
kernel (16 heads), and FlashInfer's MLA kernel where it is installed, which has no trees and runs the rows as a chain.

The bar, a tree of 16 rows in at most 1.3 times a step of one, is for whole steps (`benchmarks.engine.steps --shapes
deepseek-v2-lite-dense`): attention alone is bound by reading for one row and by multiplying for 16. Its floors are 2.6
times apart with 16 heads, at any length.

`--grid pages` times our kernel alone, in pages of 1, 16 and 64 tokens with 1 to 64 rows, and takes about a minute; the
default, `peers`, has fewer pages, more heads and longer contexts. After every case the JSON is written, and beside it
(`FILE.md`) a table: microseconds, and in brackets the ratio to one row.

`--sweep` times other tilings and keeps the fastest. `--rehearse` checks tiny cases on the CPU in Triton's interpreter,
to test the command before it runs on a GPU; nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels.attention_inputs import rotated_copies, rotated_us
from benchmarks.kernels.latent_inputs import PLAIN, VALUE, LatentCase, LatentInputs, draw, worst_error
from benchmarks.shared.machine import describe
from benchmarks.shared.report import markdown_table, parser_of, show, write_json
from tree_kernels.attention import TreeAttention
from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.attention.triton_tiling import Tiling
from tree_kernels.latent_attention import expanded_values, write_latents
from tree_kernels.latent_attention.triton_backend import TritonLatentAttention

# Of bf16; a wrong key, mask or scale gives a far larger error. In the interpreter products are fp32.
TOLERANCE = 2e-2
ROWS = (1, 4, 16, 64)
# In pages of the usual size.
MORE_ROWS = (1, 2, 4, 8, 16, 32, 64)
# Of the tree that is compared with one row.
TREE_ROWS = 16
SHAPES = [(1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (64, 1024), (64, 8192)]
# Of `--grid pages`, which should take a minute.
PAGED_SHAPES = [(1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024)]
# Five processors make more chunks than sequences, so that results are merged.
_REHEARSED = TritonSettings(tiling=Tiling(16, 16, 4, 1, 1), processors=5)


def cases(numbers: Sequence[int]) -> Iterator[LatentCase]:
    """DeepSeek-V2-Lite's heads at first, then other pages, then DeepSeek-V3's; each with these `numbers` of rows."""
    yield from (LatentCase(batch, context, rows) for batch, context in SHAPES for rows in numbers)
    for batch, context in ((1, 8192), (8, 8192)):
        yield from (LatentCase(batch, context, rows, page_size=page) for page in (1, 64) for rows in numbers)
    for batch, context in ((1, 8192), (8, 8192), (64, 1024)):
        yield from (LatentCase(batch, context, rows, heads=128) for rows in numbers)


def paged_cases(numbers: Sequence[int]) -> Iterator[LatentCase]:
    """DeepSeek-V2-Lite's heads in pages of every size, the usual one first and with more numbers of rows."""
    for page in (16, 64, 1):
        rows = sorted({*numbers, *MORE_ROWS}) if page == 16 else numbers
        yield from (LatentCase(*shape, number, page_size=page) for shape in PAGED_SHAPES for number in rows)


def rehearsed() -> Iterator[LatentCase]:
    """Every number of rows and every page size, small enough for the interpreter."""
    small = LatentCase(2, 70, 1, heads=2, latent=32, rotary=16)
    yield from (replace(small, rows=rows) for rows in ROWS)
    yield from (replace(small, rows=rows, page_size=page) for page in (1, 64) for rows in (1, 4))


def sweep(case: LatentCase) -> list[Tiling]:
    """Tilings for `--sweep`: those that fit an SM of a Hopper GPU for 512 + 64 in 16 bits, and some that may not."""
    packed = max(16, triton.next_power_of_2(case.rows * case.heads))
    shapes = [(16, 32, 4, 3, 2), (16, 32, 4, 5, 1), (16, 32, 4, 5, 2), (16, 64, 4, 3, 2), (16, 64, 8, 5, 1)]
    shapes += [(32, 32, 8, 4, 1), (32, 32, 8, 5, 1), (32, 64, 8, 3, 1)]
    shapes += [(64, 32, 8, 2, 1), (64, 32, 8, 3, 1), (64, 32, 8, 5, 1), (64, 64, 8, 2, 1), (64, 64, 8, 3, 1)]
    shapes += [(64, 64, 16, 2, 1), (64, 128, 8, 2, 1), (128, 32, 16, 2, 1)]
    return [Tiling(*shape) for shape in shapes if packed // 4 <= shape[0] <= packed or min(packed, shape[0]) >= 64]


class Bench:
    """Checks and times one case; on a CPU it only checks."""

    def __init__(self, inputs: LatentInputs) -> None:
        self.inputs = inputs
        self.device = inputs.plain.device
        self.query = inputs.query

    def measured(self, attend: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Error, and median and spread of the time of attention over one cache; a wrong result is not timed."""
        # Freed at once, so that the output is likely to get this memory.
        poison = torch.full_like(self.query, float("nan"))
        del poison
        error = worst_error(self.inputs, attend(self.inputs.caches[-1]))
        if not error < TOLERANCE or self.device.type == "cpu":
            return {"error": error}
        median, spread = rotated_us(lambda i: attend(self.inputs.caches[i]), len(self.inputs.caches))
        return {"error": error, "us": median, "spread_us": spread}

    def ours(self, settings: TritonSettings, *, alone: bool = False) -> dict[str, float]:
        """The kernel and, unless `alone`, the device's time for its schedule, and for all of a layer's attention."""
        inputs, case = self.inputs, self.inputs.case
        backend = TritonLatentAttention(self.device, settings)
        plan, slots = backend.plan(inputs.batch), inputs.slots
        latents, rotary = (part.contiguous() for part in self._own_vectors())

        def attend(cache: Tensor) -> Tensor:
            return backend.run(plan, self.query, cache, case.latent, inputs.scale)

        def layer(cache: Tensor) -> Tensor:
            write_latents(latents, rotary, cache, slots)
            attended = backend.run(plan, inputs.query, cache, case.latent, inputs.scale)
            return expanded_values(attended, inputs.projections)

        def scheduled(cache: Tensor) -> Tensor:
            plan.clear_schedules()
            return attend(cache)

        found = self.measured(attend)
        if alone:
            return found
        if "us" in found:
            copies = len(inputs.caches)
            found["layer_us"] = rotated_us(lambda i: layer(inputs.caches[i]), copies)[0]
            found["schedule_us"] = rotated_us(lambda i: scheduled(inputs.caches[i]), copies)[0] - found["us"]
        elif self.device.type == "cpu":
            layer(inputs.caches[0])
        return found

    def swept(self) -> dict[str, Any]:
        """The fastest tiling, and the times of all that fit and are right."""
        tried: list[tuple[float, Tiling]] = []
        for tiling in sweep(self.inputs.case):
            try:
                found = self.ours(TritonSettings(tiling=tiling), alone=True)
            except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
                continue
            if "us" in found:
                tried.append((found["us"], tiling))
        tried.sort(key=lambda pair: pair[0])
        best = self.ours(TritonSettings(tiling=tried[0][1]))
        return {**best, "tiling": asdict(tried[0][1]), "tried": [(us, asdict(tiling)) for us, tiling in tried]}

    def expanded(self) -> dict[str, float]:
        """Tree attention over random keys and values of all heads, as a cache without latents has them."""
        inputs, case = self.inputs, self.inputs.case
        attention = TreeAttention("triton", self.device)
        plan = attention.plan(inputs.batch)
        shape = (*inputs.caches.shape[1:3], case.heads)
        width = PLAIN + case.rotary
        copies = rotated_copies(2 * case.batch * case.context * case.heads * (width + VALUE), most=16)
        keys = torch.randn(copies, *shape, width, device=self.device, dtype=self.query.dtype)
        values = torch.randn(copies, *shape, VALUE, device=self.device, dtype=self.query.dtype)
        query = torch.cat([inputs.plain, inputs.rotary], dim=-1)
        median, spread = rotated_us(lambda i: attention.run(plan, query, keys[i], values[i], inputs.scale), copies)
        return {"us": median, "spread_us": spread}

    def flashinfer(self) -> dict[str, Any]:
        """FlashInfer's MLA kernel over the same cache; more than one row of a sequence is a chain."""
        import flashinfer

        inputs, case, batch = self.inputs, self.inputs.case, self.inputs.batch
        workspace = torch.empty(256 << 20, dtype=torch.int8, device=self.device)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
        per_sequence = len(batch.pages[0])

        def integers(values: Any) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=self.device)

        wrapper.plan(
            integers(batch.query_starts),
            integers(range(0, case.batch * per_sequence + 1, per_sequence)),
            integers(page for pages in batch.pages for page in pages),
            integers([case.context] * case.batch),
            case.heads, case.latent, case.rotary, case.page_size, case.rows > 1, inputs.scale,
            self.query.dtype, self.query.dtype,
        )  # fmt: skip
        latents, rotary = self.query[..., : case.latent].contiguous(), self.query[..., case.latent :].contiguous()

        def attend(cache: Tensor) -> Tensor:
            output: Tensor = wrapper.run(latents, rotary, cache[..., : case.latent], cache[..., case.latent :])
            return output

        if case.rows == 1:
            return self.measured(attend)
        # Not checked: the result of a chain differs from the tree's.
        median, spread = rotated_us(lambda i: attend(inputs.caches[i]), len(inputs.caches))
        return {"us": median, "spread_us": spread}

    def _own_vectors(self) -> tuple[Tensor, Tensor]:
        own = self.inputs.caches[-1].flatten(0, 1)[self.inputs.slots.long()]
        return own[:, : self.inputs.case.latent], own[:, self.inputs.case.latent :]


def run_case(case: LatentCase, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    rehearsing = options.rehearse
    device = torch.device("cpu" if rehearsing else "cuda")
    bench = Bench(draw(case, seed, device, torch.float32 if rehearsing else torch.bfloat16))
    if rehearsing:
        return {"ours": bench.ours(_REHEARSED)}
    found: dict[str, Any] = {"ours": bench.swept() if options.sweep else bench.ours(TritonSettings())}
    if options.sweep or options.grid == "pages" or "us" not in found["ours"]:
        return found
    if case.heads == 16:
        found["expanded"] = bench.expanded()
    if importlib.util.find_spec("flashinfer"):
        try:
            found["flashinfer"] = bench.flashinfer()
        # For some shapes it has no kernel.
        except (RuntimeError, ValueError, TypeError) as error:
            found["flashinfer"] = {"refused": str(error).splitlines()[0]}
    return found


def line(case: LatentCase, found: dict[str, Any], one_row: float | None) -> str:
    """A row of the table."""
    mine = found["ours"]
    if "us" not in mine:
        verdict = "right" if mine["error"] < TOLERANCE else "WRONG"
        return f"{case} | {verdict}: error {mine['error']:.1e}, not timed"
    peers = [
        f"{name} {run['us']:.1f} ({run['us'] / mine['us']:.2f}x)"
        for name, run in found.items()
        if name != "ours" and "us" in run
    ]
    beside = f"{mine['us'] / one_row:5.2f}x one row" if one_row else " " * 14
    return (
        f"{case} | floor {case.floor_us:7.1f} | ours {mine['us']:7.1f} +-{mine['spread_us']:.1f} us "
        f"{mine['us'] / case.floor_us:5.2f}x floor {beside} | layer {mine['layer_us']:7.1f} | {'  '.join(peers)}"
    )


def one_row_us(case: LatentCase, results: list[tuple[LatentCase, dict[str, Any]]], what: str = "us") -> float | None:
    """Microseconds of one row in the same sequences; None where it was not measured."""
    same = (found["ours"].get(what) for other, found in results if other == replace(case, rows=1))
    return next(same, None)


def bars(results: list[tuple[LatentCase, dict[str, Any]]]) -> dict[str, str]:
    """Ratios of the time of a tree of 16 rows to that of one row, and the ratio of their floors."""
    summary = {}
    for heads in sorted({case.heads for case, _ in results}):
        for what, name in (("us", "attention alone"), ("layer_us", "attention of a layer, with what is around it")):
            ratios = []
            for case, found in results:
                alone, taken = one_row_us(case, results, what), found["ours"].get(what)
                if (case.heads, case.rows) == (heads, TREE_ROWS) and alone and taken:
                    floors = case.floor_us / replace(case, rows=1).floor_us
                    ratios.append((taken / alone, floors, str(case)))
            if ratios:
                (least, _, _), (most, floors, where) = min(ratios), max(ratios)
                summary[f"{TREE_ROWS} rows of {heads} heads, {name}"] = (
                    f"{least:.2f} to {most:.2f} times one row (at {where}); floors of attention {floors:.2f}"
                )
    return summary


def table(results: list[tuple[LatentCase, dict[str, Any]]]) -> str:
    """Markdown: a line for each shape and page, a column for each number of rows."""
    numbers = sorted({case.rows for case, _ in results})
    lines: dict[LatentCase, dict[int, str]] = {}
    for case, found in results:
        mine, alone = found["ours"], one_row_us(case, results)
        cell = f"{mine['us']:.1f}" if "us" in mine else f"error {mine['error']:.1e}"
        if case.rows > 1 and alone and "us" in mine:
            cell += f" ({mine['us'] / alone:.2f})"
        lines.setdefault(replace(case, rows=0), {})[case.rows] = cell
    head = ["heads", "sequences x context", "page", *(f"{rows} rows" if rows > 1 else "1 row" for rows in numbers)]
    rows = [
        [case.heads, f"{case.batch} x {case.context:,}", case.page_size, *(cells.get(rows, "") for rows in numbers)]
        for case, cells in lines.items()
    ]
    return markdown_table(head, rows)


def write(
    file: Path,
    machine: dict[str, Any],
    results: list[tuple[LatentCase, dict[str, Any]]],
    skipped: list[str],
    seconds: float,
) -> None:
    """Write the JSON, and the table beside it."""
    rows = [{**asdict(case), "floor_us": case.floor_us, **found} for case, found in results]
    document = {"machine": machine, "seconds": round(seconds, 1), "bars": bars(results), "skipped": skipped}
    write_json(file, document | {"cases": rows})
    file.with_name(file.name + ".md").write_text(table(results))


def chosen_cases(options: argparse.Namespace) -> list[LatentCase]:
    """The cases that the options choose."""
    if options.rehearse:
        return list(rehearsed())
    return list(paged_cases(options.rows) if options.grid == "pages" else cases(options.rows))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of a sequence")
    parser.add_argument("--grid", default="peers", choices=("peers", "pages"))
    parser.add_argument("--sweep", action="store_true", help="try other tilings and keep the fastest; no peers")
    parser.add_argument("--rehearse", action="store_true", help="tiny cases on the CPU, checked and not timed")
    parser.add_argument("--seed", type=int, help="of the first case's inputs; by default another in every run")
    parser.add_argument("--seconds", type=float, default=420.0, help="start no case after this time")
    options = parser.parse_args()
    started = time.monotonic()
    results: list[tuple[LatentCase, dict[str, Any]]] = []
    first_seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    machine = {**describe(), "seed": first_seed}
    skipped = list[str]()
    for seed, case in enumerate(chosen_cases(options), first_seed):
        if time.monotonic() - started > options.seconds:
            skipped.append(str(case))
            continue
        results.append((case, run_case(case, seed, options)))
        show(line(*results[-1], one_row_us(case, results)))
        if options.json:
            write(options.json, machine, results, skipped, time.monotonic() - started)
    show(table(results) + "\n".join(f"{name}: {ratios}" for name, ratios in bars(results).items()))
    show(f"{len(skipped)} cases not started in time, {time.monotonic() - started:.0f} s")
    if options.json:
        write(options.json, machine, results, skipped, time.monotonic() - started)
    return int(not all(found["ours"]["error"] < TOLERANCE for _, found in results))


if __name__ == "__main__":
    sys.exit(main())
