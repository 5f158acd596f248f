"""Triton: recurrent layers over trees, in three launches a layer: convolve, mix, keep; and one that plans a pass.

Sequence b of a step has rows `query_starts[b]` to `query_starts[b + 1]` behind `prefix_lengths[b]` keys. Tokens are
counted from its first row on: 0 is that row, -1 the last key. The last `pending[b]` keys are not in the state yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-6)
# Rows of prompts that are solved together: so many substitutions follow one another.
CHUNK = tl.constexpr(16)


@triton.jit
def plan_kernel(  # type: ignore[no-untyped-def]
    query_starts, prefix_lengths, slots, causal, parents, lengths, pending, words, depths, node_slots,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence a program: its pending keys, its rows' ancestors as bits, their depths and places of their inputs.
    Takes the pass into the state's length."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if count > 0:
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b)
        length = tl.load(lengths + slot)
        tl.store(pending + b, tl.minimum(tl.minimum(tl.maximum(prefix - length, 0), WINDOW), prefix))
        known = count > WINDOW
        tl.debug_barrier()
        tl.store(lengths + slot, tl.where(known, prefix + count, prefix))
        i = tl.arange(0, BLOCK)
        if known:
            for first in range(0, count, BLOCK):
                tl.store(node_slots + start + first + i, tl.full([BLOCK], -1, tl.int32), mask=first + i < count)
        else:
            there = i < count
            tl.store(node_slots + start + i, slot * WINDOW + (prefix + i) % WINDOW, mask=there)
            word, depth = tl.full([BLOCK], 1, tl.int64) << i.to(tl.int64), tl.zeros([BLOCK], tl.int32)
            if tl.load(causal + b) != 0:
                word = (word - 1) | word
                depth += i
            else:
                current = tl.where(there, i, 0)
                while tl.max(current, 0) > 0:
                    depth += (current > 0).to(tl.int32)
                    current = tl.load(parents + start + current, mask=current > 0, other=0)
                    word |= tl.full([BLOCK], 1, tl.int64) << current.to(tl.int64)
            tl.store(words + start + i, word, mask=there)
            tl.store(depths + start + i, depth, mask=there)
    else:
        tl.store(pending + b, 0)


@triton.jit
def _inputs_at(  # type: ignore[no-untyped-def]
    inputs, ring, windows, place, channel, there, start, stride, prefix, slot, pending, WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """[n, m] fp32: channels [m] of the inputs of tokens `place` [n]: rows of the pass, pending keys, or older ones.
    Each is read where it is, so that garbage elsewhere does not matter."""
    here = there[:, None] & (channel < CHANNELS)[None, :]
    own, waiting, old = place >= 0, (place < 0) & (place >= -pending), place < -pending
    column = channel[None, :]
    found = tl.load(
        inputs + (start + place).to(tl.int64)[:, None] * stride + column, mask=here & own[:, None], other=0.0
    ).to(tl.float32)
    at = slot * WINDOW + (prefix + place) % WINDOW
    kept = here & waiting[:, None]
    found += tl.load(ring + at[:, None] * CHANNELS + column, mask=kept, other=0.0).to(tl.float32)
    at = slot * (TAPS - 1) + TAPS - 1 + place + pending
    # Of a sequence that begins, windows hold what another left.
    kept = here & old[:, None] & (prefix + tl.zeros_like(place) > 0)[:, None]
    return found + tl.load(windows + at[:, None] * CHANNELS + column, mask=kept, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["stride"])
def convolve_kernel(  # type: ignore[no-untyped-def]
    inputs, ring, windows, weight, bias, output, folded, query_starts, prefix_lengths, slots, causal, parents,
    pending_keys, stride, WINDOW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels, tokens): the convolution of pending keys into `folded` [B, window, C], and of rows
    into `output` [R, C]. Writes nothing else."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    pending = tl.load(pending_keys + b)
    first = tl.program_id(2) * BLOCK_R - pending
    if (count > 0) & (first < count):
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b).to(tl.int64)
        token, channel = first + tl.arange(0, BLOCK_R), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        there, chain = token < count, tl.load(causal + b) + tl.zeros_like(token)
        within = channel < CHANNELS
        total, place = tl.zeros([BLOCK_R, BLOCK_C], tl.float32), token
        for back in tl.static_range(TAPS):
            read = _inputs_at(
                inputs, ring, windows, place, channel, there, start, stride, prefix, slot, pending, WINDOW, CHANNELS,
                TAPS,
            )  # fmt: skip
            factor = tl.load(weight + channel * TAPS + TAPS - 1 - back, mask=within, other=0.0).to(tl.float32)
            total += factor[None, :] * read
            child = there & (place > 0) & (chain == 0)
            parent = tl.load(parents + start + place, mask=child, other=0)
            place = tl.where(child, parent, place - 1)
        if BIAS:
            total += tl.load(bias + channel, mask=within, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total = total * tl.sigmoid(total)
        of_rows = (start + token).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(output + of_rows, total, mask=(there & (token >= 0))[:, None] & within[None, :])
        of_keys = (b.to(tl.int64) * WINDOW + token + pending)[:, None] * CHANNELS + channel[None, :]
        tl.store(folded + of_keys, total, mask=(token < 0)[:, None] & within[None, :])


@triton.jit(do_not_specialize=["stride"])
def keep_kernel(  # type: ignore[no-untyped-def]
    inputs, gates, ring, ring_gates, windows, query_starts, prefix_lengths, slots, pending_keys, stride,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, GATES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels): the last inputs of committed tokens into the window; nodes' inputs and gates into
    the ring. Behind what reads the old ones."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if count > 0:
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b).to(tl.int64)
        pending = tl.load(pending_keys + b)
        tap, channel = tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        kept, within = tap < TAPS - 1, channel < CHANNELS
        # Of a part of a prompt all rows are known.
        behind = tl.where(count > WINDOW, count, 0)
        last = _inputs_at(
            inputs, ring, windows, behind - TAPS + 1 + tap, channel, kept, start, stride, prefix, slot, pending, WINDOW,
            CHANNELS, TAPS,
        )  # fmt: skip
        tl.debug_barrier()
        at = (slot * (TAPS - 1) + tap)[:, None] * CHANNELS + channel[None, :]
        tl.store(windows + at, last, mask=kept[:, None] & within[None, :])
        if count <= WINDOW:
            for first in range(0, count, BLOCK_R):
                row = first + tl.arange(0, BLOCK_R)
                there = row < count
                place, of_row = slot * WINDOW + (prefix + row) % WINDOW, (start + row).to(tl.int64)
                here = there[:, None] & within[None, :]
                own = tl.load(inputs + of_row[:, None] * stride + channel[None, :], mask=here)
                tl.store(ring + place[:, None] * CHANNELS + channel[None, :], own, mask=here)
                if GATES > 0:  # noqa: SIM102, of a constant and of a value
                    if tl.program_id(1) == 0:
                        gate = tl.arange(0, BLOCK_G)
                        asked = there[:, None] & (gate < GATES)[None, :]
                        of_node = tl.load(gates + of_row[:, None] * GATES + gate[None, :], mask=asked)
                        tl.store(ring_gates + place[:, None] * GATES + gate[None, :], of_node, mask=asked)


@triton.jit
def _part(rows, row, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, there):  # type: ignore[no-untyped-def]
    """[n, BLOCK] fp32: numbers `at` on of rows [n]."""
    k = tl.arange(0, BLOCK)
    here = there[:, None] & (k < WIDTH)[None, :]
    return tl.load(rows + row.to(tl.int64)[:, None] * CHANNELS + at + k[None, :], mask=here, other=0.0).to(tl.float32)


@triton.jit
def _of_length_one(heads, NORMED: tl.constexpr):  # type: ignore[no-untyped-def]
    if NORMED:
        heads = heads * tl.rsqrt(tl.sum(heads * heads, 1) + _EPSILON)[:, None]
    return heads


@triton.jit
def _solve(  # type: ignore[no-untyped-def]
    state, rows, gates, output, row, there, mask, depth, head, part, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr,
    CHANNELS: tl.constexpr, NORMED: tl.constexpr, SCALING: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of nodes `row` [n] behind a state [BLOCK_K, BLOCK_V], whose ancestors `mask` [n, n] has; and
    return the state behind the last one, if the nodes are a chain. `depth` substitutions suffice: node after node, each
    gets its ancestors' final values."""
    of_key = head // GROUP * DK
    query = _of_length_one(_part(rows, row, QUERY_AT + of_key, DK, BLOCK_K, CHANNELS, there), NORMED) * SCALING
    key = _of_length_one(_part(rows, row, KEY_AT + of_key, DK, BLOCK_K, CHANNELS, there), NORMED)
    column = part * BLOCK_V + tl.arange(0, BLOCK_V)
    here = there[:, None] & (column < DV)[None, :]
    value_at = row.to(tl.int64)[:, None] * CHANNELS + VALUE_AT + head * DV + column[None, :]
    value = tl.load(rows + value_at, mask=here, other=0.0).to(tl.float32)
    log = tl.load(gates + row.to(tl.int64) * 2 * HEADS + head, mask=there, other=0.0)
    beta = tl.load(gates + row.to(tl.int64) * 2 * HEADS + HEADS + head, mask=there, other=0.0)
    # Not finite: of no effect on nodes that do not descend from it.
    broken = (tl.sum(key - key, 1) != 0.0) | (tl.sum(value - value, 1) != 0.0) | (log - log + beta - beta != 0.0)
    key, value = tl.where(broken[:, None], 0.0, key), tl.where(broken[:, None], 0.0, value)
    log, beta = tl.where(broken, 0.0, log), tl.where(broken, 0.0, beta)
    sums = tl.sum(tl.where(mask, log[None, :], 0.0), 1)
    weights = tl.where(mask, tl.exp(sums[:, None] - sums[None, :]), 0.0)
    reached = tl.exp(sums)
    added = value
    if DELTA:
        added = value - reached[:, None] * tl.dot(key, state, input_precision=PRECISION)
    added = beta[:, None] * added
    solved = added
    if DELTA:
        i = tl.arange(0, mask.shape[0])
        system = beta[:, None] * tl.dot(key, tl.trans(key), input_precision=PRECISION) * weights
        system = tl.where(i[:, None] > i[None, :], system, 0.0)
        for _ in range(depth):
            solved = added - tl.dot(system, solved, input_precision=PRECISION)
    made = reached[:, None] * tl.dot(query, state, input_precision=PRECISION)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * weights
    made += tl.dot(scores, solved, input_precision=PRECISION)
    spoiled = tl.sum(tl.where(mask & broken[None, :], 1, 0), 1) > 0
    made = tl.where(spoiled[:, None], float("nan"), made)
    output_at = (row.to(tl.int64) * HEADS + head)[:, None] * DV + column[None, :]
    tl.store(output + output_at, made, mask=here)
    whole = tl.sum(log, 0)
    left = key * tl.exp(whole - sums)[:, None]
    return tl.exp(whole) * state + tl.dot(tl.trans(left), solved, input_precision=PRECISION)


