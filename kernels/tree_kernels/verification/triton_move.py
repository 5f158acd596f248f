"""Triton: moves the accepted path's keys and values to their slots, in one launch for all layers, and its tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.attention.tree_mask import MAX_TREE_ROWS
from tree_kernels.verification.triton_rows import FIRST_ROW, record_of

_TREE_ROWS = tl.constexpr(MAX_TREE_ROWS)


@triton.jit(do_not_specialize=["sequences", "layer_slots"])
def _move_kernel(  # type: ignore[no-untyped-def]
    keys, values, slots, parameters, verdicts, sequences, layer_slots,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence, layer and BLOCK columns of all heads per program.

    Every row moves to a slot of a row above its own or stays, and rows come in rising order, so that none is
    overwritten before it was read.
    """
    sequence = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    first = tl.load(record_of(parameters, sequence) + FIRST_ROW)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    keys += layer * layer_slots * KEY_WIDTH
    values += layer * layer_slots * VALUE_WIDTH
    for place in tl.range(0, tl.load(verdicts + sequence)):
        row = tl.load(verdicts + 2 * sequences + first + place)
        source = tl.load(slots + first + row).to(tl.int64)
        target = tl.load(slots + first + place + 1).to(tl.int64)
        if (source != target) & (source >= 0) & (target >= 0):
            own = column < KEY_WIDTH
            moved = tl.load(keys + source * KEY_WIDTH + column, mask=own)
            tl.store(keys + target * KEY_WIDTH + column, moved, mask=own)
            own = column < VALUE_WIDTH
            moved = tl.load(values + source * VALUE_WIDTH + column, mask=own)
            tl.store(values + target * VALUE_WIDTH + column, moved, mask=own)
            # The next row may go to where this one was.
            tl.debug_barrier()


def move_rows(
    keys: Tensor, values: Tensor, slots: Tensor, parameters: Tensor, verdicts: Tensor, sequences: int
) -> None:
    """See `kv_move.move_accepted`."""
    layers, pages, page_size, heads, width = keys.shape
    key_width, value_width = heads * width, heads * values.shape[4]
    block = min(1024, triton.next_power_of_2(max(key_width, value_width)))
    _move_kernel[(sequences, layers, triton.cdiv(max(key_width, value_width), block))](
        keys, values, slots, parameters, verdicts, sequences, pages * page_size,
        KEY_WIDTH=key_width, VALUE_WIDTH=value_width, BLOCK=block, num_warps=2, num_stages=1,
    )  # fmt: skip


@triton.jit
def keep_kernel(token_ids, slots, records, accepted_counts, accepted_rows, tokens):  # type: ignore[no-untyped-def]
    """One sequence a program; see `kv_move.keep_accepted`."""
    b = tl.program_id(0)
    count = tl.load(accepted_counts + b)
    first = tl.load(record_of(records, b) + FIRST_ROW, mask=count > 0, other=0)
    k = tl.arange(0, _TREE_ROWS)
    row = tl.load(accepted_rows + first + k, mask=k < count, other=0)
    token = tl.load(token_ids + first + row, mask=k < count, other=0)
    slot = tl.load(slots + first + 1 + k, mask=k < count, other=-1)
    tl.store(tokens + slot, token, mask=slot >= 0)


def keep_rows(
    tokens: Tensor, token_ids: Tensor, slots: Tensor, parameters: Tensor, accepted_counts: Tensor, accepted_rows: Tensor
) -> None:
    """See `kv_move.keep_accepted`."""
    keep_kernel[(len(accepted_counts),)](token_ids, slots, parameters, accepted_counts, accepted_rows, tokens)
