"""Runs the Triton backend over every case and writes what it found as JSON to standard output.

A process of its own, because Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from conftest import Case, Spec, make_case
from examples import is_full

from target_service.model.cuda_graphs.sizes import Bucket, capacity
from tree_kernels.attention import AttentionBatch, AttentionPlan, TreeAttention, plan_integers
from tree_kernels.attention.reference import combined
from tree_kernels.attention.triton_backend import INVARIANT, TritonAttention, TritonSettings
from tree_kernels.attention.triton_planning import HeadLayout, PartialRows
from tree_kernels.attention.triton_tiling import SPECIALISED, Merging, Tiling
from tree_kernels.conditional_launch import launched_if_positive
from tree_kernels.window_frames import WindowFrames

INTERPRETED = not torch.cuda.is_available()
# Of combinations that take long, values of each.
IN_TURN = INTERPRETED and not is_full()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The smallest tile that tensor cores take, so that small inputs have many.
SMALL = Tiling(block_rows=16, block_keys=16, warps=4, stages=1, programs_per_sm=1, merge_rows=16)
WIDE = Tiling(block_rows=32, block_keys=32, warps=4, stages=2, programs_per_sm=1, apart=True)
# As wide as words reach, and wider.
TALL = [Tiling(16, keys, 4, 2, 1, 0 if apart else 16, apart) for keys in (64, 128) for apart in (False, True)]
RAGGED: list[Spec] = [
    (3, 1, "tree"), (47, 16, "tree"), (0, 21, "causal"), (63, 5, "chain"), (0, 0, "causal"), (130, 3, "causal"),
]  # fmt: skip


def cases() -> Iterator[tuple[str, dict[str, Any], TritonSettings]]:
    """Name, arguments of `make_case`, settings."""
    specs: list[Spec]
    balanced = TritonSettings(tiling=SMALL, processors=5)
    wide = TritonSettings(tiling=WIDE, processors=5)
    for page_size in (1, 16, 64):
        arguments = {"specs": RAGGED, "page_size": page_size, "width": 16}
        if page_size != 16 or not IN_TURN:
            yield f"page {page_size}", arguments, balanced
        if page_size == 16 or not IN_TURN:
            yield f"page {page_size}, tiles of 32", arguments, wide
    # Both sizes, and both ways to merge.
    for tiling in (TALL[0], TALL[3]) if IN_TURN else TALL:
        specs = [(127, 64, "tree"), (70, 9, "tree"), (3, 90, "causal"), (500, 129, "tree"), (61, 1, "tree")]
        arguments = {"specs": specs, "width": 16, "kv_heads": 1}
        yield f"{tiling}", arguments, TritonSettings(tiling=tiling, processors=7)
    # Others' groups are 1, 2 and 3.
    for group in (5, 8) if IN_TURN else range(1, 9):
        specs = [(33, 7, "tree"), (20, 1, "tree")]
        yield f"group {group}", {"specs": specs, "group": group, "width": 16}, balanced
    widths = ((64, 64), (128, 128), (96, 64), (96, 96), (192, 128), (24, 40))
    for width, value_width in widths[3:] if IN_TURN else widths:
        arguments = {"specs": RAGGED[:4], "width": width, "value_width": value_width}
        yield f"widths {width} and {value_width}", arguments, balanced
    for rows in (65, 129) if IN_TURN else (1, 2, 63, 64, 65, 129, 256):
        arguments = {"specs": [(19, rows, "tree")], "width": 16, "group": 1, "kv_heads": 1}
        yield f"{rows} rows", arguments, balanced
    # Others have 3 to 7.
    for processors in (1, 64) if IN_TURN else (1, 2, 7, 64):
        settings = TritonSettings(tiling=SMALL, processors=processors)
        yield f"{processors} programs", {"specs": RAGGED, "width": 16}, settings
    apart = replace(SMALL, merge_rows=0)
    merged = ((40, None), (40, Merging(2, 4, 1)), (72, None), (40, Merging(4, 8, 2)))
    for processors, merging in merged[2:] if IN_TURN else merged:
        # One sequence for all of them, which leaves so many partials to a launch of its own; two columns of values.
        arguments = {"specs": [(700, 3, "tree")], "kv_heads": 1, "group": 3, "width": 16, "value_width": 256}
        settings = TritonSettings(tiling=apart, processors=processors, merging=merging)
        yield f"merged apart, {processors} programs, {merging}", arguments, settings
    # Others have 32.
    for split_keys in (16, 128) if IN_TURN else (16, 48, 128):
        settings = TritonSettings(split_keys, SMALL, 3)
        yield f"split every {split_keys} keys", {"specs": RAGGED, "width": 16}, settings
    yield from variant_cases(balanced)
    forms = ("balanced", balanced), ("wide", wide), ("fixed", TritonSettings(32, SMALL, 3))
    for turn, (name, own) in enumerate(forms):
        specs = [(64, 5, "causal"), (47, 16, "causal"), (1, 3, "causal"), (130, 1, "causal")]
        arguments = {"specs": specs, "width": 16, "queries_only": True}
        if turn != 1 or not IN_TURN:
            yield f"without keys, {name}", arguments, own
        if turn == 1 or not IN_TURN:
            yield f"without keys, window, {name}", arguments | {"window": 20, "sinks": True}, own
    yield "a prompt", {"specs": [(0, 90, "causal")], "width": 16}, balanced
    yield "half precision", {"specs": RAGGED, "width": 16, "dtype": torch.float16}, balanced
    yield "own tiling", {"specs": RAGGED[:3], "width": 32}, TritonSettings(processors=4)
    if not INTERPRETED:
        yield from device_cases()
    rng = random.Random(0)
    for i in range(3 if IN_TURN else 20):
        kinds = ("tree", "chain", "causal", "star")
        specs = [(rng.randrange(70), rng.randrange(20), rng.choice(kinds)) for _ in range(rng.randrange(1, 5))]
        settings = TritonSettings(rng.choice((None, 32)), SMALL, rng.randrange(1, 9))
        arguments = {
            "specs": [*specs, (rng.randrange(9), 1, "tree")],
            "page_size": rng.choice((1, 16)),
            "kv_heads": rng.randrange(1, 3),
            "group": rng.randrange(1, 5),
            "width": 16,
            "seed": i,
            "window": rng.choice((None, rng.randrange(1, 60))),
            "sinks": rng.random() < 0.3,
            "chunked": rng.random() < 0.4,
            "slopes": rng.random() < 0.3,
        }
        yield f"random {i}", arguments, settings


def variant_cases(balanced: TritonSettings) -> Iterator[tuple[str, dict[str, Any], TritonSettings]]:
    """Windows shorter and longer than trees, tiles and prefixes; caps; sinks; all of them, in every form of schedule.
    Keys that no window reaches are NaN."""
    for window in (1, 5, 16, 300) if IN_TURN else (1, 2, 5, 16, 33, 64, 300):
        for page_size in ((1,) if IN_TURN else (1, 16)) if window == 5 else (16,):
            arguments = {"specs": RAGGED, "page_size": page_size, "width": 16, "window": window}
            yield f"window {window}, page {page_size}", arguments, balanced
    whole = {"window": 21, "score_cap": 3.0, "sinks": True, "slopes": True}
    settings = {
        "tiles of 32": TritonSettings(tiling=WIDE, processors=5),
        "fixed": TritonSettings(32, SMALL, 3),
        "tall": TritonSettings(tiling=TALL[1], processors=7),
        "merged apart": TritonSettings(tiling=replace(SMALL, merge_rows=0), processors=40),
        "one program": TritonSettings(tiling=SMALL, processors=1),
    }
    for name, one in settings.items():
        yield f"all variants, {name}", {"specs": RAGGED, "width": 16, "group": 3, **whole}, one
        # Among all variants are slopes and sinks too.
        if not IN_TURN or name == "fixed":
            yield f"slopes, {name}", {"specs": RAGGED, "width": 16, "group": 3, "slopes": True}, one
        if not IN_TURN or name == "merged apart":
            yield f"sinks, {name}", {"specs": RAGGED, "width": 16, "sinks": True}, one
        if not IN_TURN or name == "tall":
            yield f"chunks, {name}", {"specs": RAGGED, "width": 16, "window": 16, "chunked": True}, one
    yield "cap", {"specs": RAGGED, "width": 16, "score_cap": 0.7}, balanced
    specs: list[Spec] = [(300, 70, "causal"), (200, 65, "tree"), (3, 130, "tree")]
    group = 2 if IN_TURN else 5
    yield "long, window", {"specs": specs, "width": 16, "kv_heads": 1, "group": group, "window": 50}, balanced
    for window in (205,) if IN_TURN else (3, 64, 205):
        yield (
            f"chunks of {window}",
            {"specs": [*specs, *RAGGED], "kv_heads": 1, "width": 16, "window": window, "chunked": True},
            balanced,
        )


def device_cases() -> Iterator[tuple[str, dict[str, Any], TritonSettings]]:
    """What only a GPU runs: bfloat16, real sizes, the backend's own tilings, more than 2**31 bytes of cache."""
    for page_size in (1, 16, 64):
        for group, width in ((4, 128), (8, 128), (3, 64), (7, 96)) if page_size == 16 else ((4, 128),):
            for rows in (1, 16, 64, 256):
                specs: list[Spec] = [(1000, rows, "tree"), (37, 1, "tree"), (5000, rows, "chain")]
                arguments = {
                    "specs": specs, "page_size": page_size, "group": group, "width": width, "dtype": torch.bfloat16
                }  # fmt: skip
                yield f"bf16 {page_size} {group} {width} {rows}", arguments, TritonSettings()
                yield f"bf16 split {page_size} {group} {width} {rows}", arguments, TritonSettings(1024)
    for rows in (1, 16, 64, 256):
        for window, cap, sinks in ((1024, None, True), (128, 50.0, False), (40, None, False)):
            for width, group in ((128, 4), (256, 2), (64, 8), (512, 2)):
                arguments = {
                    "specs": [(9000, rows, "tree"), (37, 1, "tree"), (5000, rows, "causal")], "group": group,
                    "width": width, "dtype": torch.bfloat16, "window": window, "score_cap": cap, "sinks": sinks,
                }  # fmt: skip
                yield f"bf16 window {window}, {rows} rows, width {width}", arguments, TritonSettings()
                yield f"bf16 window {window}, {rows} rows, width {width}, fixed", arguments, INVARIANT
                yield (
                    f"bf16 chunks of {window}, {rows} rows, width {width}",
                    arguments | {"chunked": True},
                    TritonSettings(),
                )
    specs = [(100, 700, "causal"), (3000, 33, "tree"), (0, 1, "causal")]
    for rows in (1, 16, 64):
        # Multi-head latent attention in its expanded form.
        arguments = {
            "specs": [(900, rows, "tree"), (77, 1, "tree")], "group": 1, "kv_heads": 16, "width": 192,
            "value_width": 128, "dtype": torch.bfloat16,
        }  # fmt: skip
        yield f"bf16 latent {rows}", arguments, TritonSettings()
    yield "bf16 prefill", {"specs": specs, "group": 4, "width": 128, "dtype": torch.bfloat16}, TritonSettings()
    yield from specialised_cases()


