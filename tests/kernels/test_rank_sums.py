"""Sums over ranks: processes that read each other's memory get what the definition says, all the same."""

from __future__ import annotations

import pytest
from kernel_worker import INTERPRETED, compiled, work


def test_every_case_equals_the_definition() -> None:
    """By two and three processes, whose programs wait for each other."""
    pytest.importorskip("triton")
    found = work("rank_sums_worker.py", **INTERPRETED)
    assert len(found) == 3
    for name, errors in found.items():
        tolerance = 1e-2 if "bfloat16" in name else 2e-6
        assert errors and all(error <= tolerance for error in errors.values()), (name, errors)


def test_the_kernel_compiles_for_a_gpu() -> None:
    """A program has 227 KB of shared memory, and reads 16 bytes at a time."""
    pytest.importorskip("triton")
    needed = compiled("rank_sums_compiling_worker.py")
    assert len(needed) == 3 and max(needed.values()) < 227 << 10
