"""Triton: the states of heads: fold what was accepted, read the state at each row. Beside it, in programs of their own,
what is kept of the inputs of all sequences' rows.

Sequences of one row and of up to 16 rows are solved in one launch each. Of more rows `prepare_kernel` solves what does
not need the state first, 64 rows at a time: a tree, or a chunk of a prompt (the WY representation of arXiv 2412.06464,
of any tree's ancestors). Each kind of sequence has launches of its own: what one of them needs of a processor, which is
most of it for many rows, would leave few programs of the others to run beside one another. `plan_kernel` lists those of
several rows, so that a captured pass launches few programs for a kind that may be absent.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.recurrence.triton_kernels import keep_rows

_EPSILON = tl.constexpr(1e-6)
# Rows that are prepared together.
CHUNK = tl.constexpr(64)
# Rows whose system is solved by substitution, one after the other; blocks of them by products.
SOLVED = tl.constexpr(16)


@triton.jit
def parts_of(rows, row, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, there):  # type: ignore[no-untyped-def]
    """[n, BLOCK] fp32: numbers `at` on of rows [n]."""
    k = tl.arange(0, BLOCK)
    here = there[:, None] & (k < WIDTH)[None, :]
    return tl.load(rows + row.to(tl.int64)[:, None] * CHANNELS + at + k[None, :], mask=here, other=0.0).to(tl.float32)


@triton.jit
def of_length_one(heads, NORMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads [n, BLOCK], divided by their length where they are normed."""
    if NORMED:
        heads = heads * tl.rsqrt(tl.sum(heads * heads, 1) + _EPSILON)[:, None]
    return heads


@triton.jit
def is_broken(numbers):  # type: ignore[no-untyped-def]
    """1 where a number is not finite. Not by `x - x`: where x is a product, a GPU makes one operation of both, and the
    result is what rounding took from x."""
    return tl.where(tl.abs(numbers) < float("inf"), 0, 1)


@triton.jit
def broken_rows(rows):  # type: ignore[no-untyped-def]
    """[n] whether a row of [n, m] has numbers that are not finite."""
    return tl.max(is_broken(rows), 1) > 0


@triton.jit
def one_part(row, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK] fp32: numbers `at` on of one row, as `parts_of` and `of_length_one` have them."""
    k = tl.arange(0, BLOCK)
    return part_of_length_one(tl.load(row + at + k, mask=k < WIDTH, other=0.0).to(tl.float32), NORMED)


@triton.jit
def part_of_length_one(part, NORMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One head [BLOCK], as `of_length_one` has it."""
    if NORMED:
        part = part * tl.rsqrt(tl.sum(part * part, 0) + _EPSILON)
    return part


