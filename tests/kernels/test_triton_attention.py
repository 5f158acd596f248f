"""The Triton backend against the reference: interpreted on a CPU here, compiled on a GPU under `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, work

pytest.importorskip("triton")

from tree_kernels.attention import AttentionBatch, triton_planning
from tree_kernels.attention.triton_backend import INVARIANT, TritonAttention, TritonSettings
from tree_kernels.attention.triton_planning import HeadLayout, PlanWorkspace
from tree_kernels.attention.triton_tiling import Tiling, choose_tiling
from tree_kernels.attention.variant import AttentionVariant

WORKER = "triton_worker.py"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return work(WORKER, **INTERPRETED)


def check(found: dict[str, Any]) -> None:
    """fp32 agrees to rounding, half precision to its own."""
    tolerance = {"half precision": 2e-3}
    wrong = {
        name: error
        for name, error in found["errors"].items()
        # Written so that NaN fails.
        if not error <= tolerance.get(name, 1e-2 if name.startswith("bf16") else 2e-6)
    }
    assert not wrong
    assert found["split_invariant"]
    assert max(found["update_errors"]) < 2e-6
    assert max(found["spread_errors"]) < 2e-6
    error, kept = found["outgrown"]
    assert error < 2e-6 and kept
    assert max(found["output_rows_errors"]) < 2e-6
    chunks, groups, taken = found["wanted"]["1"]
    assert chunks == taken > 0 < groups and found["wanted"]["0"] == [0, 0, 0]
    common = found["common_errors"]
    assert {name: error for name, error in common.items() if not error < found["common_tolerance"]} == {}
    assert found["combining"] < 2e-6
    # In the shared part a group's rows are those of its first sequence, and blocks without keys are none.
    assert found["shared_parts"] == {
        "three": [[0, 8, 8, 8, 12, 16, 16, 16, 31, 31, 31], 2 + 1 + 3],
        "one": [[0, *[7] * 10], 2],
        "nested": [[0, 2, 7, 8, 12, 15, 16, 16, 24, 24, 31], 1 + 1 + 1 + 1 + 2 + 2],
        "none": [[0, *[7] * 10], 0],
        "each by itself": [[0, 2, 7, 8, 12, 15, 16, 16, 18, 24, 31], 1 + 1 + 1 + 1 + 1 + 1 + 2 + 2],
    }


def test_every_case_equals_the_reference(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["errors"]) > 40
    check(interpreted)


def test_programs_have_about_as_much_work_of_prompts(interpreted: dict[str, Any]) -> None:
    # In rows' order the programs of a prompt's end would have twice the average.
    assert {name: (most < 1.35, whole) for name, (most, whole) in interpreted["work"].items()} == dict.fromkeys(
        interpreted["work"], (True, True)
    ), interpreted["work"]


@pytest.mark.parametrize(
    ("changed", "specialised"),
    [
        ({}, True),
        ({"width": 64}, True),
        ({"width": 96}, False),
        ({"bytes": 4}, False),
        ({"capability": (10, 0)}, False),
        ({"version": "3.10.0"}, False),
        ({"settings": INVARIANT}, False),
        ({"variant": AttentionVariant(window=64)}, False),
    ],
)
def test_plain_layers_of_16_bits_have_warps_apart_on_hopper(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], specialised: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: changed.get("capability", (9, 0)))
    monkeypatch.setattr("triton.__version__", changed.get("version", "3.6.0"))
    width, size = changed.get("width", 128), changed.get("bytes", 2)
    cache: Any = SimpleNamespace(device=torch.device("cuda"), shape=(4, 16, 8, width), element_size=lambda: size)
    backend = TritonAttention(torch.device("cpu"), replace(changed.get("settings", TritonSettings()), processors=132))
    assert backend._is_specialised(cache, cache, changed.get("variant", AttentionVariant())) is specialised


@pytest.mark.parametrize(
    ("rows", "keys", "sequences", "specialised"),
    [(256, 0, 1, False), (768, 0, 1, True), (256, 1024, 1, True), (8, 65536, 64, False), (64, 8192, 1, True)],
)
def test_blocks_with_much_work_have_warps_apart(rows: int, keys: int, sequences: int, specialised: bool) -> None:
    sizes = {"keys": keys, "sequences": sequences, "kv_heads": 8, "processors": 132, "words": 1}
    tiling = choose_tiling(rows, 4, 128, 2, specialised=True, **sizes)
    assert tiling.specialised is specialised


@pytest.mark.parametrize(
    ("rows", "keys", "sequences", "chosen"),
    [
        (1, 640, 8, (16, 32, 4, 2, 2, 0)),
        (1, 640, 64, (16, 32, 4, 2, 2, 16)),
        (1, 4096, 64, (16, 32, 4, 2, 2, 0)),
        (16, 640, 8, (64, 32, 4, 3, 1, 0)),
        (64, 4096, 1, (64, 32, 4, 3, 1, 0)),
    ],
)
def test_heads_of_256_have_two_programs_an_sm_for_one_row(
    rows: int, keys: int, sequences: int, chosen: tuple[int, ...]
) -> None:
    sizes = {"keys": keys * sequences, "sequences": sequences, "kv_heads": 4, "processors": 132, "words": 1}
    assert choose_tiling(rows, 4, 256, 2, specialised=False, **sizes) == Tiling(*chosen)


@pytest.mark.parametrize(
    ("rows", "keys", "small"), [(16, 128, True), (64, 128, True), (1, 128, False), (64, 1024, False)]
)
def test_trees_in_short_windows_have_two_programs_an_sm(rows: int, keys: int, small: bool) -> None:
    sizes = {"keys": keys, "sequences": 1, "kv_heads": 8, "processors": 132, "words": 1}
    assert (choose_tiling(rows, 8, 64, 2, specialised=False, **sizes) == Tiling(64, 64, 4, 2, 2)) is small


@pytest.mark.parametrize(
    ("rows", "keys", "long"), [(16, 1024, True), (16, 1008, False), (16, 2000, False), (64, 1024, False)]
)
def test_a_window_of_one_tile_too_many_has_longer_tiles(rows: int, keys: int, long: bool) -> None:
    sizes = {"keys": keys, "sequences": 1, "kv_heads": 8, "processors": 132, "words": 1}
    assert (choose_tiling(rows, 4, 128, 2, specialised=False, **sizes) == Tiling(64, 128, 4, 2, 1)) is long


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_case_equals_the_reference_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))


def uniform(rows: int, sequences: int = 1, pages: int = 40, tree: bool = True, page_size: int = 16) -> AttentionBatch:
    return AttentionBatch(
        query_starts=tuple(rows * b for b in range(sequences + 1)),
        prefix_lengths=(9,) * sequences,
        pages=(tuple(range(pages)),) * sequences,
        page_size=page_size,
        parents=((0,) * rows if tree else None,) * sequences,
    )


TOO_MUCH = {
    "rows": uniform(65),
    "sequences": uniform(32, sequences=2, pages=20),
    "pages": uniform(64, pages=41),
    "causal rows": uniform(70, tree=False),
    "page size": uniform(64, page_size=64),
}


@pytest.mark.parametrize("batch", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_plan_refuses_a_step_that_does_not_fit(batch: AttentionBatch) -> None:
    backend = TritonAttention(torch.device("cpu"), TritonSettings(processors=2))
    plan = backend.plan(uniform(64))
    backend.pack(plan, uniform(5, pages=3))
    with pytest.raises(ValueError, match="cannot take"):
        backend.pack(plan, batch)


def split(rows: tuple[int, ...], keys: int, pages: int) -> AttentionBatch:
    """Chains of so many rows at the end of `keys` keys."""
    return AttentionBatch(
        (0, *accumulate(rows)), tuple(keys - count for count in rows), (range(pages),) * len(rows), 16,
        (None,) * len(rows),
    )  # fmt: skip


@pytest.mark.parametrize("rows", [(16,) * 4, (1, 1, 1, 61), (31, 31, 1, 1), (17, 17, 17, 13)], ids=str)
@pytest.mark.parametrize("keys", [512, 4608, 8192])
def test_room_for_splits_suffices_however_rows_are_spread(rows: tuple[int, ...], keys: int) -> None:
    backend = TritonAttention(torch.device("cpu"), replace(INVARIANT, processors=2))
    layout = HeadLayout(4, 2, 128, 128, Tiling(64, 32, 4, 3, 1))
    room = backend._max_chunks(split((16,) * 4, 1024, 512), layout, reserved=True)
    assert backend._max_chunks(split(rows, keys, 512), layout) <= room


class Launches:
    """Stands for a kernel: keeps the sizes that it is launched with."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: object, **constants: int) -> None:
        self.sizes.append((constants["ROWS"], constants["PARTS"], constants["num_warps"]))