def specialised_cases() -> Iterator[tuple[str, dict[str, Any], TritonSettings]]:
    """By the warp-specialised kernel: prompts and trees of one word and of four, blocks with rows for one warpgroup and
    for both, groups in one chunk and in many, chunks of many groups, and more than 2**31 bytes of cache."""
    word: list[Spec] = [
        (1000, 64, "tree"),
        (37, 1, "tree"),
        (5000, 200, "causal"),
        (0, 300, "causal"),
        (0, 0, "causal"),
    ]
    words: list[Spec] = [(70, 129, "tree"), (513, 250, "tree"), (64, 64, "chain"), (0, 65, "causal")]
    for page_size, group, width in ((16, 4, 128), (1, 3, 64), (64, 8, 128), (16, 1, 64), (16, 5, 128)):
        # Each width, group, dtype and number of words is compiled anew, for seconds.
        for dtype in (torch.bfloat16, torch.float16) if group == 4 else (torch.bfloat16,):
            for name, specs in (("a word", word), ("words", words)):
                arguments = {"specs": specs, "page_size": page_size, "group": group, "width": width, "dtype": dtype}
                for processors in (None, 3):
                    settings = TritonSettings(tiling=SPECIALISED, processors=processors)
                    of = f"{page_size} {group} {width} {dtype}, {name}, {processors} processors"
                    yield f"bf16 specialised {of}", arguments, settings


