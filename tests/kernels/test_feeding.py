"""Awaited tokens: the kernel and PyTorch fill in what was said, and leave what is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, work

from tree_kernels.node_table import StepIntegers, advance_one_token, fill_pending, shift_by_accepted
from tree_kernels.verification import RECORD, Mode
from tree_kernels.verification.records import MODE, POSITION

WORKER = "feeding_worker.py"
# As in the worker.
LAST_POSITION = 40


def test_pending_tokens_are_filled_in() -> None:
    token_ids = torch.tensor([7, -1, 0, -3, -2], dtype=torch.int32)
    pending = torch.tensor([100, 200, 300], dtype=torch.int32)
    assert fill_pending(token_ids, pending).tolist() == [7, 100, 0, 300, 200]
    assert token_ids.tolist() == [7, -1, 0, -3, -2]


def check(said: dict[str, Any]) -> None:
    pending = torch.tensor(said["awaited"], dtype=torch.int32)
    for one in said["found"]:
        token_ids = torch.tensor(one["token_ids"], dtype=torch.int32)
        assert one["filled"] == fill_pending(token_ids, pending).tolist()

    for one in said["advanced"]:
        step = StepIntegers(*(torch.tensor(values, dtype=torch.int32) for values in one["before"]))
        for _ in range(3):
            advance_one_token(step, one["page_size"][0][0], LAST_POSITION)
        assert one["after"] == [getattr(step, name).tolist() for name in step.__slots__]

    for one in said["moved_on"]:
        step = StepIntegers(*(torch.tensor(values, dtype=torch.int32) for values in one["before"]))
        counts = torch.tensor(one["counts"][0], dtype=torch.int32)
        shift_by_accepted(step, counts, one["page_size"][0][0], LAST_POSITION)
        assert one["after"] == [getattr(step, name).tolist() for name in step.__slots__]
        assert one["after"] != one["before"]


def test_a_step_moves_on_by_what_was_accepted() -> None:
    """A sequence that races, one that throws coins, one that knows its token, and a chunk of two rows."""
    parameters = [0] * 4 * RECORD
    integers = [[-2, -1, 7, 5, -3], [3, 7, 9, 4, 5], [3, 7, 9, 4, 5], parameters, [0, 1, 2, 3, 5], [3, 7, 9, 4]]
    pages = [[0, 2, 5, 7], [3, 5, 1, 9, 0, 2, 4, 6, 8]]
    step = StepIntegers(*(torch.tensor(values, dtype=torch.int32) for values in [*integers, *pages, *[[0] * 5] * 3]))
    records = step.parameters.view(-1, RECORD)
    records[:, MODE] = torch.tensor([Mode.COUPLED, Mode.REJECTION, Mode.COUPLED, Mode.COUPLED])
    records[:, POSITION] = -1
    shift_by_accepted(step, torch.tensor([1, 3, 2], dtype=torch.int32), page_size=4, last_position=9)
    assert step.token_ids.tolist() == integers[0]
    assert step.prefix_lengths.tolist() == [6, 8, 9, 4]
    assert step.positions.tolist() == [6, 8, 9, 4, 5]
    # The first has come to its second page, the second to its third.
    assert step.slots.tolist() == [5 * 4 + 2, 0 * 4, 9, 4, 5]
    assert records[:, POSITION].tolist() == [2, -1, -1, -1] and records[:, POSITION + 1].tolist() == [1, 0, 0, 0]


def test_a_step_becomes_the_one_after_it() -> None:
    """Two sequences of one row, and one of none between them; the first leaves its page."""
    integers = [
        [7, 9, 0],
        [3, 8, 0],
        [13, 6, -1],
        [*range(RECORD)] * 3,
        [0, 1, 1, 2],
        [3, 5, 6],
        [0, 2, 2],
        [3, 5, 1, 9],
        *[[]] * 3,
    ]
    step = StepIntegers(*(torch.tensor(values, dtype=torch.int32) for values in integers))
    advance_one_token(step, page_size=4, last_position=8)
    assert step.token_ids.tolist() == [-1, -3, 0]
    assert step.positions.tolist() == [4, 8, 0]
    assert step.prefix_lengths.tolist() == [4, 5, 7]
    assert step.slots.tolist() == [5 * 4, 9 * 4 + 3, -1]
    moved = [step.parameters[RECORD * b + POSITION].item() - POSITION for b in range(3)]
    assert moved == [1, 0, 1]


def test_the_kernel_fills_in_the_same() -> None:
    pytest.importorskip("triton")
    check(work(WORKER, **INTERPRETED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_fills_in_the_same_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))
