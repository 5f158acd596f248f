"""The kernels that grow trees do what PyTorch does, which `tests/draft/test_device_growth.py` holds to the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work

WORKER = "growth_worker.py"


def check(cases: Any) -> None:
    for case in cases:
        found, expected = case["found"], case["expected"]
        for name in ("tail", "tokens", "parents"):
            assert found[name] == expected[name], name
        assert torch.tensor(found["worths"]).allclose(torch.tensor(expected["worths"]), rtol=1e-4, atol=0.0)
        for own, other in zip(found["passes"], expected["passes"], strict=True):
            # Next tokens and their parents' rows, and the children.
            assert own[:2] == other[:2] and own[3] == other[3]
            assert torch.tensor(own[2]).allclose(torch.tensor(other[2]), rtol=1e-4, atol=0.0)
        for (tokens, parents, scores), other in zip(found["kept"], expected["kept"], strict=True):
            assert [tokens, parents] == other[:2] and scores == pytest.approx(other[2], rel=1e-4)
    assert sum(len(tokens) for case in cases for tokens, _, _ in case["found"]["kept"]) > 100


def test_the_kernels_grow_the_same_trees() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_grow_the_same_trees_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))


def test_the_kernels_compile_for_a_gpu() -> None:
    """A program has 227 KB of shared memory, which what is counted for many items could outgrow."""
    pytest.importorskip("triton")
    needed = compiled("growth_compiling_worker.py")
    assert len(needed) > 8 and max(needed.values()) < 227 << 10
