"""Triton kernels of tree attention: attend, then merge. The words are those of `_triton_schedule`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slots(page_table, offsets, first, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_N] int64 cache slots of consecutive keys."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(page_table + first // PAGE_SIZE).to(tl.int64)
        return page * PAGE_SIZE + offsets % PAGE_SIZE
    if MASKED:
        pages = tl.load(page_table + offsets // PAGE_SIZE, mask=offsets < limit, other=0)
    else:
        pages = tl.load(page_table + offsets // PAGE_SIZE)
    return pages.to(tl.int64) * PAGE_SIZE + offsets % PAGE_SIZE


@triton.jit
def _visible(words, row, tail, live, rows, is_causal, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M, N]: whether each row sees each key; `tail` [N] counts keys from the first of the tail."""
    below = tail < 0
    inside = (tail >= 0) & (tail < rows)
    if is_causal > 0:
        seen = tail[None, :] <= row[:, None]
    else:
        seen = tl.zeros([row.shape[0], tail.shape[0]], tl.int1)
        for w in tl.static_range(WORDS):
            bits = tl.load(words + row * WORDS + w, mask=live, other=0)
            bit = (bits[:, None] >> (tail & 63).to(tl.int64)[None, :]) & 1
            seen = seen | ((bit > 0) & (tail // 64 == w)[None, :])
    return below[None, :] | (inside[None, :] & seen)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    q,
    peak,
    mass,
    acc,
    tile,
    key_head,
    value_head,
    page_table,
    words,
    row,
    live,
    rows,
    prefix,
    is_causal,
    scale_log2,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax, in base 2, over BLOCK_N keys."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    first = tile * BLOCK_N
    offsets = first + tl.arange(0, BLOCK_N)
    there = offsets < prefix + rows
    slots = _slots(page_table, offsets, first, prefix + rows, PAGE_SIZE, BLOCK_N, MASKED)
    key_at = key_head + slots[:, None] * (KV_HEADS * D) + d[None, :]
    value_at = value_head + slots[:, None] * (KV_HEADS * DV) + dv[None, :]
    if MASKED:
        # What lies behind the last key may be NaN, and 0 * NaN is NaN.
        k = tl.load(key_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(value_at, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
    else:
        k = tl.load(key_at) if BLOCK_D == D else tl.load(key_at, mask=(d < D)[None, :], other=0.0)
        v = tl.load(value_at) if BLOCK_DV == DV else tl.load(value_at, mask=(dv < DV)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(_visible(words, row, offsets - prefix, live, rows, is_causal, WORDS), scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen no key yet has a peak of -inf, and -inf - -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    probs = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    mass = mass * fade + tl.sum(probs, 1)
    acc = tl.dot(probs.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_peak, mass, acc


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    group,
    chunk,
    per_chunk,
    query,
    key_cache,
    value_cache,
    output,
    partials,
    partial_lse,
    page_table,
    words,
    groups,
    scale_log2,
    query_row_stride,
    query_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One chunk's share of one group."""
    record = groups + group * 8
    row_start = tl.load(record)
    rows = tl.load(record + 1)
    prefix = tl.load(record + 2)
    pages = page_table + tl.load(record + 3)
    block = tl.load(record + 4)
    first_tile = tl.load(record + 5)
    tiles = tl.load(record + 6)
    kind = tl.load(record + 7)
    head = kind // 2
    is_causal = kind % 2
    low = tl.maximum(chunk * per_chunk - first_tile, 0)
    high = tl.minimum((chunk + 1) * per_chunk - first_tile, tiles)
    if low < high:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        row = (block * BLOCK_M + m) // GROUP
        query_head = head * GROUP + (block * BLOCK_M + m) % GROUP
        live = row < rows
        at = (row_start + row)[:, None].to(tl.int64) * query_row_stride + query_head[:, None] * query_head_stride
        q = tl.load(query + at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        own_words = words + row_start.to(tl.int64) * WORDS
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        key_head = key_cache + head * D
        value_head = value_cache + head * DV
        # Keys that every row of the block sees need no mask: the prefix and, in a causal tail, the rows before.
        open_keys = prefix + tl.where(is_causal > 0, block * BLOCK_M // GROUP, 0)
        middle = tl.maximum(tl.minimum(open_keys // BLOCK_N, high), low)
        for tile in tl.range(low, middle):
            peak, mass, acc = _tile(
                q, peak, mass, acc, tile, key_head, value_head, pages, own_words, row, live, rows, prefix,
                is_causal, scale_log2, KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N, WORDS, False,
            )  # fmt: skip
        for tile in tl.range(middle, high):
            peak, mass, acc = _tile(
                q, peak, mass, acc, tile, key_head, value_head, pages, own_words, row, live, rows, prefix,
                is_causal, scale_log2, KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N, WORDS, True,
            )  # fmt: skip
        acc = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        store = live[:, None] & (dv < DV)[None, :]
        if (low == 0) & (high == tiles):
            at = ((row_start + row) * (KV_HEADS * GROUP) + query_head)[:, None].to(tl.int64) * DV
            tl.store(output + at + dv[None, :], acc.to(output.dtype.element_ty), mask=store)
        else:
            slot = chunk * 2 + (first_tile > chunk * per_chunk).to(tl.int32)
            place = slot.to(tl.int64) * BLOCK_M + m
            tl.store(partials + place[:, None] * DV + dv[None, :], acc, mask=store)
            lse = tl.where(mass == 0.0, float("-inf"), peak + tl.log2(mass))
            tl.store(partial_lse + place, lse, mask=live)


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    output,
    partials,
    partial_lse,
    page_table,
    words,
    groups,
    chunk_groups,
    totals,
    scale_log2,
    query_row_stride,
    query_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Every program takes chunks in turn, and of each chunk the groups that lie in it."""
    per_chunk = tl.load(totals)
    chunks = tl.load(totals + 1)
    for chunk in tl.range(tl.program_id(0), chunks, tl.num_programs(0), num_stages=1):
        first = tl.load(chunk_groups + chunk * 2)
        last = tl.load(chunk_groups + chunk * 2 + 1)
        for group in tl.range(first, last + 1, num_stages=1):
            _attend(
                group, chunk, per_chunk, query, key_cache, value_cache, output, partials, partial_lse, page_table,
                words, groups, scale_log2, query_row_stride, query_head_stride, GROUP, KV_HEADS, D, DV, BLOCK_D,
                BLOCK_DV, PAGE_SIZE, BLOCK_M, BLOCK_N, WORDS,
            )  # fmt: skip


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    output,
    partials,
    partial_lse,
    groups,
    chunk_groups,
    totals,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BY_GROUP: tl.constexpr,
):
    """Merge the partials of group `program_id(0)`, if it was cut; which takes the fewest loads in a row.

    Not BY_GROUP, of the group whose first cut lies at the start of chunk `program_id(0)`: fewer programs if there are
    many groups.
    """
    chunk = tl.program_id(0)
    per_chunk = tl.load(totals)
    if BY_GROUP:
        there_is = chunk < tl.load(totals + 2)
    else:
        there_is = chunk < tl.load(totals + 1)
    if there_is:
        record = groups + chunk * 8
        if not BY_GROUP:
            record = groups + tl.load(chunk_groups + chunk * 2) * 8
        first_tile = tl.load(record + 5)
        first = first_tile // per_chunk
        last = (first_tile + tl.load(record + 6) - 1) // per_chunk
        block = tl.load(record + 4)
        m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row = (block * BLOCK_M + m) // GROUP
        live = row < tl.load(record + 1)
        is_cut = last > first
        if not BY_GROUP:
            is_cut = (chunk == first + 1) & (chunk <= last)
        if is_cut:
            dv = tl.arange(0, BLOCK_DV)
            peak = tl.full([ROWS], float("-inf"), tl.float32)
            mass = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
            for at in tl.range(first, last + 1, PARTS):
                part = at + tl.arange(0, PARTS)
                slot = part * 2 + (first_tile > part * per_chunk).to(tl.int32)
                place = slot[:, None].to(tl.int64) * BLOCK_M + m[None, :]
                there = (part <= last)[:, None] & live[None, :]
                lse = tl.load(partial_lse + place, mask=there, other=float("-inf"))
                values = tl.load(
                    partials + place[:, :, None] * DV + dv[None, None, :],
                    mask=there[:, :, None] & (dv < DV)[None, None, :],
                    other=0.0,
                )
                new_peak = tl.maximum(peak, tl.max(lse, 0))
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                weights = tl.exp2(lse - base[None, :])
                fade = tl.exp2(peak - base)
                mass = mass * fade + tl.sum(weights, 0)
                acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * values, 0)
                peak = new_peak
            acc = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
            query_head = tl.load(record + 7) // 2 * GROUP + (block * BLOCK_M + m) % GROUP
            to = ((tl.load(record) + row) * (KV_HEADS * GROUP) + query_head)[:, None].to(tl.int64) * DV
            store = live[:, None] & (dv < DV)[None, :]
            tl.store(output + to + dv[None, :], acc.to(output.dtype.element_ty), mask=store)