def run(settings: TritonSettings, case: Case) -> torch.Tensor:
    backend = TritonAttention(DEVICE, settings)
    return backend.run(backend.plan(case.batch), case.query, case.key_cache, case.value_cache, case.scale, case.variant)


def reference(case: Case) -> torch.Tensor:
    backend = TreeAttention("reference", DEVICE)
    return backend.run(backend.plan(case.batch), case.query, case.key_cache, case.value_cache, case.scale, case.variant)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def error_of(name: str, arguments: dict[str, Any], settings: TritonSettings) -> float:
    """NaN if a plan's second run, for another layer say, does not give the same bits. Without a GPU, where a run takes
    long, a case of each way to divide the work has a second."""
    once_more = ("page 1", "split every 128", "merged apart, 40") if IN_TURN else ("page", "split", "merged")
    runs = 2 if not INTERPRETED or name.startswith(once_more) else 1
    case = make_case(**{"device": DEVICE, **arguments})
    backend = TritonAttention(DEVICE, settings)
    plan: AttentionPlan = backend.plan(case.batch)
    expected = reference(case)
    if case.variant.window is not None:
        plan, case = in_frames(backend, plan, case, case.variant.window)
    tensors = case.query, case.key_cache, case.value_cache
    outputs = [backend.run(plan, *tensors, case.scale, case.variant) for _ in range(runs)]
    return relative_error(outputs[0], expected) if torch.equal(outputs[0], outputs[-1]) else float("nan")


