"""Drafts from a sequence's own text: the rule, and the kernel against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_worker import INTERPRETED, work
from random_steps import LOOKUPS, looked_up

from tree_kernels.lookup import LONGEST, look_up

WORKER = "lookup_worker.py"


@pytest.mark.parametrize(
    ("text", "count", "drafted"),
    [
        # The longer of two runs, though it is not the last.
        ([1, 2, 3, 9, 2, 3, 4, 5, 1, 2, 3], 2, [9, 2]),
        # Of equally long ones the last.
        ([7, 1, 8, 1, 9, 1], 1, [9]),
        # A loop goes on.
        ([5, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([3, 3], 3, [3, 3, 3]),
        # Nothing stood there before.
        ([1, 2, 3], 3, [3, 3, 3]),
        ([4], 2, [4, 4]),
        ([1, 1, 1], 0, []),
    ],
)
def test_what_is_drafted(text: list[int], count: int, drafted: list[int]) -> None:
    assert look_up(text, count) == drafted


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 15))
def test_it_is_what_followed_a_longest_run(text: list[int], count: int) -> None:
    drafted = look_up(text, count)
    assert len(drafted) == count
    runs = [
        max(run for run in range(LONGEST + 1) if run <= j + 1 and text[j + 1 - run : j + 1] == text[len(text) - run :])
        for j in range(len(text) - 1)
    ]
    if not any(runs):
        assert drafted == text[-1:] * count
        return
    begin = max(range(len(runs)), key=lambda j: (runs[j], j)) + 1
    whole = list(text)
    for k in range(count):
        whole.append(whole[begin + k])
    assert drafted == whole[len(text) :]


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