@pytest.mark.parametrize("fixed", [True, False])
def test_fixed_splits_are_merged_alike_in_every_batch(monkeypatch: pytest.MonkeyPatch, fixed: bool) -> None:
    """A program of another size adds up in another order on a GPU, which the interpreter does not show."""
    merges = Launches()
    monkeypatch.setattr(triton_planning, "merge_kernel", merges)
    settings = replace(INVARIANT if fixed else TritonSettings(), processors=132)
    backend = TritonAttention(torch.device("cpu"), settings)
    layout = HeadLayout(4, 8, 128, 128, Tiling(64, 32, 4, 3, 1))
    nothing = torch.empty(0)
    for groups, chunks in ((1, 132), (8, 132), (64, 132), (8, 4096), (4096, 65536)):
        integers = torch.empty(groups, 8)
        schedule = PlanWorkspace(integers, *[nothing] * 5, max_chunks=chunks, parts=chunks // groups)
        backend.merge(nothing, schedule, layout)
    assert (len(set(merges.sizes)) == 1) == fixed


def test_a_tree_of_more_than_four_words_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 256 rows, got 257"):
        TritonAttention(torch.device("cpu"), TritonSettings(processors=2)).plan(uniform(257))


def test_tensors_that_the_kernel_cannot_read_are_refused() -> None:
    backend = TritonAttention(torch.device("cpu"), TritonSettings(split_keys=48, processors=2))
    plan = backend.plan(uniform(64))
    query, cache = torch.zeros(64, 4, 16), torch.zeros(40, 16, 2, 16)
    with pytest.raises(ValueError, match="expected one dtype"):
        backend.run(plan, query.half(), cache, cache, 1.0)
    with pytest.raises(ValueError, match="expected contiguous caches"):
        backend.run(plan, query, cache.transpose(0, 1), cache, 1.0)
    with pytest.raises(ValueError, match="positive scale, got 0"):
        backend.run(plan, query, cache, cache, 0.0)
    with pytest.raises(ValueError, match="multiple of 32, got 48"):
        backend.run(plan, query, cache, cache, 1.0)
