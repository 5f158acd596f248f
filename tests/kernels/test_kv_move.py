"""Writes and moves in the paged cache against a loop over slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tree_kernels.paging import write_kv
from tree_kernels.verification import DeviceVerifier, RowsToVerify, Verdicts, move_accepted, move_kv


def caches(page_size: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Keys of width 8 and values of width 6, alternating."""
    generator = torch.Generator().manual_seed(page_size)
    return [
        torch.randn(64 // page_size, page_size, 2, 6 if i % 2 else 8, generator=generator).to(dtype)
        for i in range(count)
    ]


def moved_by_loop(cache: Tensor, source: list[int], target: list[int]) -> Tensor:
    page_size = cache.shape[1]
    result = cache.clone()
    for s, t in zip(source, target, strict=True):
        result[t // page_size, t % page_size] = cache[s // page_size, s % page_size]
    return result


MOVES = {
    "apart": ([40, 50, 60], [1, 2, 3]),
    "overlapping down": ([3, 4, 7, 9], [2, 3, 4, 5]),
    "overlapping up": ([2, 3, 4], [3, 4, 5]),
    "swap": ([5, 6], [6, 5]),
    "in place": ([7, 8], [7, 8]),
    "one source twice": ([9, 9], [1, 2]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("source", "target"), MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_every_cache_moves_as_a_loop_would(
    page_size: int, source: list[int], target: list[int], as_tensor: bool
) -> None:
    every = caches(page_size)
    expected = [moved_by_loop(cache, source, target) for cache in every]
    if as_tensor:
        move_kv(every, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    else:
        move_kv(every, source, target)
    assert all(map(torch.equal, every, expected))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_rows_land_in_their_slots_and_nowhere_else(page_size: int, dtype: torch.dtype) -> None:
    key_cache, value_cache = caches(page_size, count=2, dtype=dtype)
    before = key_cache.clone(), value_cache.clone()
    slots = torch.tensor([33, 0, 63, 17, 16])
    key, value = torch.randn(5, 2, 8).to(dtype), torch.randn(5, 2, 6).to(dtype)
    write_kv(key, value, key_cache, value_cache, slots)
    for cache, old, new in ((key_cache, before[0], key), (value_cache, before[1], value)):
        assert torch.equal(cache.flatten(0, 1)[slots], new)
        others = torch.ones(64, dtype=torch.bool)
        others[slots] = False
        assert torch.equal(cache.flatten(0, 1)[others], old.flatten(0, 1)[others])


def test_no_rows_and_no_caches_are_no_error() -> None:
    key_cache, value_cache = caches(16, count=2)
    write_kv(torch.empty(0, 2, 8), torch.empty(0, 2, 6), key_cache, value_cache, torch.empty(0, dtype=torch.int64))
    move_kv([], [1], [2])


def test_as_many_targets_as_sources() -> None:
    with pytest.raises(ValueError, match="expected 2 target slots, got 1"):
        move_kv(caches(16), [1, 2], [3])


def accepted(paths: list[list[int]], rows: int) -> tuple[Tensor, Verdicts]:
    """Parameters and verdicts of sequences of `rows` rows each, which accepted these rows."""
    count = len(paths)
    verifier = DeviceVerifier("cpu", 10, count, rows * count)
    parameters = torch.from_numpy(verifier.pack([RowsToVerify(b * rows, rows) for b in range(count)]))
    tensor = torch.full((2 * count + rows * count,), 99, dtype=torch.int32)
    for b, path in enumerate(paths):
        tensor[b] = len(path)
        tensor[2 * count + b * rows :][: len(path)] = torch.tensor(path)
    return parameters, Verdicts.over(tensor, count)


PATHS = {
    "nobody moves": [[], [1, 2, 3]],
    "one row": [[5], []],
    "onto rows that moved on": [[2, 3, 5], [1, 3, 4]],
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS)
def test_accepted_rows_come_to_lie_behind_their_root(page_size: int, paths: list[list[int]]) -> None:
    keys, values = torch.stack(caches(page_size)[::2]), torch.stack(caches(page_size)[1::2])
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(page_size))[:12].int()
    expected = []
    for pool in (keys, values):
        moved = pool.clone()
        for layer, before in zip(moved, pool, strict=True):
            for b, path in enumerate(paths):
                for place, row in enumerate(path, start=1):
                    layer.flatten(0, 1)[slots[6 * b + place]] = before.flatten(0, 1)[slots[6 * b + row]]
        expected.append(moved)
    parameters, verdicts = accepted(paths, 6)
    move_accepted(keys, values, slots, parameters, verdicts)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_a_row_without_a_slot_stays_where_it_is() -> None:
    keys, values = torch.stack(caches(16)[::2]), torch.stack(caches(16)[1::2])
    before = keys.clone()
    parameters, verdicts = accepted([[2, 4]], 6)
    move_accepted(keys, values, torch.tensor([0, 1, -1, 3, 4, 5], dtype=torch.int32), parameters, verdicts)
    assert torch.equal(keys, before)
    move_accepted(keys, values, torch.tensor([0, 1, -1, 2, 4, 5], dtype=torch.int32), *accepted([[3, 4]], 6))
    before.flatten(1, 2)[:, 1] = before.flatten(1, 2)[:, 2]
    assert torch.equal(keys, before)


def test_pools_that_do_not_belong_together_are_refused() -> None:
    keys, values = torch.stack(caches(16)[::2]), torch.stack(caches(16)[1::2])
    parameters, verdicts = accepted([[1]], 2)
    with pytest.raises(ValueError, match="expected contiguous keys and values"):
        move_accepted(keys, values[:1], torch.zeros(2, dtype=torch.int32), parameters, verdicts)