@triton.jit
def _token_at(token, gate, key_at, value_at, of_key, of_value, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A token's key and value [m] fp32, where `of_key` and `of_value` are, the logarithm of its decay, and its beta."""
    key = tl.load(token + key_at, mask=of_key, other=0.0).to(tl.float32)
    value = tl.load(token + value_at, mask=of_value, other=0.0).to(tl.float32)
    return key, value, tl.load(gate), tl.load(gate + HEADS)


@triton.jit
def with_token(state, key, value, decay, beta, DELTA: tl.constexpr):  # type: ignore[no-untyped-def]
    """A state [Dk, Dv] behind one more token."""
    state = state * decay
    if DELTA:
        value = value - tl.sum(key[:, None] * state, 0)
    return state + key[:, None] * (beta * value)[None, :]


@triton.jit
def inverse_of(system, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + system)^-1 of a strictly lower triangular system [64, 64]: blocks of 16 on its diagonal by substitution, row
    after row, then blocks of blocks. Each value is final before another is made of it, so none grows beyond what it
    is, as powers of the system would."""
    blocks: tl.constexpr = CHUNK // SOLVED
    i, block = tl.arange(0, SOLVED), tl.arange(0, blocks)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    whole = tl.reshape(system, [blocks, SOLVED, blocks, SOLVED])
    # [4, 16, 16], the blocks on the diagonal, and their inverses, of which each row is made of those above it.
    diagonal = tl.sum(tl.where(same, whole, 0.0), 2)
    inverse = tl.zeros([blocks, SOLVED, SOLVED], tl.float32)
    inverse += tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, 0.0)
    for row in range(1, SOLVED):
        here = (i == row)[None, :, None]
        of_row = tl.sum(tl.where(here, diagonal, 0.0), 1)
        made = tl.sum(of_row[:, :, None] * tl.where((i < row)[None, :, None], inverse, 0.0), 1)
        inverse = tl.where(here, inverse - made[:, None, :], inverse)
    spread = tl.where(same, inverse[:, :, None, :], 0.0) + tl.zeros([blocks, SOLVED, blocks, SOLVED], tl.float32)
    first = tl.reshape(spread, [CHUNK, CHUNK])
    below = tl.reshape(tl.where(same, 0.0, whole), [CHUNK, CHUNK])
    below = tl.dot(first, below, input_precision=PRECISION)
    found = first
    for _ in range(blocks - 1):
        found = first - tl.dot(below, found, input_precision=PRECISION)
    return found


@triton.jit
def prepare_kernel(  # type: ignore[no-untyped-def]
    rows, gates, queries, keys, reading, values, scores, reached, query_starts, words, listed, sequences, chunks,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, NORMED: tl.constexpr,
    SCALING: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each (sequence of many rows, chunk of up to `chunks`, head) in turn: what `mix_many_kernel` multiplies the state
    S before a chunk with. A node's output is queries S + scores u, with u = values - reading S, and the state behind a
    chain's chunk is reached (of its last row) S + keys^T u. See `torch_backend` for the formulas.

    `queries`, `keys`, `reading` [R, H, BLOCK_K], `values` [R, H, DV], `scores` [R, H, 64] have the type of rows;
    `reached` [R, H] is fp32.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item, items = tl.program_id(0), tl.load(listed + 1) * chunks * HEADS
    while item < items:
        head, place = item % HEADS, item // HEADS
        b, first = tl.load(listed + 2 + sequences + place // chunks), place % chunks * CHUNK
        start = tl.load(query_starts + b)
        count = tl.load(query_starts + b + 1) - start
        if first < count:
            i, k, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
            row, there = (start + first + i).to(tl.int64), first + i < count
            mask = i[:, None] >= i[None, :]
            if count <= WINDOW:
                word = tl.load(words + row, mask=there, other=0)
                mask = ((word[:, None] >> i.to(tl.int64)[None, :]) & 1) != 0
            of_key = head // GROUP * DK
            query = (
                of_length_one(parts_of(rows, row, QUERY_AT + of_key, DK, BLOCK_K, CHANNELS, there), NORMED) * SCALING
            )
            key = of_length_one(parts_of(rows, row, KEY_AT + of_key, DK, BLOCK_K, CHANNELS, there), NORMED)
            value = parts_of(rows, row, VALUE_AT + head * DV, DV, BLOCK_V, CHANNELS, there)
            log = tl.load(gates + row * 2 * HEADS + head, mask=there, other=0.0)
            beta = tl.load(gates + row * 2 * HEADS + HEADS + head, mask=there, other=0.0)
            # Of no effect on nodes that do not descend from it.
            broken = broken_rows(key) | broken_rows(value) | (is_broken(log) + is_broken(beta) > 0)
            key, value = tl.where(broken[:, None], 0.0, key), tl.where(broken[:, None], 0.0, value)
            log, beta = tl.where(broken, 0.0, log), tl.where(broken, 0.0, beta)
            sums = tl.sum(tl.where(mask, log[None, :], 0.0), 1)
            weights = tl.where(mask, tl.exp(sums[:, None] - sums[None, :]), 0.0)
            kind = rows.dtype.element_ty
            of_state = row * HEADS + head
            wide = of_state[:, None] * BLOCK_K + k[None, :]
            rounded = key.to(kind)
            of_keys = tl.dot(query.to(kind), tl.trans(rounded), input_precision=PRECISION) * weights
            spoiled = tl.sum(tl.where(mask & broken[None, :], 1, 0), 1) > 0
            of_keys = tl.where(spoiled[:, None], float("nan"), of_keys)
            tl.store(scores + of_state[:, None] * CHUNK + i[None, :], of_keys, mask=there[:, None])
            tl.store(queries + wide, query * tl.exp(sums)[:, None], mask=there[:, None])
            tl.store(reached + of_state, tl.exp(sums), mask=there)
            # Decays of a chain from each row to the last.
            tl.store(keys + wide, key * tl.exp(tl.sum(log, 0) - sums)[:, None], mask=there[:, None])
            added = beta[:, None] * value
            if DELTA:
                system = beta[:, None] * tl.dot(rounded, tl.trans(rounded), input_precision=PRECISION) * weights
                inverse = inverse_of(tl.where(i[:, None] > i[None, :], system, 0.0), PRECISION).to(kind)
                read = (beta * tl.exp(sums))[:, None] * key
                tl.store(reading + wide, tl.dot(inverse, read.to(kind), input_precision=PRECISION), mask=there[:, None])
                added = tl.dot(inverse, added.to(kind), input_precision=PRECISION)
            here = there[:, None] & (column < DV)[None, :]
            tl.store(values + of_state[:, None] * DV + column[None, :], added, mask=here)
        item += tl.num_programs(0)


@triton.jit
def _mix_prepared(  # type: ignore[no-untyped-def]
    state, queries, keys, reading, values, scores, reached, output, start, count, head, column, HEADS: tl.constexpr,
    DV: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of prepared rows behind a state [BLOCK_K, BLOCK_V], chunk after chunk; and return the state
    behind the last one, if the rows are a chain."""
    i, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    kind = values.dtype.element_ty
    for first in tl.range(0, count, CHUNK, num_stages=STAGES):
        there = first + i < count
        of_state = (start + first + i).to(tl.int64) * HEADS + head
        here = there[:, None] & (column < DV)[None, :]
        wide = of_state[:, None] * BLOCK_K + k[None, :]
        of_value = of_state[:, None] * DV + column[None, :]
        rounded = state.to(kind)
        added = tl.load(values + of_value, mask=here, other=0.0)
        if DELTA:
            read = tl.load(reading + wide, mask=there[:, None], other=0.0)
            added = (added.to(tl.float32) - tl.dot(read, rounded, input_precision=PRECISION)).to(kind)
        query = tl.load(queries + wide, mask=there[:, None], other=0.0)
        of_keys = tl.load(scores + of_state[:, None] * CHUNK + i[None, :], mask=there[:, None], other=0.0)
        made = tl.dot(query, rounded, input_precision=PRECISION)
        made += tl.dot(of_keys, added, input_precision=PRECISION)
        tl.store(output + of_value, made, mask=here)
        last = (start + tl.minimum(first + CHUNK, count) - 1).to(tl.int64) * HEADS + head
        key = tl.load(keys + wide, mask=there[:, None], other=0.0)
        state = state * tl.load(reached + last) + tl.dot(tl.trans(key), added, input_precision=PRECISION)
    return state


@triton.jit
def _solve_few(  # type: ignore[no-untyped-def]
    state, rows, gates, output, row, there, mask, depth, head, column, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr,
    CHANNELS: tl.constexpr, NORMED: tl.constexpr, SCALING: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of nodes `row` [n] behind a state [BLOCK_K, BLOCK_V], whose ancestors `mask` [n, n] has.
    `depth` substitutions suffice: node after node, each gets its ancestors' final values."""
    of_key = head // GROUP * DK
    query = of_length_one(parts_of(rows, row, QUERY_AT + of_key, DK, BLOCK_K, CHANNELS, there), NORMED) * SCALING
    key = of_length_one(parts_of(rows, row, KEY_AT + of_key, DK, BLOCK_K, CHANNELS, there), NORMED)
    here = there[:, None] & (column < DV)[None, :]
    value_at = row.to(tl.int64)[:, None] * CHANNELS + VALUE_AT + head * DV + column[None, :]
    value = tl.load(rows + value_at, mask=here, other=0.0).to(tl.float32)
    log = tl.load(gates + row.to(tl.int64) * 2 * HEADS + head, mask=there, other=0.0)
    beta = tl.load(gates + row.to(tl.int64) * 2 * HEADS + HEADS + head, mask=there, other=0.0)
    # Of no effect on nodes that do not descend from it.
    broken = broken_rows(key) | broken_rows(value) | (is_broken(log) + is_broken(beta) > 0)
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
    of_keys = tl.dot(query, tl.trans(key), input_precision=PRECISION) * weights
    made += tl.dot(of_keys, solved, input_precision=PRECISION)
    spoiled = tl.sum(tl.where(mask & broken[None, :], 1, 0), 1) > 0
    made = tl.where(spoiled[:, None], float("nan"), made)
    output_at = (row.to(tl.int64) * HEADS + head)[:, None] * DV + column[None, :]
    tl.store(output + output_at, made, mask=here)


@triton.jit
def state_behind(  # type: ignore[no-untyped-def]
    states, folded, folded_gates, b, head, column, prefix, pending, source, target, count, WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, NORMED: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The state [BLOCK_K, m] of a sequence behind its pending keys, read from one slot and written to another. Of known
    rows it is not written: more follows."""
    k = tl.arange(0, BLOCK_K)
    here, of_tile = (k < DK)[:, None] & (column < DV)[None, :], k[:, None] * DV + column[None, :]
    before = states + (source * HEADS + head) * DK * DV + of_tile
    # Of a sequence that begins, the slot holds what another left.
    state = tl.load(before, mask=here & (prefix + tl.zeros_like(k) > 0)[:, None], other=0.0)
    token, gate = folded + b.to(tl.int64) * WINDOW * CHANNELS, folded_gates + b.to(tl.int64) * WINDOW * 2 * HEADS + head
    key_at, value_at = KEY_AT + head // GROUP * DK + k, VALUE_AT + head * DV + column
    # The next token is read while one is taken into the state. What is read without a next one is not used.
    key, value, log, beta = _token_at(token, gate, key_at, value_at, k < DK, column < DV, HEADS)
    for t in range(pending):
        ahead = tl.minimum(t + 1, WINDOW - 1)
        of_next = _token_at(
            token + ahead * CHANNELS, gate + ahead * 2 * HEADS, key_at, value_at, k < DK, column < DV, HEADS
        )
        state = with_token(state, part_of_length_one(key, NORMED), value, tl.exp(log), beta, DELTA)
        key, value, log, beta = of_next
    if count <= WINDOW:
        tl.store(states + (target * HEADS + head) * DK * DV + of_tile, state, mask=here)
    return state


@triton.jit
def _sequence(query_starts, prefix_lengths, pending_keys, sources, targets, b):  # type: ignore[no-untyped-def]
    """A sequence's first row and rows, the tokens before them, its pending keys, and the slots that its state is read
    from and written to."""
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    source, target = tl.load(sources + b).to(tl.int64), tl.load(targets + b).to(tl.int64)
    return start, count, tl.load(prefix_lengths + b), tl.load(pending_keys + b), source, target


@triton.jit
def mix_single_kernel(  # type: ignore[no-untyped-def]
    inputs, ring, windows, rows, folded, folded_gates, gates, ring_gates, states, output, query_starts, prefix_lengths,
    sources, targets, pending_keys, stride, STATES: tl.constexpr, WINDOW: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, NORMED: tl.constexpr, SCALING: tl.constexpr,
    DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (head and columns of values, sequence): see `torch_backend`. Programs from number `STATES` on, which is 0
    where no sequence has one row, call `keep_rows` of BLOCK_C channels, of any sequence.

    A program reads its part of the state once and writes it once, and little else. What counts is how many run beside
    one another, so that enough of the state is on its way: nothing here needs much of a processor, and no read waits
    for another but for the first ones.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item, b = tl.program_id(0), tl.program_id(1)
    start, count, prefix, pending, source, target = _sequence(
        query_starts, prefix_lengths, pending_keys, sources, targets, b
    )
    if item >= STATES:
        if count > 0:
            channel = (item - STATES) * BLOCK_C + tl.arange(0, BLOCK_C)
            keep_rows(
                inputs, gates, ring, ring_gates, windows, start, count, prefix, source, target, pending, channel,
                item == STATES, stride, WINDOW, CHANNELS, TAPS, 2 * HEADS, BLOCK_R, BLOCK_T, BLOCK_G,
            )  # fmt: skip
    elif count == 1:
        # Neighbours read one head, which lies in one piece.
        head, k, column = item // PARTS, tl.arange(0, BLOCK_K), item % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        row, of_row, gate = start.to(tl.int64), rows + start.to(tl.int64) * CHANNELS, gates + start * 2 * HEADS + head
        log, beta = tl.load(gate), tl.load(gate + HEADS)
        key = tl.load(of_row + KEY_AT + head // GROUP * DK + k, mask=k < DK, other=0.0).to(tl.float32)
        query = tl.load(of_row + QUERY_AT + head // GROUP * DK + k, mask=k < DK, other=0.0).to(tl.float32)
        value = tl.load(of_row + VALUE_AT + head * DV + column, mask=column < DV, other=0.0).to(tl.float32)
        state = state_behind(
            states, folded, folded_gates, b, head, column, prefix, pending, source, target, count, WINDOW, CHANNELS,
            HEADS, GROUP, DK, DV, KEY_AT, VALUE_AT, NORMED, DELTA, BLOCK_K,
        )  # fmt: skip
        state = with_token(state, part_of_length_one(key, NORMED), value, tl.exp(log), beta, DELTA)
        query = part_of_length_one(query, NORMED) * SCALING
        made = tl.sum(query[:, None] * state, 0)
        tl.store(output + (row * HEADS + head) * DV + column, made, mask=column < DV)


@triton.jit
def mix_few_kernel(  # type: ignore[no-untyped-def]
    rows, folded, folded_gates, gates, states, output, query_starts, prefix_lengths, sources, targets, pending_keys,
    words, depths, listed, WINDOW: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr,
    NORMED: tl.constexpr, SCALING: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, FEW: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each (sequence of 2 to `FEW` rows, head, columns of values) in turn: fold pending keys into the state, then the
    outputs of all rows."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item, items = tl.program_id(0), tl.load(listed) * HEADS * PARTS
    while item < items:
        b, head = tl.load(listed + 2 + item // (HEADS * PARTS)), item // PARTS % HEADS
        start, count, prefix, pending, source, target = _sequence(
            query_starts, prefix_lengths, pending_keys, sources, targets, b
        )
        column = item % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        state = state_behind(
            states, folded, folded_gates, b, head, column, prefix, pending, source, target, count, WINDOW, CHANNELS,
            HEADS, GROUP, DK, DV, KEY_AT, VALUE_AT, NORMED, DELTA, BLOCK_K,
        )  # fmt: skip
        i = tl.arange(0, FEW)
        word = tl.load(words + start + i, mask=i < count, other=0)
        mask = ((word[:, None] >> i.to(tl.int64)[None, :]) & 1) != 0
        depth = tl.max(tl.load(depths + start + i, mask=i < count, other=0), 0)
        _solve_few(
            state, rows, gates, output, start + i, i < count, mask, depth, head, column, HEADS, GROUP, DK, DV, QUERY_AT,
            KEY_AT, VALUE_AT, CHANNELS, NORMED, SCALING, DELTA, BLOCK_K, PRECISION,
        )  # fmt: skip
        item += tl.num_programs(0)


@triton.jit
def mix_many_kernel(  # type: ignore[no-untyped-def]
    folded, folded_gates, states, output, queries, keys, reading, values, scores, reached, query_starts, prefix_lengths,
    sources, targets, pending_keys, listed, sequences, WINDOW: tl.constexpr, CHANNELS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr, NORMED: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each (sequence of more rows, head, columns of values) in turn: fold pending keys into the state, then the outputs
    of rows that were prepared, and of known ones the state behind them."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item, items = tl.program_id(0), tl.load(listed + 1) * HEADS * PARTS
    while item < items:
        b, head = tl.load(listed + 2 + sequences + item // (HEADS * PARTS)), item // PARTS % HEADS
        start, count, prefix, pending, source, target = _sequence(
            query_starts, prefix_lengths, pending_keys, sources, targets, b
        )
        column = item % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        state = state_behind(
            states, folded, folded_gates, b, head, column, prefix, pending, source, target, count, WINDOW, CHANNELS,
            HEADS, GROUP, DK, DV, KEY_AT, VALUE_AT, NORMED, DELTA, BLOCK_K,
        )  # fmt: skip
        state = _mix_prepared(
            state, queries, keys, reading, values, scores, reached, output, start, count, head, column, HEADS, DV,
            DELTA, BLOCK_K, STAGES, PRECISION,
        )  # fmt: skip
        if count > WINDOW:
            k = tl.arange(0, BLOCK_K)
            here = (k < DK)[:, None] & (column < DV)[None, :]
            at = states + (target * HEADS + head) * DK * DV + k[:, None] * DV + column[None, :]
            tl.store(at, state, mask=here)
        item += tl.num_programs(0)
