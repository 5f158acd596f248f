"""Triton: the plan of a pass over layers with states, their convolution, and what is kept of its inputs.

Sequence b of a step has rows `query_starts[b]` to `query_starts[b + 1]` behind `prefix_lengths[b]` keys. Tokens are
counted from its first row on: 0 is that row, -1 the last key. The last `pending[b]` keys are not in the state yet,
which is read from slot `sources[b]`, with what is kept of them, and written to slot `targets[b]`, as their rows are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def plan_kernel(  # type: ignore[no-untyped-def]
    query_starts, prefix_lengths, slots, causal, parents, lengths, seconds, pending, sources, targets, words, depths,
    node_slots, listed, PAGE: tl.constexpr, WINDOW: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One sequence a program: its pending keys, the slots of its state before and behind, its rows' ancestors as bits,
    their depths and places of their inputs. Takes the pass into the state's length. Of two slots the one with the
    longer state is read, and the other is written where that goes past a page end; see `RecurrentStates`.

    `listed` [2 + 2 * B] gets how many sequences have 2 to `FEW` rows, how many have more, and then both by number."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    each = tl.arange(0, BLOCK_B)
    exists = each < tl.num_programs(0)
    counts = tl.load(query_starts + each + 1, mask=exists, other=0) - tl.load(query_starts + each, mask=exists, other=0)
    few = ((counts > 1) & (counts <= FEW)).to(tl.int32)
    many = (counts > tl.maximum(FEW, 1)).to(tl.int32)
    if b == 0:
        tl.store(listed, tl.sum(few, 0))
        tl.store(listed + 1, tl.sum(many, 0))
    if count > 1:
        before = tl.sum(tl.where(each < b, tl.where(count <= FEW, few, many), 0), 0)
        tl.store(listed + 2 + tl.where(count <= FEW, 0, tl.num_programs(0)) + before, b)
    if count > 0:
        prefix, slot = tl.load(prefix_lengths + b), tl.load(slots + b)
        second = tl.load(seconds + slot)
        length, of_second = tl.load(lengths + slot), tl.load(lengths + second)
        source, length = tl.where(of_second > length, second, slot), tl.maximum(length, of_second)
        page_end = tl.maximum(prefix - 1, 0) // PAGE * PAGE
        leaves = (count <= WINDOW) & (page_end > 0) & (page_end >= length)
        target = tl.where(leaves, slot + second - source, source)
        tl.store(sources + b, source)
        tl.store(targets + b, target)
        tl.store(pending + b, tl.minimum(tl.minimum(tl.maximum(prefix - length, 0), WINDOW), prefix))
        known = count > WINDOW
        tl.debug_barrier()
        tl.store(lengths + target, tl.where(known, prefix + count, prefix))
        i = tl.arange(0, BLOCK)
        if known:
            for first in range(0, count, BLOCK):
                tl.store(node_slots + start + first + i, tl.full([BLOCK], -1, tl.int32), mask=first + i < count)
        else:
            there = i < count
            tl.store(node_slots + start + i, target * WINDOW + (prefix + i) % WINDOW, mask=there)
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


@triton.jit
def convolve_kernel(  # type: ignore[no-untyped-def]
    inputs, ring, ring_gates, windows, weight, bias, output, folded, folded_gates, query_starts, prefix_lengths,
    sources, causal, parents, pending_keys, stride, WINDOW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    GATES: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (channels, sequence, block of tokens, and each so many blocks behind it): the convolution of pending keys
    into `folded` [B, window, C], and of rows into `output` [R, C]. Copies the gates of pending keys to `folded_gates`
    [B, window, G], so that the next launch may write the ring. Writes nothing else."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    part, b = tl.program_id(0), tl.program_id(1)
    # All before the first is needed: each that waits for another takes as long as all of them.
    start, end = tl.load(query_starts + b), tl.load(query_starts + b + 1)
    prefix, slot = tl.load(prefix_lengths + b), tl.load(sources + b).to(tl.int64)
    pending, is_chain = tl.load(pending_keys + b), tl.load(causal + b)
    count = end - start
    # Of a sequence without rows, no block.
    first = tl.where(count > 0, tl.program_id(2) * BLOCK_R - pending, count)
    channel = part * BLOCK_C + tl.arange(0, BLOCK_C)
    within = channel < CHANNELS
    while first < count:
        token = first + tl.arange(0, BLOCK_R)
        there, chain = token < count, is_chain + tl.zeros_like(token)
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
        if GATES > 0:  # noqa: SIM102, of a constant and of a value
            if (part == 0) & (first < 0):
                gate = tl.arange(0, BLOCK_G)
                asked = (token < 0)[:, None] & (gate < GATES)[None, :]
                at = slot * WINDOW + (prefix + token) % WINDOW
                kept = tl.load(ring_gates + at[:, None] * GATES + gate[None, :], mask=asked)
                of_key = b.to(tl.int64) * WINDOW + token + pending
                tl.store(folded_gates + of_key[:, None] * GATES + gate[None, :], kept, mask=asked)
        first += tl.num_programs(2) * BLOCK_R


@triton.jit
def keep_rows(  # type: ignore[no-untyped-def]
    inputs, gates, ring, ring_gates, windows, start, count, prefix, source, target, pending, channel, own_gates, stride,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, GATES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Of channels [m]: the last inputs of committed tokens into the window, nodes' inputs into the ring; and all gates
    of nodes where `own_gates`. Behind the launch that reads the old ones."""
    tap, within = tl.arange(0, BLOCK_T), channel < CHANNELS
    kept = tap < TAPS - 1
    # Of a part of a prompt all rows are known.
    behind = tl.where(count > WINDOW, count, 0)
    last = _inputs_at(
        inputs, ring, windows, behind - TAPS + 1 + tap, channel, kept, start, stride, prefix, source, pending,
        WINDOW, CHANNELS, TAPS,
    )  # fmt: skip
    tl.debug_barrier()
    at = (target * (TAPS - 1) + tap)[:, None] * CHANNELS + channel[None, :]
    tl.store(windows + at, last, mask=kept[:, None] & within[None, :])
    if count <= WINDOW:
        for first in range(0, count, BLOCK_R):
            row = first + tl.arange(0, BLOCK_R)
            there = row < count
            place, of_row = target * WINDOW + (prefix + row) % WINDOW, (start + row).to(tl.int64)
            here = there[:, None] & within[None, :]
            own = tl.load(inputs + of_row[:, None] * stride + channel[None, :], mask=here)
            tl.store(ring + place[:, None] * CHANNELS + channel[None, :], own, mask=here)
            if GATES > 0:  # noqa: SIM102, of a constant and of a value
                if own_gates:
                    gate = tl.arange(0, BLOCK_G)
                    asked = there[:, None] & (gate < GATES)[None, :]
                    of_node = tl.load(gates + of_row[:, None] * GATES + gate[None, :], mask=asked)
                    tl.store(ring_gates + place[:, None] * GATES + gate[None, :], of_node, mask=asked)


@triton.jit
def keep_kernel(  # type: ignore[no-untyped-def]
    inputs, ring, windows, query_starts, prefix_lengths, sources, targets, pending_keys, stride, WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels): `keep_rows` of layers without heads, and so without gates."""
    b = tl.program_id(0)
    start = tl.load(query_starts + b)
    count = tl.load(query_starts + b + 1) - start
    if count > 0:
        keep_rows(
            inputs, inputs, ring, ring, windows, start, count, tl.load(prefix_lengths + b),
            tl.load(sources + b).to(tl.int64), tl.load(targets + b).to(tl.int64), tl.load(pending_keys + b),
            tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), False, stride, WINDOW, CHANNELS, TAPS, 0, BLOCK_R,
            BLOCK_T, 1,
        )  # fmt: skip
