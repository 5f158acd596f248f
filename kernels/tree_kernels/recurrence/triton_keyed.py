"""Triton: states each number of whose keys decays by itself, in one launch: fold what was accepted, read the state at
each row. Of prompts another launch solves 64 rows at a time first, without the state.

As `torch_backend` has it, but a decay between two tokens is a vector: with G(i) [Dk] the sum of the logarithms up to
token i of a chunk, and S the state before it, what token i adds is k(i) u(i) with

    u(i) = beta(i) * (v(i) - (k(i) exp(G(i))) S - sum over j < i of (k(i) exp(G(i) - G(j)) k(j)) u(j))

A tree's node runs its own path from the state on, which is in registers: paths of guesses are short, and no node's
state is ever written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.recurrence.triton_mixing import (
    CHUNK,
    SOLVED,
    broken_rows,
    inverse_of,
    is_broken,
    of_length_one,
    one_part,
    parts_of,
)


@triton.jit
def _between(query, key, sums, PRECISION: tl.constexpr, KIND: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two matrices [64, 64] below and on the diagonal: queries [64, BLOCK_K] with keys, and keys with keys, each number
    decayed from the token of the column to that of the row. `sums` [64, BLOCK_K] are the logarithms up to each token.

    Blocks of 16 rows meet the tokens before them by two powers, neither of a positive number: up to the block, and from
    there on. Within a block every pair has a power of its own.
    """
    blocks: tl.constexpr = CHUNK // SOLVED
    row, inner = tl.arange(0, CHUNK), tl.arange(0, SOLVED)
    of_block = row // SOLVED
    scores, system = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for later in range(1, blocks):
        up_to = tl.sum(tl.where((row == later * SOLVED - 1)[:, None], sums, 0.0), 0)[None, :]
        here, earlier = (of_block == later)[:, None], (of_block < later)[:, None]
        # The powers that are not taken may be of positive numbers.
        since = tl.exp(tl.where(here, sums - up_to, 0.0))
        met = tl.trans(tl.where(earlier, key * tl.exp(tl.where(earlier, up_to - sums, 0.0)), 0.0).to(KIND))
        scores += tl.dot(tl.where(here, query * since, 0.0).to(KIND), met, input_precision=PRECISION)
        system += tl.dot(tl.where(here, key * since, 0.0).to(KIND), met, input_precision=PRECISION)
    queries, keys = tl.reshape(query, [blocks, SOLVED, BLOCK_K]), tl.reshape(key, [blocks, SOLVED, BLOCK_K])
    whole = tl.reshape(sums, [blocks, SOLVED, BLOCK_K])
    for token in range(SOLVED):
        chosen = (inner == token)[None, :, None]
        until = tl.sum(tl.where(chosen, whole, 0.0), 1)[:, None, :]
        behind = (inner >= token)[None, :, None]
        paired = tl.where(behind, tl.exp(tl.where(behind, whole - until, 0.0)), 0.0)
        paired = paired * tl.sum(tl.where(chosen, keys, 0.0), 1)[:, None, :]
        column = (of_block * SOLVED + token)[:, None] == row[None, :]
        scores += tl.where(column, tl.reshape(tl.sum(queries * paired, 2), [CHUNK])[:, None], 0.0)
        system += tl.where(column, tl.reshape(tl.sum(keys * paired, 2), [CHUNK])[:, None], 0.0)
    return scores, system


