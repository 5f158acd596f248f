"""Drafts from a sequence's own text: the rule, and the kernel against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_worker import INTERPRETED, work
from random_steps import LOOKUPS, looked_up

from tree_kernels.lookup import LONGEST, longest_run
from tree_kernels.row_shares import FIRST_COST, MOST_COST, NEXT_COST, RIGHT, share_rows

WORKER = "lookup_worker.py"


@pytest.mark.parametrize(
    ("text", "run", "behind"),
    [
        # The longer of two runs, though it is not the last.
        ([1, 2, 3, 9, 2, 3, 4, 5, 1, 2, 3], 3, [9, 2]),
        # Of equally long ones the last.
        ([7, 1, 8, 1, 9, 1], 1, [9, 1]),
        ([5, 1, 2, 1, 2], 2, [1, 2]),
        ([3, 3], 1, [3]),
        # Nothing stood there before.
        ([1, 2, 3], 0, [3]),
        ([4], 0, [4]),
    ],
)
def test_what_is_found(text: list[int], run: int, behind: list[int]) -> None:
    found = longest_run(text)
    assert found.length == run and text[found.end :][: len(behind)] == behind


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_it_is_a_longest_run(text: list[int]) -> None:
    found = longest_run(text)
    runs = [
        max(run for run in range(LONGEST + 1) if run <= j + 1 and text[j + 1 - run : j + 1] == text[len(text) - run :])
        for j in range(len(text) - 1)
    ]
    assert found.length == max(runs, default=0)
    if found.length:
        assert found.end == max(range(len(runs)), key=lambda j: (runs[j], j)) + 1


@given(
    st.lists(st.tuples(st.integers(0, LONGEST), st.integers(0, 15)), min_size=1, max_size=40),
    st.integers(0, 300),
)
def test_rows_go_where_they_are_likeliest_to_be_right(found: list[tuple[int, int]], room: int) -> None:
    runs, limits = [run for run, _ in found], [limit for _, limit in found]
    rows = share_rows(runs, limits, room)
    wanted = sum(limit for run, limit in found if run)
    assert sum(rows) <= min(room, wanted)
    assert all(own <= limit and (run or not own) for own, run, limit in zip(rows, runs, limits, strict=True))
    # Costs are of different rows nearly always.
    assert sum(rows) >= min(room, wanted) - len(found)
    given_up = [_cost(b, runs[b], rows[b]) for b in range(len(runs)) if runs[b] and rows[b] < limits[b]]
    given = [_cost(b, runs[b], rows[b] - 1) for b in range(len(runs)) if rows[b]]
    assert not given or not given_up or max(given) < min(given_up)


def _cost(b: int, run: int, d: int) -> int:
    return FIRST_COST[run] + b + NEXT_COST[run] * d


def test_a_longer_run_is_worth_more() -> None:
    assert len(RIGHT) == LONGEST + 1
    assert share_rows([1, 8, 0, 4], [15] * 4, 4) == [0, 4, 0, 0]
    assert share_rows([1, 8, 0, 4], [15] * 4, 10) == [0, 9, 0, 1]
    assert share_rows([3, 3], [15, 15], 6) == [3, 3]
    assert share_rows([2, 8], [15, 4], 100) == [15, 4]
    # The last row of a thousand sequences that is hardly ever right.
    assert max(_cost(1023, run, 14) for run in range(1, LONGEST + 1)) < MOST_COST


def check(found: list[object]) -> None:
    for place, (case, one) in enumerate(zip(LOOKUPS, found, strict=True)):
        assert one == looked_up(case, place, "torch")


def test_the_kernel_finds_the_same() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_finds_the_same_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))