def in_frames(backend: TritonAttention, plan: AttentionPlan, case: Case, window: int) -> tuple[AttentionPlan, Case]:
    """The case as layers with a window have it: in frames of another order, those before every window given up."""
    batch, count = case.batch, len(case.key_cache)
    frames = WindowFrames(count, count, batch.page_size, window, DEVICE)
    for pages, prefix in reversed(list(zip(batch.pages, batch.prefix_lengths, strict=True))):
        frames.hold(pages)
        frames.drop(pages[: frames.first_page(prefix)], lambda _: False)
    frames.send()
    held = [page for page in range(count) if frames.has(page)]
    moved = [cache.new_zeros(count + 1, *cache.shape[1:]) for cache in (case.key_cache, case.value_cache)]
    for cache, pool in zip((case.key_cache, case.value_cache), moved, strict=True):
        pool[list(frames.frames_of(held))] = cache[held]
    return backend.plan_in_frames(plan, frames), replace(case, key_cache=moved[0], value_cache=moved[1])


def only(case: Case, b: int) -> Case:
    """Sequence b of a batch, alone, in the same pages."""
    batch = case.batch
    start, end = batch.query_starts[b], batch.query_starts[b + 1]
    alone = AttentionBatch(
        (0, end - start), (batch.prefix_lengths[b],), (batch.pages[b],), batch.page_size, (batch.parents[b],)
    )
    return Case(alone, case.query[start:end], case.key_cache, case.value_cache, case.scale, case.variant)


def split_results_do_not_depend_on_the_batch() -> bool:
    # A long sequence of many partials, alone and where there is room for more groups than chunks.
    beside: list[Spec] = [(5000, 1, "causal"), *[(20, 15, "causal")] * 12]
    for specs, settings, compared, variant in (
        (RAGGED, TritonSettings(32, SMALL, 3), len(RAGGED), {}),
        (RAGGED, TritonSettings(32, SMALL, 3), len(RAGGED), {"window": 40, "sinks": True}),
        (beside, replace(INVARIANT, processors=3), 2, {}),
    ):
        case = make_case(specs, kv_heads=1, group=4, width=16, device=DEVICE, seed=1, **variant)
        together = run(settings, case)
        starts = case.batch.query_starts
        for b in range(compared):
            if case.batch.row_counts[b] and not torch.equal(
                run(settings, only(case, b)), together[starts[b] : starts[b + 1]]
            ):
                return False
    return True


