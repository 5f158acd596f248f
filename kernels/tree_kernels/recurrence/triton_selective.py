"""Triton: states that decay by more than one factor a head, in one launch: fold what was accepted, read the state at
each row. A second keeps the rows' gates.

A tree's node runs its own path from the state on, which is in registers: paths of guesses are short, and no node's
state is ever written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.recurrence.triton_mixing import one_part


@triton.jit
def _behind(state, decay, gates, value, channel, index, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A state [n, m] behind one more token, whose gates begin at `gates`."""
    step = tl.load(gates + channel, mask=channel < CHANNELS, other=0.0)
    key = tl.load(gates + CHANNELS + index, mask=index < WIDTH, other=0.0)
    return tl.exp(step[:, None] * decay) * state + (step * value)[:, None] * key[None, :]


@triton.jit
def scan_kernel(  # type: ignore[no-untyped-def]
    rows, gates, queries, decay, folded, ring_gates, states, output, query_starts, prefix_lengths, slots, causal,
    pending_keys, words, WINDOW: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels): `folded` [B, window, C] and `rows` [R, C] are outputs of the convolution, `gates`
    [R, C + N] and `queries` [R, N] of the rows, `decay` [C, N], `output` [R, C]; all but the first two are fp32."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if count > 0:
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b).to(tl.int64)
        pending, first = tl.load(pending_keys + b), start.to(tl.int64)
        channel, index = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
        within, size = channel < CHANNELS, CHANNELS + WIDTH
        here = within[:, None] & (index < WIDTH)[None, :]
        rates = tl.load(decay + channel[:, None] * WIDTH + index[None, :], mask=here, other=0.0)
        at = states + (slot * CHANNELS + channel)[:, None] * WIDTH + index[None, :]
        # Of a sequence that begins, the slot holds what another left.
        state = tl.load(at, mask=here & (prefix + tl.zeros_like(channel) > 0)[:, None], other=0.0)
        for t in range(pending):
            place = slot * WINDOW + (prefix - pending + t) % WINDOW
            of_key = folded + (b.to(tl.int64) * WINDOW + t) * CHANNELS
            value = tl.load(of_key + channel, mask=within, other=0.0).to(tl.float32)
            state = _behind(state, rates, ring_gates + place * size, value, channel, index, CHANNELS, WIDTH)
        known = count > WINDOW
        if count <= WINDOW:
            tl.store(at, state, mask=here)
        if known | (tl.load(causal + b) != 0):
            for i in range(count):
                row = first + i
                value = tl.load(rows + row * CHANNELS + channel, mask=within, other=0.0).to(tl.float32)
                state = _behind(state, rates, gates + row * size, value, channel, index, CHANNELS, WIDTH)
                query = tl.load(queries + row * WIDTH + index, mask=index < WIDTH, other=0.0)
                tl.store(output + row * CHANNELS + channel, tl.sum(state * query[None, :], 1), mask=within)
            if known:
                tl.store(at, state, mask=here)
        else:
            for i in range(count):
                word, own = tl.load(words + first + i), state
                for j in range(i + 1):
                    if ((word >> j) & 1) != 0:
                        row = first + j
                        value = tl.load(rows + row * CHANNELS + channel, mask=within, other=0.0).to(tl.float32)
                        own = _behind(own, rates, gates + row * size, value, channel, index, CHANNELS, WIDTH)
                query = tl.load(queries + (first + i) * WIDTH + index, mask=index < WIDTH, other=0.0)
                tl.store(output + (first + i) * CHANNELS + channel, tl.sum(own * query[None, :], 1), mask=within)


@triton.jit
def _keyed_behind(  # type: ignore[no-untyped-def]
    state, row, gates, head, column, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr, NORMED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A state [BLOCK_K, m] behind one more token, whose convolved row begins at `row` and whose gates at `gates`."""
    k = tl.arange(0, BLOCK_K)
    decay = tl.exp(tl.load(gates + head * DK + k, mask=k < DK, other=0.0))
    beta = tl.load(gates + HEADS * DK + head)
    key = one_part(row, KEY_AT + head * DK, DK, BLOCK_K, NORMED)
    value = tl.load(row + VALUE_AT + head * DV + column, mask=column < DV, other=0.0).to(tl.float32)
    state = state * decay[:, None]
    added = beta * (value - tl.sum(key[:, None] * state, 0))
    return state + key[:, None] * added[None, :]


@triton.jit
def mix_keyed_kernel(  # type: ignore[no-untyped-def]
    rows, gates, folded, ring_gates, states, output, query_starts, prefix_lengths, slots, causal, pending_keys, words,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, NORMED: tl.constexpr, SCALING: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, columns of values): `folded` [B, window, C] and `rows` [R, C] are outputs of the
    convolution, `gates` [R, H * Dk + H] fp32, `output` [R, H, Dv]."""
    b, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if count > 0:
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b).to(tl.int64)
        pending, first, size = tl.load(pending_keys + b), start.to(tl.int64), HEADS * DK + HEADS
        k, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        here = (k < DK)[:, None] & (column < DV)[None, :]
        at = states + (slot * HEADS + head) * DK * DV + k[:, None] * DV + column[None, :]
        # Of a sequence that begins, the slot holds what another left.
        state = tl.load(at, mask=here & (prefix + tl.zeros_like(k) > 0)[:, None], other=0.0)
        for t in range(pending):
            place = slot * WINDOW + (prefix - pending + t) % WINDOW
            of_key = folded + (b.to(tl.int64) * WINDOW + t) * CHANNELS
            state = _keyed_behind(
                state, of_key, ring_gates + place * size, head, column, HEADS, DK, DV, KEY_AT, VALUE_AT, NORMED, BLOCK_K
            )
        known = count > WINDOW
        if count <= WINDOW:
            tl.store(at, state, mask=here)
        chain = known | (tl.load(causal + b) != 0)
        for i in range(count):
            row, own = first + i, state
            if chain:
                state = _keyed_behind(
                    state, rows + row * CHANNELS, gates + row * size, head, column, HEADS, DK, DV, KEY_AT, VALUE_AT,
                    NORMED, BLOCK_K,
                )  # fmt: skip
                own = state
            else:
                word = tl.load(words + row)
                for j in range(i + 1):
                    if ((word >> j) & 1) != 0:
                        own = _keyed_behind(
                            own, rows + (first + j) * CHANNELS, gates + (first + j) * size, head, column, HEADS, DK, DV,
                            KEY_AT, VALUE_AT, NORMED, BLOCK_K,
                        )  # fmt: skip
            query = one_part(rows + row * CHANNELS, QUERY_AT + head * DK, DK, BLOCK_K, NORMED) * SCALING
            made = tl.sum(query[:, None] * own, 0)
            tl.store(output + (row * HEADS + head) * DV + column, made, mask=column < DV)
        if known:
            tl.store(at, state, mask=here)


@triton.jit
def keep_gates_kernel(  # type: ignore[no-untyped-def]
    gates, ring_gates, query_starts, prefix_lengths, slots, WINDOW: tl.constexpr, GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, gates): those of nodes into the ring. Behind the launch that reads the old ones."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if (count > 0) & (count <= WINDOW):
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b).to(tl.int64)
        gate = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        for i in range(count):
            own = tl.load(gates + (start + i).to(tl.int64) * GATES + gate, mask=gate < GATES)
            place = slot * WINDOW + (prefix + i) % WINDOW
            tl.store(ring_gates + place * GATES + gate, own, mask=gate < GATES)
