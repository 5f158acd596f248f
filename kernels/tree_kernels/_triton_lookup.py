"""See `tree_kernels.lookup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.feeding import StepIntegers
from tree_kernels.lookup import LONGEST, MAX_LOOKED_UP, WINDOW
from tree_kernels.tree_mask import MAX_TREE_ROWS
from tree_kernels.verification_records import MODE, POSITION, RECORD, Mode

if TYPE_CHECKING:
    from tree_kernels.device_verification import Verdicts
    from tree_kernels.lookup import DeviceLookup

# Tokens that are compared at once; a longer run counts for more than a later one.
_BLOCK = 1024
_RUN_BITS = 26
_ROWS = triton.next_power_of_2(1 + MAX_LOOKED_UP)


@triton.jit
def _tokens_at(tokens, pages, keys, mask, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens fed as `keys` [n] of a sequence whose `pages` these are; -1 where masked."""
    page = tl.load(pages + keys // PAGE_SIZE, mask=mask, other=0)
    return tl.load(tokens + page * PAGE_SIZE + keys % PAGE_SIZE, mask=mask, other=-1)


@triton.jit
def _last_longest_run(  # type: ignore[no-untyped-def]
    tokens, pages, prefix, root,
    PAGE_SIZE: tl.constexpr, LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key behind the run that `lookup.look_up` finds; `prefix` where there is none."""
    first = tl.maximum(prefix - WINDOW, 0)
    best = -1
    for start in range(first, prefix, BLOCK):
        j = start + tl.arange(0, BLOCK)
        same = _tokens_at(tokens, pages, j, j < prefix, PAGE_SIZE) == root
        run = same.to(tl.int32)
        # Loads do not wait for each other: whether a run goes on is asked afterwards.
        for i in tl.static_range(1, LONGEST):
            wanted = _tokens_at(tokens, pages, prefix - i, prefix >= i, PAGE_SIZE)
            before = _tokens_at(tokens, pages, j - i, (j >= i) & (j < prefix), PAGE_SIZE)
            same = same & (before == wanted) & (before >= 0)
            run += same.to(tl.int32)
        found = tl.where(run > 0, (run << RUN_BITS) + (j - first), -1)
        best = tl.maximum(best, tl.max(found, axis=0))
    return tl.where(best < 0, prefix, first + (best & ((1 << RUN_BITS) - 1)) + 1)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, records, prefix_lengths, pages, tokens, b, row, rows, root, moves, last_position,
    PAGE_SIZE: tl.constexpr, RECORD: tl.constexpr, MODE: tl.constexpr, POSITION: tl.constexpr, RACED: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See `DeviceLookup._place`. All that the program reads of what it writes is read before its first store."""
    prefix = tl.load(prefix_lengths + b) + moves
    raced = tl.load(records + b * RECORD + MODE) == RACED
    before = tl.load(records + b * RECORD + POSITION)
    high = tl.load(records + b * RECORD + POSITION + 1)
    k = tl.arange(0, ROWS)
    there = k < rows
    keys = prefix + k
    page = tl.load(pages + keys // PAGE_SIZE, mask=there, other=0)
    begin = _last_longest_run(tokens, pages, prefix, root, PAGE_SIZE, LONGEST, WINDOW, RUN_BITS, BLOCK)
    # The token of row k > 0 is the (k - 1)th behind the run, and that at `prefix` is the root.
    source = begin + (k - 1) % (prefix + 1 - begin)
    copied = _tokens_at(tokens, pages, source, there & (k > 0) & (source < prefix), PAGE_SIZE)
    # One thread stores what is one number, and every warp has read it by now.
    tl.debug_barrier()
    tl.store(prefix_lengths + b, prefix)
    tl.store(slots + row + k, page * PAGE_SIZE + keys % PAGE_SIZE, mask=there)
    tl.store(positions + row + k, tl.minimum(keys, last_position), mask=there)
    low = before + moves
    tl.store(records + b * RECORD + POSITION, low, mask=raced)
    # Of two's complement: the sum wraps where it goes from a negative number to one that is not.
    tl.store(records + b * RECORD + POSITION + 1, high + tl.where((before < 0) & (low >= 0), 1, 0), mask=raced)
    tl.store(token_ids + row + k, tl.where((k > 0) & (source < prefix), copied, root), mask=there)


@triton.jit
def _begin_kernel(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, records, query_starts, prefix_lengths, page_starts, page_table, tokens,
    awaited, moves, passes, accepted, last_position,
    PAGE_SIZE: tl.constexpr, RECORD: tl.constexpr, MODE: tl.constexpr, POSITION: tl.constexpr, RACED: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One sequence a program; see `DeviceLookup.begin`."""
    b = tl.program_id(0)
    tl.store(passes + b, 0)
    tl.store(accepted + b, 0)
    row = tl.load(query_starts + b)
    rows = tl.load(query_starts + b + 1) - row
    if rows > 0:
        token = tl.load(token_ids + row)
        root = tl.load(awaited - 1 - token, mask=token < 0, other=0)
        moved = tl.load(moves - 1 - token, mask=token < 0, other=0)
        _place(
            token_ids, positions, slots, records, prefix_lengths, page_table + tl.load(page_starts + b), tokens,
            b, row, rows, tl.where(token < 0, root, token), moved, last_position,
            PAGE_SIZE, RECORD, MODE, POSITION, RACED, LONGEST, WINDOW, RUN_BITS, BLOCK, ROWS,
        )  # fmt: skip


@triton.jit
def _go_on_kernel(  # type: ignore[no-untyped-def]
    token_ids, positions, slots, records, query_starts, prefix_lengths, page_starts, page_table, tokens,
    accepted_counts, next_tokens, said, passes, accepted, last_position, SAID_STRIDE: tl.constexpr,
    SAID_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, RECORD: tl.constexpr, MODE: tl.constexpr, POSITION: tl.constexpr, RACED: tl.constexpr,
    LONGEST: tl.constexpr, WINDOW: tl.constexpr, RUN_BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One sequence a program; see `DeviceLookup.go_on`. `said` [B, P, SAID_WIDTH]."""
    b = tl.program_id(0)
    row = tl.load(query_starts + b)
    rows = tl.load(query_starts + b + 1) - row
    if rows > 0:
        count, root = tl.load(accepted_counts + b), tl.load(next_tokens + b)
        done, so_far = tl.load(passes + b), tl.load(accepted + b)
        k = tl.arange(0, ROWS)
        drafted = tl.load(token_ids + row + k, mask=(k > 0) & (k <= count), other=0)
        _place(
            token_ids, positions, slots, records, prefix_lengths, page_table + tl.load(page_starts + b), tokens,
            b, row, rows, root, count + 1, last_position,
            PAGE_SIZE, RECORD, MODE, POSITION, RACED, LONGEST, WINDOW, RUN_BITS, BLOCK, ROWS,
        )  # fmt: skip
        out = said + b * SAID_STRIDE + done * SAID_WIDTH
        tl.store(out + k, tl.where(k == 0, count, drafted), mask=k <= count)
        tl.store(out + count + 1, root)
        tl.store(passes + b, done + 1)
        tl.store(accepted + b, so_far + count)


@triton.jit
def _keep_kernel(  # type: ignore[no-untyped-def]
    token_ids, slots, records, accepted_counts, accepted_rows, tokens, RECORD: tl.constexpr, BLOCK: tl.constexpr
):
    """One sequence a program; see `DeviceLookup.keep_accepted`."""
    b = tl.program_id(0)
    count = tl.load(accepted_counts + b)
    first = tl.load(records + b * RECORD, mask=count > 0, other=0)
    k = tl.arange(0, BLOCK)
    row = tl.load(accepted_rows + first + k, mask=k < count, other=0)
    token = tl.load(token_ids + first + row, mask=k < count, other=0)
    slot = tl.load(slots + first + 1 + k, mask=k < count, other=-1)
    tl.store(tokens + slot, token, mask=slot >= 0)


def _constants(lookup: DeviceLookup) -> dict[str, int]:
    return {
        "PAGE_SIZE": lookup.page_size,
        "RECORD": RECORD,
        "MODE": MODE,
        "POSITION": POSITION,
        "RACED": int(Mode.COUPLED),
        "LONGEST": LONGEST,
        "WINDOW": WINDOW,
        "RUN_BITS": _RUN_BITS,
        "BLOCK": _BLOCK,
        "ROWS": _ROWS,
        "num_warps": 8,
    }


def _tensors(lookup: DeviceLookup, step: StepIntegers) -> tuple[Tensor, ...]:
    return (
        step.token_ids, step.positions, step.slots, step.parameters, step.query_starts, step.prefix_lengths,
        step.page_starts, step.page_table, lookup.tokens,
    )  # fmt: skip


def begin(lookup: DeviceLookup, step: StepIntegers, awaited: Tensor, moves: Tensor) -> None:
    """See `DeviceLookup.begin`."""
    _begin_kernel[(len(step.prefix_lengths),)](
        *_tensors(lookup, step), awaited, moves, lookup.passes, lookup.accepted, lookup.last_position,
        **_constants(lookup),
    )  # fmt: skip


def go_on(lookup: DeviceLookup, step: StepIntegers, verdicts: Verdicts) -> None:
    """See `DeviceLookup.go_on`."""
    _go_on_kernel[(len(step.prefix_lengths),)](
        *_tensors(lookup, step), verdicts.accepted_counts, verdicts.next_tokens, lookup.said, lookup.passes,
        lookup.accepted, lookup.last_position, SAID_STRIDE=lookup.said.stride(0), SAID_WIDTH=lookup.said.shape[2],
        **_constants(lookup),
    )  # fmt: skip


def keep_accepted(
    lookup: DeviceLookup, token_ids: Tensor, slots: Tensor, parameters: Tensor, verdicts: Verdicts
) -> None:
    """See `DeviceLookup.keep_accepted`."""
    _keep_kernel[(len(verdicts.accepted_counts),)](
        token_ids, slots, parameters, verdicts.accepted_counts, verdicts.accepted_rows, lookup.tokens,
        RECORD=RECORD, BLOCK=MAX_TREE_ROWS,
    )  # fmt: skip