def a_plan_takes_the_next_step() -> list[float]:
    """Errors of steps of other shapes, run through the tensors of one plan without planning again."""
    backend = TritonAttention(DEVICE, TritonSettings(tiling=SMALL, processors=5))
    first = make_case([(70, 40, "tree"), (40, 20, "tree"), (9, 9, "tree")], width=16, device=DEVICE)
    plan = backend.plan(first.batch)
    backend.run(plan, first.query, first.key_cache, first.value_cache, first.scale)
    errors = []
    steps: list[list[Spec]] = [
        [(30, 1, "tree"), (5, 17, "tree"), (8, 50, "causal")],
        [(100, 1, "tree"), (0, 0, "tree"), (0, 0, "tree")],
        [(0, 64, "tree"), (60, 3, "chain"), (1, 1, "tree")],
    ]
    for step in steps:
        case = make_case(step, width=16, spare_pages=0, device=DEVICE)
        packed = torch.frombuffer(backend.pack(plan, case.batch), dtype=torch.int32)
        plan.integers[: len(packed)] = packed
        # What a captured graph replays: prepare, attend, merge.
        plan.clear_schedules()
        query = torch.zeros(first.query.shape, device=DEVICE)
        query[: case.batch.rows] = case.query
        output = backend.run(plan, query, case.key_cache, case.value_cache, case.scale, case.variant)
        errors.append(relative_error(output[: case.batch.rows], reference(case)))
    return errors


def a_captured_sequence_outgrows_its_first_length() -> tuple[float, bool]:
    """Error where a sequence advances on the device beyond the splits of the length that was captured; and whether a
    plan without room for it is kept within its own."""
    case = make_case([(1536, 1, "tree")], kv_heads=1, group=4, width=16, spare_pages=0, device=DEVICE)
    short = replace(case.batch, prefix_lengths=(1535,))
    largest = capacity(Bucket(1, 1), case.batch.page_size, len(case.batch.pages[0]) + 9)
    backend = TritonAttention(DEVICE, replace(INVARIANT, processors=3))
    plan = backend.plan(largest, torch.zeros(plan_integers(largest), dtype=torch.int32, device=DEVICE))
    backend.run(plan, case.query, case.key_cache, case.value_cache, case.scale, case.variant)
    packed = torch.frombuffer(backend.pack(plan, short), dtype=torch.int32)
    plan.integers[: len(packed)] = packed
    plan.prefix_lengths += 1
    plan.clear_schedules()
    output = backend.run(plan, case.query, case.key_cache, case.value_cache, case.scale, case.variant)
    without_room = backend.plan(short)
    backend.run(without_room, case.query, case.key_cache, case.value_cache, case.scale, case.variant)
    ((layout, schedule),) = without_room.schedules.items()
    whole = torch.full((schedule.max_chunks + 64, 16), -7, dtype=torch.int32, device=DEVICE)
    own_integers = backend._integers
    backend._integers = (
        lambda *shape: (  # type: ignore[method-assign]
            whole[: shape[0]] if shape == (schedule.max_chunks, 16) else own_integers(*shape)
        )
    )
    without_room.prefix_lengths += 1
    without_room.clear_schedules()
    again = backend.schedule_of(without_room, layout)
    kept = bool((whole[schedule.max_chunks :] == -7).all()) and int(again.totals[1]) == schedule.max_chunks
    return relative_error(output, reference(case)), kept


def a_captured_step_takes_rows_spread_in_any_way() -> list[float]:
    """Errors of steps that fill a bucket with fixed splits, most of the rows those of one sequence."""
    backend = TritonAttention(DEVICE, TritonSettings(32, SMALL, 3))
    spread: list[list[Spec]] = [
        [(187, 4, "chain")] * 4,
        [(190, 1, "chain"), (190, 1, "chain"), (190, 1, "chain"), (179, 13, "chain")],
        [(176, 16, "causal"), (0, 0, "causal"), (0, 0, "causal"), (0, 0, "causal")],
    ]
    made = [make_case(specs, kv_heads=1, group=4, width=16, spare_pages=0, device=DEVICE) for specs in spread]
    largest = capacity(Bucket(16, 4), made[0].batch.page_size, 12)
    plan = backend.plan(largest, torch.zeros(plan_integers(largest), dtype=torch.int32, device=DEVICE))
    errors = []
    for case in made:
        packed = torch.frombuffer(backend.pack(plan, case.batch), dtype=torch.int32)
        plan.integers[: len(packed)] = packed
        kept = dict(plan.schedules)
        plan.clear_schedules()
        output = backend.run(plan, case.query, case.key_cache, case.value_cache, case.scale, case.variant)
        assert all(plan.schedules[layout].max_chunks == one.max_chunks for layout, one in kept.items())
        assert plan.present is not None and int(plan.present) == case.batch.rows
        errors.append(relative_error(output, reference(case)))
    return errors


