"""Rows that are joined for a device: in order, in its type, in memory that is used again."""

from __future__ import annotations

import torch

from draft_service.eagle.head_drafter import Staging


def test_pieces_are_joined_in_memory_that_stays() -> None:
    staging = Staging(torch.bfloat16, torch.device("cpu"))
    pieces = [torch.randn(rows, 6) for rows in (3, 1, 4)]
    joined = staging.join(pieces)
    assert torch.equal(joined, torch.cat(pieces).bfloat16())
    staging.sent()
    again = staging.join([pieces[2].bfloat16(), pieces[0]])
    assert again.data_ptr() == joined.data_ptr()
    assert torch.equal(again, torch.cat([pieces[2], pieces[0]]).bfloat16())
    # More rows, and others.
    assert torch.equal(staging.join(pieces * 3), torch.cat(pieces * 3).bfloat16())
    assert torch.equal(staging.join([torch.ones(2, 4)]), torch.ones(2, 4).bfloat16())
