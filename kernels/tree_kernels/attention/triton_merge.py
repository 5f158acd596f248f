"""Triton kernels that merge the partials of a group, and what rows have of common keys with the rest. The words are
those of `attention.triton_schedule`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_parts(  # type: ignore[no-untyped-def]
    partials, partial_lse, first, last, first_tile, per_chunk, m, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """[len(m), BLOCK_DV] and [len(m)]: the partials of chunks first..last, merged in the order of chunks, for packed
    rows m, and the logarithm of their masses, in base 2."""
    dv = tl.arange(0, BLOCK_DV)
    peak = tl.full([m.shape[0]], float("-inf"), tl.float32)
    mass = tl.zeros([m.shape[0]], tl.float32)
    acc = tl.zeros([m.shape[0], BLOCK_DV], tl.float32)
    for at in tl.range(first, last + 1, PARTS):
        part = at + tl.arange(0, PARTS)
        slot = part * 2 + (first_tile > part * per_chunk).to(tl.int32)
        place = slot[:, None].to(tl.int64) * BLOCK_M + m[None, :]
        there = (part <= last)[:, None] & (m >= 0)[None, :]
        # Not from L1: another program wrote them in this launch.
        lse = tl.load(partial_lse + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partials + place[:, :, None] * DV + dv[None, None, :],
            mask=there[:, :, None] & (dv < DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - base[None, :])
        fade = tl.exp2(peak - base)
        mass = mass * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * values, 0)
        peak = new_peak
    return acc / tl.where(mass == 0.0, 1.0, mass)[:, None], lse_of(peak, mass)


@triton.jit
def lse_of(peak, mass):  # type: ignore[no-untyped-def]
    """The logarithm of a softmax's sum, in base 2: -inf of a row that has seen no key."""
    return tl.where(mass == 0.0, float("-inf"), peak + tl.log2(mass))