def output_rows_are_as_in_a_whole_pass() -> list[float]:
    """Errors of levels of trees, as a draft reads them: some rows of every tail, over the keys of the whole tail."""
    errors = []
    for tiling in (SMALL, WIDE):
        backend = TritonAttention(DEVICE, TritonSettings(tiling=tiling, processors=5))
        case = make_case([(70, 33, "tree"), (40, 33, "tree"), (9, 12, "tree")], width=16, device=DEVICE)
        plan, expected = backend.plan(case.batch), reference(case)
        assert plan.present is None
        levels = (1, 9), (17, 33), (9, 17), (0, 1), (32, 33)
        for first, end in levels[:2] if IN_TURN and tiling is WIDE else levels:
            plan.output_rows = first, end
            plan.clear_schedules()
            output = backend.run(plan, case.query, case.key_cache, case.value_cache, case.scale, case.variant)
            starts = case.batch.query_starts
            rows = [row for a, b in itertools.pairwise(starts) for row in range(a + first, min(a + end, b))]
            errors.append(relative_error(output[rows], expected[rows]))
    return errors


def with_common_pages(case: Case, keys: int, others: tuple[int, ...] = ()) -> Case:
    """The case with its sequences' first `keys` keys in pages that they have in common, but for `others`."""
    batch = case.batch
    return in_groups(case, {tuple(b for b in range(batch.sequences) if b not in others and batch.row_counts[b]): keys})


def in_groups(case: Case, groups: dict[tuple[int, ...], int]) -> Case:
    """The case with so many of the first keys of each group's sequences in pages that they have in common."""
    batch = case.batch
    pages, common = [tuple(held) for held in batch.pages], [0] * batch.sequences
    for members, keys in groups.items():
        count = keys // batch.page_size
        for b in members:
            pages[b], common[b] = (*pages[members[-1]][:count], *pages[b][count:]), count
    return replace(case, batch=replace(batch, pages=tuple(pages), common_pages=tuple(common)))


def common_pages_are_read_once() -> dict[str, float]:
    """Errors where sequences have pages in common, in steps of every kind: planned anew; of one plan, step by step, the
    last without common pages; with sinks; and of layers that read them for each sequence, with windows and slopes."""
    specs: list[Spec] = [
        (141, 7, "tree"), (131, 1, "tree"), (0, 0, "tree"), (128, 13, "causal"), (40, 5, "tree"), (150, 9, "chain")
    ]  # fmt: skip
    settings = {
        "small": TritonSettings(tiling=SMALL, processors=5),
        "apart": TritonSettings(tiling=replace(WIDE, merge_rows=0), processors=7),
        "tall": TritonSettings(tiling=TALL[3], processors=40),
    }
    if not INTERPRETED:
        settings |= {"specialised": TritonSettings(tiling=SPECIALISED), "own": TritonSettings()}
    found = {}
    for name, one in settings.items():
        kind = {} if INTERPRETED else {"width": 128, "dtype": torch.bfloat16}
        arguments = {"width": 16, "kv_heads": 1, "group": 3, "device": DEVICE, **kind}
        variants = {"": {}, ", sinks": {"sinks": True}, ", window": {"window": 170}, ", slopes": {"slopes": True}}
        for of, variant in variants.items() if name == "small" else [("", {})]:
            case = with_common_pages(make_case(specs, **arguments, **variant), 128, others=(4,))
            found[name + of] = relative_error(run(one, case), reference(case))
        if name == "tall":
            continue
        backend = TritonAttention(DEVICE, one)
        first = with_common_pages(make_case(specs, **arguments), 128, others=(4,))
        plan = backend.plan(first.batch)
        backend.run(plan, first.query, first.key_cache, first.value_cache, first.scale)
        long = make_case([(256, 3, "tree"), (261, 9, "tree"), *[(0, 0, "tree")] * 4], **arguments)
        for of, case in (("longer", with_common_pages(long, 256)), ("none", long)):
            packed = torch.frombuffer(backend.pack(plan, case.batch), dtype=torch.int32)
            plan.integers[: len(packed)] = packed
            plan.clear_schedules()
            query = torch.zeros_like(first.query)
            query[: case.batch.rows] = case.query
            output = backend.run(plan, query, case.key_cache, case.value_cache, case.scale)
            found[f"{name}, {of}"] = relative_error(output[: case.batch.rows], reference(case))
    return found


