"""How the partials of tree attention and latent attention are merged, on one GPU: sizes of the launch that merges, and
tilings beside them.

    python -m benchmarks.kernels.merging [--tilings] [--seconds 300] [--json FILE]

Every case has random inputs, checks each size against the fp32 reference, and is timed as in
`benchmarks.kernels.tree_attention`. Sizes are (rows, partials, warps) of a program; `chosen` is what the kernels take
by themselves, and `inside` that the last program of a group merges it, without a launch of its own. With `--tilings`
each case is also timed with the other tilings of `--tune` there. After every case the JSON is written, and beside it
(`FILE.md`) a table in microseconds, the fastest first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import triton

from benchmarks.kernels.attention_inputs import DEVICE, DTYPE, Case, draw, measure
from benchmarks.kernels.latent_attention import Bench
from benchmarks.kernels.latent_inputs import LatentCase
from benchmarks.kernels.latent_inputs import draw as draw_latent
from benchmarks.kernels.tree_attention import tilings
from benchmarks.shared.report import parser_of, provenance, record_table, show, write_json
from tree_kernels.attention.triton_backend import INVARIANT, TritonAttention
from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.attention.triton_tiling import Merging, Tiling

SIZES = [
    Merging(rows, parts, warps)
    for rows, parts, warps in (
        (1, 4, 1), (1, 8, 1), (1, 8, 2), (1, 16, 2), (1, 16, 4), (1, 32, 4), (1, 64, 4), (2, 4, 1), (2, 4, 2),
        (2, 8, 1), (2, 16, 4), (4, 4, 1), (4, 4, 2), (4, 8, 4),
    )
]  # fmt: skip
CHOSEN, FIXED = "chosen", "fixed splits"
SMALL: dict[str, Any] = {"query_heads": 9, "kv_heads": 3, "width": 64}
CASES = [
    *(Case(1, 1024, rows) for rows in (64, 1, 16, 32, 8)),
    *(Case(8, 1024, rows) for rows in (8, 1, 4)),
    *(Case(32, 512, rows) for rows in (1, 2, 4)),
    *(Case(1, 8192, rows) for rows in (1, 16, 64)),
    *(Case(batch, 512, rows, **SMALL) for batch, rows in ((1, 1), (1, 9), (8, 4), (32, 2), (64, 2))),
    *(Case(1, context, rows, kv_heads=1) for context, rows in ((1024, 1), (8192, 1), (8192, 16))),
    *(Case(1, context, rows) for context, rows in ((512, 64), (32768, 1), (32768, 16), (131072, 1))),
    Case(8, 8192, 8), Case(64, 1024, 1), Case(1, 8192, 256), Case(64, 1024, 16),
]  # fmt: skip
LATENT_CASES = [LatentCase(1, 1024, 1), LatentCase(1, 8192, 1), LatentCase(1, 8192, 16), LatentCase(8, 1024, 4)]


def settings_of(case: Case, others: bool) -> Iterator[tuple[str, TritonSettings]]:
    """The chosen tiling, fixed splits where there are many, and others."""
    yield CHOSEN, TritonSettings()
    if case.batch == 1 and case.width == 128:
        yield FIXED, INVARIANT
    if others:
        for tiling in tilings(case):
            yield named(tiling), TritonSettings(tiling=tiling)


def named(tiling: Tiling) -> str:
    inside = ", inside" if tiling.merge_rows else ""
    apart = ", apart" if tiling.apart else ""
    shape = (tiling.block_rows, tiling.block_keys, tiling.warps, tiling.stages, tiling.programs_per_sm)
    return f"{shape}{inside}{apart}"


def rows_of(
    label: str, settings: TritonSettings, run: Callable[[TritonSettings], dict[str, float]], sizes: Sequence[Merging]
) -> Iterator[dict[str, Any]]:
    """Times with these settings, by the size of the launch that merges."""
    for size in (None, *sizes):
        name = CHOSEN if size is None else str((size.rows, size.parts, size.warps))
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            figures = run(replace(settings, merging=size))
            yield {"tiling": label, "merging": name, **{key: round(figure, 4) for key, figure in figures.items()}}


def attention(case: Case, others: bool) -> Iterator[dict[str, Any]]:
    """Rows of tree attention."""
    inputs = draw(case, case.rows + case.context + case.batch)

    def run(settings: TritonSettings) -> dict[str, float]:
        backend = TritonAttention(DEVICE, settings)
        plan = backend.plan(inputs.batch)
        return measure(inputs, lambda keys, values: backend.run(plan, inputs.query, keys, values, inputs.scale))

    for label, settings in settings_of(case, others):
        yield from rows_of(label, settings, run, SIZES if label in (CHOSEN, FIXED) else ())


def latent(case: LatentCase) -> Iterator[dict[str, Any]]:
    """Rows of latent attention."""
    bench = Bench(draw_latent(case, case.rows + case.context, DEVICE, DTYPE))
    yield from rows_of(CHOSEN, TritonSettings(), lambda settings: bench.ours(settings, alone=True), SIZES)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tilings", action="store_true", help="other tilings too")
    parser.add_argument("--seconds", type=float, default=300.0, help="no new case is begun after so long")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    results = []
    everything: list[Case | LatentCase] = [*CASES, *LATENT_CASES]
    for case in everything:
        few = isinstance(case, Case) and case.context <= 8192
        if time.monotonic() > until:
            break
        found = attention(case, options.tilings and few) if isinstance(case, Case) else latent(case)
        measured = sorted(found, key=lambda row: float(row.get("us", "inf")))
        chosen = next((row.get("us") for row in measured if row["tiling"] == row["merging"] == CHOSEN), None)
        fastest = "; ".join(f"{row['tiling']} {row['merging']}: {row.get('us')}" for row in measured[:4])
        results.append({"case": str(case), "chosen": chosen, "fastest": fastest, "measured": measured})
        show(f"{case}: chosen {chosen}; {fastest}")
        if options.json:
            write_json(options.json, {**provenance("kernels.merging"), "results": results})
            table = [{key: result[key] for key in ("case", "chosen", "fastest")} for result in results]
            options.json.with_suffix(".md").write_text(record_table(table))


if __name__ == "__main__":
    main()
