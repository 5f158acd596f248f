"""Tokens that the device has before the host: what the last step generated, fed to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.node_table.step_integers import StepIntegers
from tree_kernels.verification.records import MODE, POSITION, RECORD, Mode


def fill_pending(
    token_ids: Tensor, pending: Tensor, slots: Tensor | None = None, tokens: Tensor | None = None
) -> Tensor:
    """`token_ids` [R] int32 with every -1 - i replaced by `pending[i]` int32, a new tensor; with `slots` [R] int32,
    where each row's key goes (a negative one has none), also written beside their keys to `tokens` [slots of the
    cache]."""
    if token_ids.is_cuda:
        # Only here: Triton may be absent. One launch, where PyTorch takes four.
        from tree_kernels.node_table.triton_feeding import fill

        return fill(token_ids, pending, slots, tokens)
    filled = torch.where(token_ids < 0, pending[(-1 - token_ids).clamp(min=0)], token_ids)
    if slots is not None and tokens is not None:
        there = slots >= 0
        tokens[slots[there].long()] = filled[there]
    return filled


def advance_one_token(step: StepIntegers, page_size: int, last_position: int) -> None:
    """Turn a step in which every sequence has one row, or none, into the step after it. In place.

    Sequence b then feeds its pending token (-1 - b), one key further on in the pages that it already has.
    The pages hold one key more than the step leaves; `last_position` is the model's largest.
    """
    if step.token_ids.is_cuda:
        # Only here: Triton may be absent.
        from tree_kernels.node_table.triton_feeding import advance_one_token as advance_one_token_on_gpu

        advance_one_token_on_gpu(step, page_size, last_position)
        return
    fed = torch.nonzero(step.query_starts.diff() == 1).flatten()
    step.token_ids[step.query_starts[fed].long()] = (-1 - fed).int()
    _move(step, fed, 1, page_size, last_position)
    # [B, 2], the lower and the upper half of each 64 bit position.
    halves = step.parameters[: RECORD * len(step.prefix_lengths)].view(-1, RECORD)[:, POSITION : POSITION + 2]
    halves[fed, 0] += 1
    halves[fed, 1] += (halves[fed, 0] == 0).int()


def shift_by_accepted(step: StepIntegers, accepted_counts: Tensor, page_size: int, last_position: int) -> None:
    """Move every row that feeds a pending token on by the drafted rows that the step before accepted. In place.

    The step is laid out as if nothing had been accepted. A sequence without a pending token, or with more than one row,
    is not moved. `accepted_counts`, [B] int32, are by the sequences' places in the step before, see `Verdicts`; the
    pages hold the keys that may come.
    """
    if step.token_ids.is_cuda:
        # Only here: Triton may be absent.
        from tree_kernels.node_table.triton_feeding import shift_by_accepted as shift_on_gpu

        shift_on_gpu(step, accepted_counts, page_size, last_position)
        return
    alone = torch.nonzero(step.query_starts.diff() == 1).flatten()
    fed = alone[step.token_ids[step.query_starts[alone].long()] < 0]
    moves = accepted_counts[(-1 - step.token_ids[step.query_starts[fed].long()]).long()]
    _move(step, fed, moves, page_size, last_position)
    records = step.parameters[: RECORD * len(step.prefix_lengths)].view(-1, RECORD)
    # The stream of a rejection's coins counts steps, not tokens.
    draws_by_position = (records[fed, MODE] == Mode.COUPLED) | (records[fed, MODE] == Mode.TYPICAL)
    low = records[fed, POSITION].long() % 2**32 + torch.where(draws_by_position, moves, 0)
    records[fed, POSITION] = (low % 2**32).int()
    records[fed, POSITION + 1] += (low // 2**32).int()


def _move(step: StepIntegers, fed: Tensor, moves: Tensor | int, page_size: int, last_position: int) -> None:
    """Move the only rows of the sequences `fed` [n] on by so many keys."""
    rows = step.query_starts[fed].long()
    step.prefix_lengths[fed] += moves
    keys = step.prefix_lengths[fed]
    step.positions[rows] = (step.positions[rows] + moves).clamp(max=last_position)
    page = step.page_table[(step.page_starts[fed] + keys // page_size).long()]
    step.slots[rows] = page * page_size + keys % page_size