@triton.jit
def prepare_keyed_kernel(  # type: ignore[no-untyped-def]
    rows, gates, queries, keys, reading, values, scores, reached, query_starts, WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, NORMED: tl.constexpr, SCALING: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, chunk), of sequences of known rows: as `triton_mixing.prepare_kernel`, and the powers by
    which a chunk takes the state before it to the one behind it, [chunks, H, BLOCK_K] fp32."""
    b, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * CHUNK
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if (count > WINDOW) & (first < count):
        i, k, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        row, there = (start + first + i).to(tl.int64), first + i < count
        size = HEADS * DK + HEADS
        kind = rows.dtype.element_ty
        query = of_length_one(parts_of(rows, row, QUERY_AT + head * DK, DK, BLOCK_K, CHANNELS, there), NORMED) * SCALING
        key = of_length_one(parts_of(rows, row, KEY_AT + head * DK, DK, BLOCK_K, CHANNELS, there), NORMED)
        value = parts_of(rows, row, VALUE_AT + head * DV, DV, BLOCK_V, CHANNELS, there)
        log = parts_of(gates, row, head * DK, DK, BLOCK_K, size, there)
        beta = tl.load(gates + row * size + HEADS * DK + head, mask=there, other=0.0)
        broken = broken_rows(key) | broken_rows(value) | broken_rows(log) | (is_broken(beta) > 0)
        key, value = tl.where(broken[:, None], 0.0, key), tl.where(broken[:, None], 0.0, value)
        log, beta = tl.where(broken[:, None], 0.0, log), tl.where(broken, 0.0, beta)
        sums, whole = tl.cumsum(log, 0), tl.sum(log, 0)
        of_keys, system = _between(query, key, sums, PRECISION, rows.dtype.element_ty, BLOCK_K)
        spoiled = tl.cumsum(tl.where(broken, 1, 0), 0) > 0
        of_keys = tl.where(spoiled[:, None], float("nan"), of_keys)
        of_state = row * HEADS + head
        wide = of_state[:, None] * BLOCK_K + k[None, :]
        tl.store(scores + of_state[:, None] * CHUNK + i[None, :], of_keys, mask=there[:, None])
        tl.store(queries + wide, query * tl.exp(sums), mask=there[:, None])
        tl.store(keys + wide, key * tl.exp(whole[None, :] - sums), mask=there[:, None])
        # As many as all sequences can have.
        chunk = start // CHUNK + b + tl.program_id(2)
        tl.store(reached + (chunk.to(tl.int64) * HEADS + head) * BLOCK_K + k, tl.exp(whole))
        inverse = inverse_of(tl.where(i[:, None] > i[None, :], beta[:, None] * system, 0.0), PRECISION).to(kind)
        read = (beta[:, None] * tl.exp(sums) * key).to(kind)
        tl.store(reading + wide, tl.dot(inverse, read, input_precision=PRECISION), mask=there[:, None])
        added = tl.dot(inverse, (beta[:, None] * value).to(kind), input_precision=PRECISION)
        here = there[:, None] & (column < DV)[None, :]
        tl.store(values + of_state[:, None] * DV + column[None, :], added, mask=here)


@triton.jit
def _mix_prepared(  # type: ignore[no-untyped-def]
    state, queries, keys, reading, values, scores, reached, output, start, count, b, head, column, HEADS: tl.constexpr,
    DV: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of prepared rows behind a state [BLOCK_K, BLOCK_V], chunk after chunk; and return the state
    behind the last one."""
    i, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    kind = values.dtype.element_ty
    for first in tl.range(0, count, CHUNK, num_stages=STAGES):
        there = first + i < count
        of_state = (start + first + i).to(tl.int64) * HEADS + head
        here = there[:, None] & (column < DV)[None, :]
        wide = of_state[:, None] * BLOCK_K + k[None, :]
        of_value = of_state[:, None] * DV + column[None, :]
        rounded = state.to(kind)
        read = tl.load(reading + wide, mask=there[:, None], other=0.0)
        added = tl.load(values + of_value, mask=here, other=0.0).to(tl.float32)
        added = (added - tl.dot(read, rounded, input_precision=PRECISION)).to(kind)
        query = tl.load(queries + wide, mask=there[:, None], other=0.0)
        of_keys = tl.load(scores + of_state[:, None] * CHUNK + i[None, :], mask=there[:, None], other=0.0)
        made = tl.dot(query, rounded, input_precision=PRECISION)
        made += tl.dot(of_keys, added, input_precision=PRECISION)
        tl.store(output + of_value, made, mask=here)
        chunk = (start // CHUNK + b + first // CHUNK).to(tl.int64)
        key = tl.load(keys + wide, mask=there[:, None], other=0.0)
        state = state * tl.load(reached + (chunk * HEADS + head) * BLOCK_K + k)[:, None]
        state += tl.dot(tl.trans(key), added, input_precision=PRECISION)
    return state


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
    rows, gates, folded, ring_gates, states, output, queries, keys, reading, values, scores, reached, query_starts,
    prefix_lengths, sources, targets, causal, pending_keys, words, PROMPTS: tl.constexpr, WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, NORMED: tl.constexpr, SCALING: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, columns of values): `folded` [B, window, C] and `rows` [R, C] are outputs of the
    convolution, `gates` [R, H * Dk + H] fp32, `output` [R, H, Dv]. Where there may be `PROMPTS`, their rows are
    prepared."""
    b, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if count > 0:
        prefix = tl.load(prefix_lengths + b)
        source, target = tl.load(sources + b).to(tl.int64), tl.load(targets + b).to(tl.int64)
        pending, first, size = tl.load(pending_keys + b), start.to(tl.int64), HEADS * DK + HEADS
        k, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        here = (k < DK)[:, None] & (column < DV)[None, :]
        of_slot = head * DK * DV + k[:, None] * DV + column[None, :]
        before, at = states + source * HEADS * DK * DV + of_slot, states + target * HEADS * DK * DV + of_slot
        # Of a sequence that begins, the slot holds what another left.
        state = tl.load(before, mask=here & (prefix + tl.zeros_like(k) > 0)[:, None], other=0.0)
        for t in range(pending):
            place = source * WINDOW + (prefix - pending + t) % WINDOW
            of_key = folded + (b.to(tl.int64) * WINDOW + t) * CHANNELS
            state = _keyed_behind(
                state, of_key, ring_gates + place * size, head, column, HEADS, DK, DV, KEY_AT, VALUE_AT, NORMED, BLOCK_K
            )
        if count <= WINDOW:
            tl.store(at, state, mask=here)
            chain = tl.load(causal + b) != 0
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
                                own, rows + (first + j) * CHANNELS, gates + (first + j) * size, head, column, HEADS, DK,
                                DV, KEY_AT, VALUE_AT, NORMED, BLOCK_K,
                            )  # fmt: skip
                query = one_part(rows + row * CHANNELS, QUERY_AT + head * DK, DK, BLOCK_K, NORMED) * SCALING
                made = tl.sum(query[:, None] * own, 0)
                tl.store(output + (row * HEADS + head) * DV + column, made, mask=column < DV)
        elif PROMPTS:
            state = _mix_prepared(
                state, queries, keys, reading, values, scores, reached, output, start, count, b, head, column, HEADS,
                DV, BLOCK_K, STAGES, PRECISION,
            )  # fmt: skip
            tl.store(at, state, mask=here)
