"""Awaited tokens: the kernel and PyTorch fill in what was said, and leave what is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, work

from tree_kernels.feeding import fill_awaited

WORKER = "feeding_worker.py"


def test_awaited_tokens_are_filled_in() -> None:
    token_ids = torch.tensor([7, -1, 0, -3, -2], dtype=torch.int32)
    awaited = torch.tensor([100, 200, 300], dtype=torch.int32)
    assert fill_awaited(token_ids, awaited).tolist() == [7, 100, 0, 300, 200]
    assert token_ids.tolist() == [7, -1, 0, -3, -2]


def check(said: dict[str, Any]) -> None:
    awaited = torch.tensor(said["awaited"], dtype=torch.int32)
    for one in said["found"]:
        token_ids = torch.tensor(one["token_ids"], dtype=torch.int32)
        assert one["filled"] == fill_awaited(token_ids, awaited).tolist()


def test_the_kernel_fills_in_the_same() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_fills_in_the_same_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))