@triton.jit
def write_rows(  # type: ignore[no-untyped-def]
    written, values, lse, row_start, rows, block, head, m, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Store the output of packed rows m of a block in the first of `written`, and with LSE their `lse` in the second:
    [R, Hq] fp32."""
    output, output_lse = written
    dv = tl.arange(0, BLOCK_DV)
    row = (block * BLOCK_M + m) // GROUP
    query_head = head * GROUP + (block * BLOCK_M + m) % GROUP
    to = ((row_start + row) * (KV_HEADS * GROUP) + query_head).to(tl.int64)
    store = (row < rows)[:, None] & (dv < DV)[None, :]
    tl.store(output + to[:, None] * DV + dv[None, :], values.to(output.dtype.element_ty), mask=store)
    if LSE:
        tl.store(output_lse + to, lse, mask=row < rows)


@triton.jit
def write_partial(  # type: ignore[no-untyped-def]
    partials, partial_lse, values, peak, mass, chunk, per_chunk, first_tile, m, live, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store one chunk's partial of packed rows m of a block, for `merge_parts`. Its values are divided by its mass."""
    dv = tl.arange(0, BLOCK_DV)
    slot = chunk * 2 + (first_tile > chunk * per_chunk).to(tl.int32)
    place = slot.to(tl.int64) * BLOCK_M + m
    tl.store(partials + place[:, None] * DV + dv[None, :], values, mask=live[:, None] & (dv < DV)[None, :])
    tl.store(partial_lse + place, lse_of(peak, mass), mask=live)


@triton.jit
def merge_if_last(  # type: ignore[no-untyped-def]
    written, partials, partial_lse, arrival, first_tile, tiles, per_chunk, row_start, rows, block, head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Count this program among those that left their partial of a group; merge the group if it is the last of them."""
    first = first_tile // per_chunk
    last = (first_tile + tiles - 1) // per_chunk
    # The barrier orders every thread's stores before the one thread's release; the last program acquires those of all
    # others.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
    if arrived == last - first:
        tl.debug_barrier()
        # The next launch counts from nought again.
        tl.store(arrival, 0)
        live_rows = tl.minimum(rows * GROUP - block * BLOCK_M, BLOCK_M)
        for top in tl.range(0, live_rows, ROWS):
            m = top + tl.arange(0, ROWS)
            merged, lse = merge_parts(
                partials, partial_lse, first, last, first_tile, per_chunk, m, DV, BLOCK_DV, BLOCK_M, PARTS
            )
            write_rows(
                written, merged, lse, row_start, rows, block, head, m, GROUP, KV_HEADS, DV, BLOCK_DV, BLOCK_M, LSE
            )


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    output, output_lse, partials, partial_lse, groups, chunk_table, totals,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BY_GROUP: tl.constexpr, LSE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """With BY_GROUP, merge the partials of group `program_id(0)`, if it was cut: the fewest dependent loads.

    Without it, those of the group whose first cut lies at the start of chunk `program_id(0)`: fewer programs if
    there are many groups. Values wider than BLOCK_DV, a multiple of it, have a program for each BLOCK_DV columns.
    """
    output += tl.program_id(2) * BLOCK_DV
    partials += tl.program_id(2) * BLOCK_DV
    chunk = tl.program_id(0)
    # How the work is divided was written before the launch of attention, which has waited for that.
    per_chunk = tl.load(totals)
    there = chunk < tl.load(totals + (2 if BY_GROUP else 1))
    record = groups + chunk * 8 if BY_GROUP else chunk_table + chunk * 16
    start = tl.load(record, mask=there, other=0)
    rows = tl.load(record + 1, mask=there, other=0)
    block = tl.load(record + 4, mask=there, other=0)
    first_tile = tl.load(record + 5, mask=there, other=0)
    tiles = tl.load(record + 6, mask=there, other=0)
    head = tl.load(record + 7, mask=there, other=0) // 2
    most = tl.load(totals + 1)
    if DEPENDENT:
        # What follows may bring its weights while attention runs.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = first_tile // per_chunk
    # Of no partials beyond the room for chunks.
    last = tl.minimum((first_tile + tiles - 1) // per_chunk, most - 1)
    is_cut = there & (last > first)
    if not BY_GROUP:
        is_cut = is_cut & (chunk == first + 1)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if is_cut & ((block * BLOCK_M + tl.program_id(1) * ROWS) // GROUP < rows):
        merged, lse = merge_parts(
            partials, partial_lse, first, last, first_tile, per_chunk, m, DV, BLOCK_DV, BLOCK_M, PARTS
        )
        written = (output, output_lse)
        write_rows(written, merged, lse, start, rows, block, head, m, GROUP, KV_HEADS, DV, BLOCK_DV, BLOCK_M, LSE)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    output, shared, shared_lse, own, own_lse, query_starts, common, sequences, HEADS: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine what rows have of common keys and of their sequences' own: [R, HEADS, DV] and [R, HEADS] each. A program
    takes BLOCK_H heads of a row; rows of sequences whose `common` is 0 have their own keys alone."""
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dv = tl.arange(0, BLOCK_DV)
    b = tl.arange(0, BLOCK_B)
    # The step's integers were there before the launch of attention.
    before = tl.sum((tl.load(query_starts + 1 + b, mask=b < sequences, other=1 << 30) <= row).to(tl.int32), 0)
    is_member = tl.load(common + before, mask=before < sequences, other=0) > 0
    at = row.to(tl.int64) * HEADS + head
    there = head < HEADS
    columns = there[:, None] & (dv < DV)[None, :]
    if DEPENDENT:
        # What follows may bring its weights while attention runs.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lse = tl.load(own_lse + at, mask=there, other=0.0)
    values = tl.load(own + at[:, None] * DV + dv[None, :], mask=columns, other=0.0)
    if is_member:
        other_lse = tl.load(shared_lse + at, mask=there, other=0.0)
        others = tl.load(shared + at[:, None] * DV + dv[None, :], mask=columns, other=0.0)
        peak = tl.maximum(lse, other_lse)
        weight = tl.exp2(lse - peak)
        other_weight = tl.exp2(other_lse - peak)
        values = (values * weight[:, None] + others * other_weight[:, None]) / (weight + other_weight)[:, None]
    tl.store(output + at[:, None] * DV + dv[None, :], values.to(output.dtype.element_ty), mask=columns)
