"""See `tree_kernels.node_table.feeding`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.node_table.step_integers import StepIntegers
from tree_kernels.verification.triton_rows import COUPLED, MODE, POSITION, TYPICAL, moved_long, record_of

_BLOCK = 256


@triton.jit
def _fill_kernel(  # type: ignore[no-untyped-def]
    token_ids, pending, filled, slots, tokens, rows, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """[rows] int32 each; BLOCK of them per program. `slots` and `tokens` are used with KEEP."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row, mask=row < rows, other=0)
    known = tl.load(pending - 1 - token, mask=token < 0, other=0)
    token = tl.where(token < 0, known, token)
    tl.store(filled + row, token, mask=row < rows)
    if KEEP:
        slot = tl.load(slots + row, mask=row < rows, other=-1)
        tl.store(tokens + slot, token, mask=slot >= 0)


def fill(token_ids: Tensor, pending: Tensor, slots: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
    """See `feeding.fill_pending`."""
    filled = torch.empty_like(token_ids)
    keep = slots is not None and tokens is not None
    _fill_kernel[(triton.cdiv(len(token_ids), _BLOCK),)](
        token_ids, pending, filled, slots if keep else filled, tokens if keep else filled, len(token_ids),
        KEEP=keep, BLOCK=_BLOCK,
    )  # fmt: skip
    return filled


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    positions, slots, prefix_lengths, page_starts, page_table, b, row, fed, moves, last_position,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Move the only rows of the sequences `b`, where `fed`, on by so many keys."""
    key = tl.load(prefix_lengths + b, mask=fed, other=0) + moves
    tl.store(prefix_lengths + b, key, mask=fed)
    position = tl.load(positions + row, mask=fed, other=0) + moves
    tl.store(positions + row, tl.minimum(position, last_position), mask=fed)
    page = tl.load(page_table + tl.load(page_starts + b, mask=fed, other=0) + key // PAGE_SIZE, mask=fed, other=0)
    tl.store(slots + row, page * PAGE_SIZE + key % PAGE_SIZE, mask=fed)


@triton.jit
def _move_position(records, b, moves, mask):  # type: ignore[no-untyped-def]
    """Add `moves` to the 64 bit positions of records."""
    record = record_of(records, b)
    low = tl.load(record + POSITION, mask=mask, other=0)
    high = tl.load(record + POSITION + 1, mask=mask, other=0)
    low, high = moved_long(low, high, moves)
    tl.store(record + POSITION, low, mask=mask)
    tl.store(record + POSITION + 1, high, mask=mask)


@triton.jit
def _advance_kernel(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, records, query_starts, prefix_lengths, page_starts, page_table, sequences,
    last_position, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence a lane; see `feeding.advance_one_token`."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = b < sequences
    row = tl.load(query_starts + b, mask=there, other=0)
    fed = there & (tl.load(query_starts + b + 1, mask=there, other=0) == row + 1)
    tl.store(token_ids + row, -1 - b, mask=fed)
    _move(positions, slots, prefix_lengths, page_starts, page_table, b, row, fed, 1, last_position, PAGE_SIZE)
    _move_position(records, b, 1, fed)


def advance_one_token(step: StepIntegers, page_size: int, last_position: int) -> None:
    """See `feeding.advance_one_token`."""
    sequences = len(step.prefix_lengths)
    _advance_kernel[(triton.cdiv(sequences, _BLOCK),)](
        step.token_ids, step.positions, step.slots, step.parameters, step.query_starts, step.prefix_lengths,
        step.page_starts, step.page_table, sequences, last_position, PAGE_SIZE=page_size, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit
def _shift_kernel(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, records, query_starts, prefix_lengths, page_starts, page_table, accepted_counts,
    sequences, last_position, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence a lane; see `feeding.shift_by_accepted`."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = b < sequences
    row = tl.load(query_starts + b, mask=there, other=0)
    alone = there & (tl.load(query_starts + b + 1, mask=there, other=0) == row + 1)
    token = tl.load(token_ids + row, mask=alone, other=0)
    fed = alone & (token < 0)
    moves = tl.load(accepted_counts - 1 - token, mask=fed, other=0)
    _move(positions, slots, prefix_lengths, page_starts, page_table, b, row, fed, moves, last_position, PAGE_SIZE)
    mode = tl.load(record_of(records, b) + MODE, mask=fed, other=0)
    draws_by_position = fed & ((mode == COUPLED) | (mode == TYPICAL))
    _move_position(records, b, moves, draws_by_position)


def shift_by_accepted(step: StepIntegers, accepted_counts: Tensor, page_size: int, last_position: int) -> None:
    """See `feeding.shift_by_accepted`."""
    sequences = len(step.prefix_lengths)
    _shift_kernel[(triton.cdiv(sequences, _BLOCK),)](
        step.token_ids, step.positions, step.slots, step.parameters, step.query_starts, step.prefix_lengths,
        step.page_starts, step.page_table, accepted_counts, sequences, last_position, PAGE_SIZE=page_size, BLOCK=_BLOCK,
    )  # fmt: skip
