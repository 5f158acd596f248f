"""Triton: states of channels, in one launch: fold what was accepted, read the state at each row. A second keeps the
rows' gates.

A tree's node runs its own path from the state on, which is in registers: paths of guesses are short, and no node's
state is ever written.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