@triton.jit
def mix_kernel(  # type: ignore[no-untyped-def]
    rows, folded, gates, ring_gates, states, output, query_starts, prefix_lengths, slots, pending_keys, words, depths,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, NORMED: tl.constexpr,
    SCALING: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, FEW: tl.constexpr,
    MOST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, columns of values): fold pending keys into the state, then the outputs of all rows."""
    b, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if count > 0:
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b).to(tl.int64)
        pending = tl.load(pending_keys + b)
        k, column = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
        here = (k < DK)[:, None] & (column < DV)[None, :]
        at = states + (slot * HEADS + head) * DK * DV + k[:, None] * DV + column[None, :]
        state = tl.load(at, mask=here & (prefix + tl.zeros_like(k) > 0)[:, None], other=0.0)
        one = tl.arange(0, 1)
        for t in range(pending):
            place = slot * WINDOW + (prefix - pending + t) % WINDOW
            decay = tl.exp(tl.load(ring_gates + place * 2 * HEADS + head))
            beta = tl.load(ring_gates + place * 2 * HEADS + HEADS + head)
            of_key = folded + (b.to(tl.int64) * WINDOW + t) * CHANNELS
            key = _part(of_key, one, KEY_AT + head // GROUP * DK, DK, BLOCK_K, CHANNELS, one == 0)
            key = tl.sum(_of_length_one(key, NORMED), 0)
            value = tl.load(of_key + VALUE_AT + head * DV + column, mask=column < DV, other=0.0).to(tl.float32)
            state = state * decay
            if DELTA:
                value = value - tl.sum(key[:, None] * state, 0)
            state += key[:, None] * (beta * value)[None, :]
        if count > WINDOW:
            i = tl.arange(0, CHUNK)
            for first in range(0, count, CHUNK):
                state = _solve(
                    state, rows, gates, output, start + first + i, first + i < count, i[:, None] >= i[None, :],
                    CHUNK - 1, head, part, HEADS, GROUP, DK, DV, QUERY_AT, KEY_AT, VALUE_AT, CHANNELS, NORMED, SCALING,
                    DELTA, BLOCK_K, BLOCK_V, PRECISION,
                )  # fmt: skip
        tl.store(at, state, mask=here)
        if (count <= FEW) & (count <= WINDOW):
            i = tl.arange(0, FEW)
            word = tl.load(words + start + i, mask=i < count, other=0)
            mask = ((word[:, None] >> i.to(tl.int64)[None, :]) & 1) != 0
            depth = tl.max(tl.load(depths + start + i, mask=i < count, other=0), 0)
            _solve(
                state, rows, gates, output, start + i, i < count, mask, depth, head, part, HEADS, GROUP, DK, DV,
                QUERY_AT, KEY_AT, VALUE_AT, CHANNELS, NORMED, SCALING, DELTA, BLOCK_K, BLOCK_V, PRECISION,
            )  # fmt: skip
        elif count <= WINDOW:
            i = tl.arange(0, MOST)
            word = tl.load(words + start + i, mask=i < count, other=0)
            mask = ((word[:, None] >> i.to(tl.int64)[None, :]) & 1) != 0
            depth = tl.max(tl.load(depths + start + i, mask=i < count, other=0), 0)
            _solve(
                state, rows, gates, output, start + i, i < count, mask, depth, head, part, HEADS, GROUP, DK, DV,
                QUERY_AT, KEY_AT, VALUE_AT, CHANNELS, NORMED, SCALING, DELTA, BLOCK_K, BLOCK_V, PRECISION,
            )  # fmt: skip