def groups_read_their_pages_once() -> tuple[dict[str, float], dict[str, tuple[list[int], int]]]:
    """Errors of steps with several groups in plans of their own, and in that of a captured size, one after the other;
    and of the latter where the rows begin that each sequence has in the shared part, and how many blocks of 16 packed
    rows that has."""
    trees: list[Spec] = [
        (141, 2, "tree"), (130, 5, "chain"), (150, 1, "tree"), (64, 4, "tree"), (390, 3, "tree"), (260, 1, "causal"),
        (0, 0, "tree"), (300, 2, "tree"), (261, 6, "tree"), (256, 7, "causal"),
    ]  # fmt: skip
    few: list[Spec] = [(128 + 3 * b, 1, "tree") for b in range(7)] + [(0, 0, "tree")] * 3
    steps: dict[str, tuple[list[Spec], dict[tuple[int, ...], int]]] = {
        "three": (trees, {(0, 1, 2): 128, (4, 5): 256, (7, 8, 9): 256}),
        "one": (few, {(0, 1, 2, 3, 4, 5, 6): 128}),
        # Two groups that begin alike, of which one has fewer pages; and one whose sequences are apart.
        "nested": (trees, {(4, 5, 7, 8, 9): 128, (5, 9): 256, (0, 2): 128}),
        "none": (few, {}),
        "each by itself": (trees, {(b,): 128 for b in (0, 1, 2, 4, 5, 7, 8, 9)}),
    }
    kind = {} if INTERPRETED else {"width": 128, "dtype": torch.bfloat16}
    arguments = {"width": 16, "kv_heads": 1, "group": 3, "device": DEVICE, **kind}
    settings = {"small": TritonSettings(tiling=SMALL, processors=7)}
    settings["apart"] = TritonSettings(tiling=replace(WIDE, merge_rows=0), processors=5)
    if not INTERPRETED:
        settings |= {"specialised": TritonSettings(tiling=SPECIALISED), "own": TritonSettings()}
    errors, parts = {}, {}
    largest = capacity(Bucket(32, 10, common=True), 16, 30)
    for of, one in settings.items():
        backend = TritonAttention(DEVICE, one)
        plan = backend.plan(largest, torch.zeros(plan_integers(largest), dtype=torch.int32, device=DEVICE))
        for name, (specs, groups) in steps.items():
            seldom = IN_TURN and name not in ("three", "nested")
            if seldom and of != "small":
                continue
            case = in_groups(make_case(specs, **arguments), groups)
            expected = reference(case)
            if of == "small" and not seldom:
                errors[f"{name}, planned"] = relative_error(run(one, case), expected)
            packed = torch.frombuffer(backend.pack(plan, case.batch), dtype=torch.int32)
            plan.integers[: len(packed)] = packed
            plan.clear_schedules()
            query = torch.full((largest.rows, *case.query.shape[1:]), torch.nan, device=DEVICE, dtype=case.query.dtype)
            query[: case.batch.rows] = case.query
            output = backend.run(plan, query, case.key_cache, case.value_cache, case.scale)
            errors[f"{name}, {of}"] = relative_error(output[: case.batch.rows], expected)
            assert plan.parts is not None
            shared = plan.parts.shared
            if of == "small":
                (schedule,) = shared.schedules.values()
                parts[name] = shared.query_starts.tolist(), int(schedule.totals[2])
    return errors, parts


