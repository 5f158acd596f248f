"""Triton: states of channels, in one launch: fold what was accepted, read the state at each row. Of prompts it runs
chunks side by side, and a second launch puts them one behind another. The last keeps the rows' gates.

A tree's node runs its own path from the state on, which is in registers: paths of guesses are short, and no node's
state is ever written.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of a prompt that are run one after the other. Chosen: 512 rows then take 32 steps twice and up to 15 between.
SCANNED = tl.constexpr(32)


@triton.jit
def _of_groups(at, channel, index, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[n or 1, m] the key or query of each channel, from those of a token that begin at `at`."""
    if GROUPS == 1:
        found = tl.load(at + index, mask=index < WIDTH, other=0.0)[None, :]
    else:
        own = channel // (CHANNELS // GROUPS) * WIDTH
        there = (channel < CHANNELS)[:, None] & (index < WIDTH)[None, :]
        found = tl.load(at + own[:, None] + index[None, :], mask=there, other=0.0)
    return found


@triton.jit
def _behind(  # type: ignore[no-untyped-def]
    state, decay, gates, value, channel, index, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr
):
    """A state [n, m] behind one more token, whose gates begin at `gates`."""
    step = tl.load(gates + channel, mask=channel < CHANNELS, other=0.0)
    key = _of_groups(gates + CHANNELS, channel, index, CHANNELS, WIDTH, GROUPS)
    return tl.exp(step[:, None] * decay) * state + (step * value)[:, None] * key


