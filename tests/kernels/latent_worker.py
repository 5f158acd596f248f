"""Runs the Triton backend of latent attention over every case and writes what it found as JSON to standard output.

A process of its own, because Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from conftest import Spec, make_latent_case
from examples import is_full

from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.attention.triton_tiling import Tiling
from tree_kernels.latent_attention import LatentAttention, LatentRows, RotaryAngles, expanded_values, norm_rope
from tree_kernels.latent_attention.norm_rope import normed, rotated
from tree_kernels.latent_attention.triton_backend import TritonLatentAttention
from tree_kernels.latent_attention.triton_writing import norm_rope_write_rows
from tree_kernels.triton_paging import write_rows

INTERPRETED = not torch.cuda.is_available()
# Of cases that take long, those that differ in one thing alone.
IN_TURN = INTERPRETED and not is_full()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL = Tiling(block_rows=16, block_keys=16, warps=4, stages=1, programs_per_sm=1)
WIDE = Tiling(block_rows=32, block_keys=32, warps=4, stages=2, programs_per_sm=1)
BALANCED = TritonSettings(tiling=SMALL, processors=5)
# Trees and prompts in one batch, one of them in the middle of itself, and a sequence that is not there.
RAGGED: list[Spec] = [
    (3, 1, "tree"), (47, 16, "tree"), (0, 21, "causal"), (63, 5, "chain"), (0, 0, "causal"), (130, 3, "causal"),
]  # fmt: skip


def cases() -> Iterator[tuple[str, dict[str, Any], TritonSettings]]:
    """Name, arguments of `make_latent_case`, settings."""
    for page_size in (1, 16, 64):
        # Neither hangs on the other.
        if page_size != 16 or not IN_TURN:
            yield f"page {page_size}", {"specs": RAGGED, "page_size": page_size}, BALANCED
        wide = TritonSettings(tiling=WIDE, processors=5)
        if page_size == 16 or not IN_TURN:
            yield f"page {page_size}, tiles of 32", {"specs": RAGGED, "page_size": page_size}, wide
    for rows in (1, 2, 16, 129) if IN_TURN else (1, 2, 16, 64, 65, 129):
        yield f"{rows} rows", {"specs": [(19, rows, "tree")], "heads": 2}, BALANCED
    for heads in (1, 3, 16, 40):
        yield f"{heads} heads", {"specs": [(33, 7, "tree"), (20, 1, "tree")], "heads": heads}, BALANCED
    for latent, rotary in ((16, 16), (64, 8), (24, 16), (128, 16), (384, 16)):
        arguments = {"specs": RAGGED[:3], "latent": latent, "rotary": rotary, "heads": 2}
        yield f"widths {latent} and {rotary}", arguments, BALANCED
    for processors in (1, 2, 64):
        yield f"{processors} programs", {"specs": RAGGED}, TritonSettings(tiling=SMALL, processors=processors)
    for processors in (40, 72):
        # One sequence for all of them, which leaves so many partial results to be merged at a time.
        alone = {"specs": [(1170, 1, "tree")], "heads": 3}
        yield f"one sequence, {processors} programs", alone, TritonSettings(tiling=SMALL, processors=processors)
    for keys in (0, 1, 15, 16, 700):
        yield f"{keys} keys before", {"specs": [(keys, 1, "tree"), (keys, 9, "tree")]}, BALANCED
    yield "a prompt", {"specs": [(0, 70, "causal")], "heads": 2}, BALANCED
    # The interpreter multiplies the bits of bf16 as integers, so that fp16 stands for it.
    yield "half precision", {"specs": RAGGED, "dtype": torch.float16}, BALANCED
    yield "own tiling", {"specs": RAGGED[:3]}, TritonSettings(processors=4)
    if not INTERPRETED:
        yield from device_cases()
    rng = random.Random(0)
    for i in range(4 if IN_TURN else 10):
        kinds = ("tree", "chain", "causal", "star")
        specs = [(rng.randrange(70), rng.randrange(20), rng.choice(kinds)) for _ in range(rng.randrange(1, 5))]
        arguments = {
            "specs": [*specs, (rng.randrange(9), 1, "tree")], "page_size": rng.choice((1, 16, 64)),
            "heads": rng.randrange(1, 6), "seed": i,
        }  # fmt: skip
        yield f"random {i}", arguments, TritonSettings(None, SMALL, rng.randrange(1, 9))


def device_cases() -> Iterator[tuple[str, dict[str, Any], TritonSettings]]:
    """What only a GPU runs: bfloat16, DeepSeek's widths and the backend's own tilings."""
    shape = {"latent": 512, "rotary": 64, "plain": 128, "value": 128, "dtype": torch.bfloat16}
    for page_size in (1, 16, 64):
        for heads in (16, 128):
            for rows in (1, 2, 4, 16, 64):
                specs: list[Spec] = [(1000, rows, "tree"), (37, 1, "tree"), (5000, rows, "chain"), (0, 90, "causal")]
                arguments = {"specs": specs, "page_size": page_size, "heads": heads, **shape}
                yield f"bf16 {page_size} {heads} {rows}", arguments, TritonSettings()
    widest = {"specs": [(300, 16, "tree")], "heads": 16, **shape, "dtype": torch.float32}
    yield "fp32 of full width", widest, TritonSettings()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def errors_of(name: str, arguments: dict[str, Any], settings: TritonSettings) -> list[float]:
    """Against attended latents in fp32, and as values against the expanded form. NaN if a plan's second run, for
    another layer say, does not give the same bits; without a GPU, where a run takes long, a case of each way to divide
    the work has a second."""
    runs = 2 if not INTERPRETED or name.startswith(("page", "one sequence")) else 1
    case = make_latent_case(**{"device": DEVICE, **arguments})
    backend = TritonLatentAttention(DEVICE, settings)
    plan, query = backend.plan(case.batch), case.query
    attended, *again = (backend.run(plan, query, case.cache, case.latent, case.scale) for _ in range(runs))
    if not all(torch.equal(attended, each) for each in again):
        return [float("nan")]
    own = LatentAttention("reference", DEVICE)
    expected = own.run(own.plan(case.batch), query, case.cache, case.latent, case.scale)
    values = expanded_values(attended, case.projections)
    return [relative_error(attended, expected), relative_error(values, case.expanded())]


def a_plan_takes_the_next_step() -> list[float]:
    """Errors of steps of other shapes, run through the tensors of one plan without planning again."""
    backend = TritonLatentAttention(DEVICE, BALANCED)
    first = make_latent_case([(70, 40, "tree"), (40, 20, "tree"), (9, 9, "tree")], device=DEVICE)
    plan = backend.plan(first.batch)
    backend.run(plan, first.query, first.cache, first.latent, first.scale)
    errors = []
    steps: list[list[Spec]] = [
        [(30, 1, "tree"), (5, 17, "tree"), (8, 50, "causal")],
        [(100, 1, "tree"), (0, 0, "tree"), (0, 0, "tree")],
        [(0, 64, "tree"), (60, 3, "chain"), (1, 1, "tree")],
    ]
    for step in steps:
        case = make_latent_case(step, spare_pages=0, device=DEVICE)
        packed = torch.frombuffer(backend.pack(plan, case.batch), dtype=torch.int32)
        plan.integers[: len(packed)] = packed
        # What a captured graph replays: prepare, attend, merge.
        plan.clear_schedules()
        query = torch.zeros_like(first.query)
        query[: case.batch.rows] = case.query
        output = backend.run(plan, query, case.cache, case.latent, case.scale)[: case.batch.rows]
        errors.append(relative_error(expanded_values(output, case.projections), case.expanded()))
    return errors


def output_rows_are_as_in_a_whole_pass() -> list[float]:
    """Errors of levels of trees, as a module in the target's passes reads them."""
    backend = TritonLatentAttention(DEVICE, BALANCED)
    case = make_latent_case([(70, 17, "tree"), (9, 12, "tree")], device=DEVICE)
    plan, own, errors = backend.plan(case.batch), LatentAttention("reference", DEVICE), list[float]()
    expected = own.run(own.plan(case.batch), case.query, case.cache, case.latent, case.scale)
    for first, end in ((0, 1), (1, 9), (9, 17)):
        plan.output_rows = first, end
        plan.clear_schedules()
        output = backend.run(plan, case.query, case.cache, case.latent, case.scale)
        starts = case.batch.query_starts
        rows = [row for a, b in itertools.pairwise(starts) for row in range(a + first, min(a + end, b))]
        errors.append(relative_error(output[rows], expected[rows]))
    return errors