def combining() -> float:
    """Error of what combines common keys and others against its definition, of members with few and with all of their
    mass in either part, and of rows that are none."""
    batch = AttentionBatch((0, 3, 3, 8, 10), (130,) * 4, (tuple(range(20)),) * 4, 16, (None,) * 4, (8, 8, 0, 8))
    backend = TritonAttention(DEVICE, TritonSettings(processors=3))
    torch.manual_seed(5)
    parts = [
        PartialRows(torch.randn(10, 18, 24, device=DEVICE), 9 * torch.randn(10, 18, device=DEVICE)) for _ in range(2)
    ]
    parts[0].lse[:, 0] = -torch.inf
    parts[0].lse[3:8] = -torch.inf
    expected = combined(parts, torch.float32)
    # What is not a member's is never written.
    parts[0].values[3:8], parts[0].lse[3:8] = torch.nan, torch.nan
    output = torch.full((10, 18, 24), torch.nan, device=DEVICE)
    backend.combine(*parts, backend.plan(batch), output)
    return relative_error(output, expected)


def work_of_prompts() -> dict[str, Any]:
    """Of prompts alone, among others and behind a prefix: the tiles of the chunk that has most, to the average, and
    whether each tile of each group lies in one chunk."""
    batches: dict[str, list[Spec]] = {
        "alone": [(0, 160, "causal")],
        "behind a prefix": [(75, 161, "causal")],
        "an odd number of blocks": [(0, 100, "causal")],
        "among others": [(0, 90, "causal"), (210, 1, "causal"), (20, 7, "tree"), (0, 0, "causal"), (33, 130, "causal")],
    }
    found: dict[str, Any] = {}
    for name, specs in batches.items():
        case = make_case(specs, kv_heads=2, group=4, width=16, device=DEVICE)
        backend = TritonAttention(DEVICE, TritonSettings(tiling=SMALL, processors=23))
        schedule = backend.schedule_of(backend.plan(case.batch), HeadLayout(4, 2, 16, 16, SMALL))
        per_chunk, chunks, groups = schedule.totals.tolist()
        tiles = [0] * chunks
        whole = True
        for number, record in enumerate(schedule.groups[:groups].tolist()):
            first, seen = record[5], record[6]
            for tile in range(first, first + seen):
                chunk = tile // per_chunk
                tiles[chunk] += 1
                begin, end = schedule.chunk_table[chunk, 8:10].tolist()
                whole = whole and begin <= number <= end
        found[name] = (max(tiles) * 23 / sum(tiles), whole)
    return found


def work_that_is_wanted_or_not() -> dict[int, list[int]]:
    """Chunks and groups of a tree and a chain, and chunks with a group, by the number on which the launch depends."""
    case = make_case([(75, 9, "tree"), (40, 3, "causal")], kv_heads=2, group=4, width=16, device=DEVICE)
    backend, found = TritonAttention(DEVICE, TritonSettings(tiling=SMALL, processors=23)), {}
    for number in (1, 0):
        with launched_if_positive(torch.tensor([number], dtype=torch.int32, device=DEVICE)):
            schedule = backend.schedule_of(backend.plan(case.batch), HeadLayout(4, 2, 16, 16, SMALL))
        taken = int((schedule.chunk_table[:, 8] <= schedule.chunk_table[:, 9]).sum())
        found[number] = [*schedule.totals.tolist()[1:], taken]
    return found


def main() -> None:
    """A regular expression as argument selects cases, for a checker that takes long over each."""
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    group_errors, shared_parts = groups_read_their_pages_once()
    found = {
        "errors": {name: error_of(name, *case) for name, *case in cases() if wanted.search(name)},
        "split_invariant": split_results_do_not_depend_on_the_batch(),
        "update_errors": a_plan_takes_the_next_step(),
        "outgrown": a_captured_sequence_outgrows_its_first_length(),
        "work": work_of_prompts(),
        "wanted": work_that_is_wanted_or_not(),
        "spread_errors": a_captured_step_takes_rows_spread_in_any_way(),
        "output_rows_errors": output_rows_are_as_in_a_whole_pass(),
        "common_errors": common_pages_are_read_once() | group_errors,
        "shared_parts": shared_parts,
        "common_tolerance": 2e-6 if INTERPRETED else 1e-2,
        "combining": combining(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