@triton.jit
def _place_of_chunk(start, b, chunk):  # type: ignore[no-untyped-def]
    """Among all sequences' chunks: none has more than its rows and one fill."""
    return (start // SCANNED + b + chunk).to(tl.int64)


@triton.jit
def scan_kernel(  # type: ignore[no-untyped-def]
    rows, gates, queries, decay, folded, ring_gates, states, output, ends, steps, query_starts, prefix_lengths, sources,
    targets, causal, pending_keys, words, WINDOW: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels, chunk): `folded` [B, window, C] and `rows` [R, C] are outputs of the convolution,
    `gates` [R, C + K * N] and `queries` [R, K * N] of the rows, `decay` [C, N], `output` [R, C]; all but the first two
    are fp32.

    Of a prompt each chunk but the last is run by itself, the first behind the state and the others behind nothing: into
    `ends` [chunks, C, N] what is behind it, and into `steps` [chunks, C] their sum. The first one's outputs are final.
    """
    b, chunk = tl.program_id(0), tl.program_id(2)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    known = count > WINDOW
    if (count > 0) & ((chunk == 0) | (known & ((chunk + 1) * SCANNED < count))):
        prefix = tl.load(prefix_lengths + b)
        source, target = tl.load(sources + b).to(tl.int64), tl.load(targets + b).to(tl.int64)
        pending, first = tl.where(chunk == 0, tl.load(pending_keys + b), 0), start.to(tl.int64)
        channel, index = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
        within, size = channel < CHANNELS, CHANNELS + GROUPS * WIDTH
        here = within[:, None] & (index < WIDTH)[None, :]
        rates = tl.load(decay + channel[:, None] * WIDTH + index[None, :], mask=here, other=0.0)
        of_slot = channel[:, None] * WIDTH + index[None, :]
        before, at = states + source * CHANNELS * WIDTH + of_slot, states + target * CHANNELS * WIDTH + of_slot
        # Of a sequence that begins, the slot holds what another left.
        begun = tl.where(chunk == 0, prefix, 0) + tl.zeros_like(channel) > 0
        state = tl.load(before, mask=here & begun[:, None], other=0.0)
        for t in range(pending):
            place = source * WINDOW + (prefix - pending + t) % WINDOW
            of_key = folded + (b.to(tl.int64) * WINDOW + t) * CHANNELS
            value = tl.load(of_key + channel, mask=within, other=0.0).to(tl.float32)
            state = _behind(state, rates, ring_gates + place * size, value, channel, index, CHANNELS, WIDTH, GROUPS)
        if count <= WINDOW:
            tl.store(at, state, mask=here)
        if known | (tl.load(causal + b) != 0):
            summed = tl.zeros([BLOCK_C], tl.float32)
            last = tl.where(known, tl.minimum((chunk + 1) * SCANNED, count), count)
            for i in range(chunk * SCANNED, last):
                row = first + i
                value = tl.load(rows + row * CHANNELS + channel, mask=within, other=0.0).to(tl.float32)
                state = _behind(state, rates, gates + row * size, value, channel, index, CHANNELS, WIDTH, GROUPS)
                summed += tl.load(gates + row * size + channel, mask=within, other=0.0)
                if chunk == 0:
                    query = _of_groups(queries + row * GROUPS * WIDTH, channel, index, CHANNELS, WIDTH, GROUPS)
                    tl.store(output + row * CHANNELS + channel, tl.sum(state * query, 1), mask=within)
            if known:
                if count <= SCANNED:
                    tl.store(at, state, mask=here)
                else:
                    of_chunk = _place_of_chunk(start, b, chunk) * CHANNELS + channel
                    tl.store(ends + of_chunk[:, None] * WIDTH + index[None, :], state, mask=here)
                    tl.store(steps + of_chunk, summed, mask=within)
        else:
            for i in range(count):
                word, own = tl.load(words + first + i), state
                for j in range(i + 1):
                    if ((word >> j) & 1) != 0:
                        row = first + j
                        value = tl.load(rows + row * CHANNELS + channel, mask=within, other=0.0).to(tl.float32)
                        own = _behind(own, rates, gates + row * size, value, channel, index, CHANNELS, WIDTH, GROUPS)
                query = _of_groups(queries + (first + i) * GROUPS * WIDTH, channel, index, CHANNELS, WIDTH, GROUPS)
                tl.store(output + (first + i) * CHANNELS + channel, tl.sum(own * query, 1), mask=within)


@triton.jit
def scan_later_kernel(  # type: ignore[no-untyped-def]
    rows, gates, queries, decay, states, output, ends, steps, query_starts, targets, WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels, chunk from the second on) of prompts: the state behind the chunks before it, then
    its own outputs; of the last one the state. Behind `scan_kernel`, whose tensors these are."""
    b, chunk = tl.program_id(0), tl.program_id(2) + 1
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if (count > WINDOW) & (chunk * SCANNED < count):
        first, target = start.to(tl.int64), tl.load(targets + b).to(tl.int64)
        channel, index = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
        within, size = channel < CHANNELS, CHANNELS + GROUPS * WIDTH
        here = within[:, None] & (index < WIDTH)[None, :]
        rates = tl.load(decay + channel[:, None] * WIDTH + index[None, :], mask=here, other=0.0)
        state = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
        for earlier in range(chunk):
            of_chunk = _place_of_chunk(start, b, earlier) * CHANNELS + channel
            summed = tl.load(steps + of_chunk, mask=within, other=0.0)
            end = tl.load(ends + of_chunk[:, None] * WIDTH + index[None, :], mask=here, other=0.0)
            state = tl.exp(summed[:, None] * rates) * state + end
        last = tl.minimum((chunk + 1) * SCANNED, count)
        for i in range(chunk * SCANNED, last):
            row = first + i
            value = tl.load(rows + row * CHANNELS + channel, mask=within, other=0.0).to(tl.float32)
            state = _behind(state, rates, gates + row * size, value, channel, index, CHANNELS, WIDTH, GROUPS)
            query = _of_groups(queries + row * GROUPS * WIDTH, channel, index, CHANNELS, WIDTH, GROUPS)
            tl.store(output + row * CHANNELS + channel, tl.sum(state * query, 1), mask=within)
        if last == count:
            tl.store(states + (target * CHANNELS + channel)[:, None] * WIDTH + index[None, :], state, mask=here)


@triton.jit
def keep_gates_kernel(  # type: ignore[no-untyped-def]
    gates, ring_gates, query_starts, prefix_lengths, targets, WINDOW: tl.constexpr, GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, gates): those of nodes into the ring. Behind the launch that reads the old ones."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if (count > 0) & (count <= WINDOW):
        prefix, target = tl.load(prefix_lengths + b), tl.load(targets + b).to(tl.int64)
        gate = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        for i in range(count):
            own = tl.load(gates + (start + i).to(tl.int64) * GATES + gate, mask=gate < GATES)
            place = target * WINDOW + (prefix + i) % WINDOW
            tl.store(ring_gates + place * GATES + gate, own, mask=gate < GATES)