def writing_leaves_out_rows_without_a_slot() -> bool:
    cache = torch.zeros(4, 16, 40, device=DEVICE)
    both = torch.randn(5, 2, 40, device=DEVICE)
    slots = torch.tensor([33, -1, 0, 63, 17], dtype=torch.int32, device=DEVICE)
    expected = cache.clone().flatten(0, 1)
    expected[slots[[0, 2, 3, 4]].long()] = torch.cat([both[[0, 2, 3, 4], 0, :24], both[[0, 2, 3, 4], 1, :16]], dim=1)
    # As on a GPU, also where there is none.
    norm_rope.write_kv = write_rows
    norm_rope.write_latents(both[:, 0, :24], both[:, 1, :16], cache, slots)
    return torch.equal(cache.flatten(0, 1), expected)


def norm_rope_write_errors() -> dict[str, float]:
    """Of cache and absorbed queries together, against the definition in PyTorch; NaN if anything else was written."""
    found = {}
    for pairs_in, pairs_out in ((True, True), (True, False), (False, False)):
        for heads, latent, half, dtype in (
            (1, 16, 4, torch.float32), (3, 24, 8, torch.float32), (16, 512, 32, torch.float16),
            (40, 64, 5, torch.float32), *(() if INTERPRETED else ((16, 512, 32, torch.bfloat16),)),
        ):  # fmt: skip
            rows, rotary, cache, absorbed = norm_rope_inputs(heads, latent, half, dtype, pairs_in, pairs_out)
            slots = torch.tensor([33, 2, 0, 63, 17], dtype=torch.int32, device=DEVICE)
            expected = cache.clone(), absorbed.clone()
            kept = [0, 2, 3, 4]
            own = LatentRows(rows.vectors[kept], rows.queries[kept], rows.weight, rows.epsilon)
            turns = RotaryAngles(rotary.cosines[kept], rotary.sines[kept], pairs_in, pairs_out)
            flat = expected[0].flatten(0, 1)
            flat[slots[kept].long(), :latent] = normed(own.vectors[:, :latent], own.weight, own.epsilon)
            flat[slots[kept].long(), latent:] = rotated(own.vectors[:, latent:], turns)
            expected[1][..., latent:] = rotated(rows.queries[..., -2 * half :], rotary)
            slots[1] = -1
            norm_rope_write_rows(rows, rotary, cache, slots, absorbed)
            untouched = torch.equal(absorbed[..., :latent], expected[1][..., :latent])
            errors = [relative_error(*pair) for pair in zip((cache, absorbed), expected, strict=True)]
            name = f"{pairs_in} {pairs_out} {heads} {latent} {half} {dtype}"
            found[name] = max(errors) if untouched else float("nan")
    return found


def norm_rope_inputs(
    heads: int, latent: int, half: int, dtype: torch.dtype, pairs_in: bool, pairs_out: bool
) -> tuple[LatentRows, RotaryAngles, torch.Tensor, torch.Tensor]:
    """Five rows, as views of wider tensors, with angles whose neighbours are two apart."""
    plain = 6

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    angles = torch.randn(5, half, 2, device=DEVICE)
    rows = LatentRows(
        normal(5, latent + 2 * half + 3)[:, :-3], normal(5, heads, plain + 2 * half), normal(latent), 1e-6
    )
    rotary = RotaryAngles(angles[..., 0], angles[..., 1], pairs_in, pairs_out)
    return rows, rotary, normal(4, 16, latent + 2 * half), normal(5, heads, latent + 2 * half)


def main() -> None:
    found = {
        "errors": {name: errors_of(name, *case) for name, *case in cases()},
        "update_errors": a_plan_takes_the_next_step(),
        "output_rows_errors": output_rows_are_as_in_a_whole_pass(),
        "written": writing_leaves_out_rows_without_a_slot(),
        "norm_rope_errors": norm_rope_write_errors(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
