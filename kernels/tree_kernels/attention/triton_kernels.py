"""The Triton kernel of tree attention. The words are those of `attention.triton_schedule`."""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.attention.triton_mask import first_seen, hide, hide_before_window, key_positions, row_positions
from tree_kernels.attention.triton_merge import lse_of, merge_if_last, write_partial, write_rows
from tree_kernels.attention.triton_schedule import first_seen_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_slots(page_table, offsets, first, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_N] cache slots of keys, `first` the first of them; int64 if FAR."""
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(page_table + first // PAGE_SIZE)
    else:
        pages = tl.load(page_table + offsets // PAGE_SIZE)
    if FAR:
        pages = pages.to(tl.int64)
    return pages * PAGE_SIZE + offsets % PAGE_SIZE


@triton.jit
def softmax_step(scores, values, peak, mass, acc, scale_log2, ALL_SEEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Peak, mass and output of the online softmax, in base 2, after a tile of scores; ALL_SEEN if none is hidden."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    # A row that has seen no key yet has a peak of -inf, and -inf - -inf is NaN.
    base = new_peak if ALL_SEEN else tl.where(new_peak == float("-inf"), 0.0, new_peak)
    probs = tl.exp2(scores * scale_log2 - base[:, None])
    fade = tl.exp2(peak - base)
    mass = mass * fade + tl.sum(probs, 1)
    acc = tl.dot(probs.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return new_peak, mass, acc


@triton.jit
def _capped(scores, scale, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """CAP * tanh(scale * scores / CAP). The tanh of a GPU's own unit has 11 bits: too few for scores of up to CAP."""
    # At 40 tanh is one in fp32, and the exponential still finite.
    power = tl.exp(tl.minimum(scores * (2 * scale / CAP), 40.0))
    return CAP * (power - 1) / (power + 1)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    q, peak, mass, acc, first, open_keys, key_head, value_head, page_table, words, first_word, row, live, rows,
    prefix, is_causal, scale_log2, depths, position, first_key, slope, KV_HEADS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, FAR: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SLOPES: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the BLOCK_N keys from `first`."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    offsets = first + tl.arange(0, BLOCK_N)
    if KEYS != "open":
        # What lies behind the last key may be NaN, and 0 * NaN is NaN: the last key stands in for it.
        offsets = tl.minimum(offsets, prefix + (rows if TAIL else 0) - 1)
    if WINDOW != 0:
        # Likewise before the first key that a row of the block sees, whose pages may have other owners.
        offsets = tl.maximum(offsets, first_key)
    slots = key_slots(page_table, offsets, first, PAGE_SIZE, BLOCK_N, FAR)
    key_at = key_head + slots[:, None] * (KV_HEADS * D) + d[None, :]
    value_at = value_head + slots[:, None] * (KV_HEADS * DV) + dv[None, :]
    k = tl.load(key_at) if BLOCK_D == D else tl.load(key_at, mask=(d < D)[None, :], other=0.0)
    v = tl.load(value_at) if BLOCK_DV == DV else tl.load(value_at, mask=(dv < DV)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP > 0:
        scores = _capped(scores, scale_log2 / LOG2_E, CAP)
        scale_log2 = LOG2_E
    if SLOPES:
        places = first + tl.arange(0, BLOCK_N)
        if KEYS != "open":
            places = key_positions(places, prefix, rows, depths, is_causal)
        between = (position[:, None] - places[None, :]).to(tl.float32)
        scores = scores * scale_log2 - slope[:, None] * between
        scale_log2 = 1.0
    if KEYS != "open" and not TAIL:
        scores = tl.where((first + tl.arange(0, BLOCK_N) < prefix)[None, :], scores, float("-inf"))
    if KEYS == "tail" and TAIL:
        scores = hide(scores, words, first_word, first - prefix, row, live, is_causal, WORDS)
    if KEYS == "either" and TAIL:  # noqa: SIM102  one is known to the compiler, the other is not
        if first + BLOCK_N > open_keys:
            scores = hide(scores, words, first_word, first - prefix, row, live, is_causal, WORDS)
    if WINDOW != 0:
        # An ancestor stands at least as many rows before a row as it is levels above. Chunks may begin within a tree.
        border = first_seen(prefix + tl.max(tl.where(live, row, 0), 0), WINDOW)
        if first < border or (WINDOW < 0 and border > prefix):
            scores = hide_before_window(scores, first, prefix, rows, depths, position, is_causal, WINDOW)
    return softmax_step(scores, v, peak, mass, acc, scale_log2, KEYS == "open")


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    record, group, chunk, per_chunk, query, key_cache, value_cache, written, partials, partial_lse, arrivals,
    page_table, words, depths, sinks, slopes, scale_log2, query_row_stride, query_head_stride, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, FAR: tl.constexpr,
    APART: tl.constexpr, FIXED: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr, TAIL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One chunk's share of one group."""
    row_start = tl.load(record)
    rows = tl.load(record + 1)
    prefix = tl.load(record + 2)
    pages = page_table + tl.load(record + 3)
    block = tl.load(record + 4)
    first_tile = tl.load(record + 5)
    tiles = tl.load(record + 6)
    kind = tl.load(record + 7)
    head, is_causal = kind // 2, kind % 2
    low = tl.maximum(chunk * per_chunk - first_tile, 0)
    high = tl.minimum((chunk + 1) * per_chunk - first_tile, tiles)
    if low < high:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        row = (block * BLOCK_M + m) // GROUP
        query_head = head * GROUP + (block * BLOCK_M + m) % GROUP
        live = row < rows
        at = (row_start + row)[:, None].to(tl.int64) * query_row_stride + query_head[:, None] * query_head_stride
        q = tl.load(query + at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        own_words = words + row_start.to(tl.int64) * WORDS
        first_word = tl.load(own_words + row * WORDS, mask=live, other=0)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if SINKS:  # noqa: SIM102  one is known to the compiler, the other is not
            if low == 0:  # of the first chunk a key without a value
                peak = tl.load(sinks + query_head, mask=live, other=0.0).to(tl.float32) * LOG2_E
                mass += 1.0
        own_depths = depths + row_start
        first_key, first = 0, 0
        position = row_positions(prefix, row, own_depths, live, is_causal, TAIL) if WINDOW != 0 or SLOPES else row
        slope = tl.load(slopes + query_head, mask=live, other=0.0) * LOG2_E if SLOPES else row
        if WINDOW != 0:
            first_key = first_seen(prefix + tl.where(is_causal > 0, block * BLOCK_M // GROUP, 0), WINDOW)
            # Fixed chunks begin with the first key of all; of them tiles that no row sees are left out here.
            seen = first_seen_tile(prefix, block, is_causal, GROUP, BLOCK_M, BLOCK_N, WINDOW)
            first = 0 if FIXED else seen
        # Keys that every row of the block sees need no mask: the prefix and, in a causal tail, the rows before.
        open_keys = prefix + tl.where(is_causal > 0, block * BLOCK_M // GROUP, 0)
        key_head = key_cache + head * D
        value_head = value_cache + head * DV
        begin = tl.maximum(low, seen) if WINDOW != 0 and FIXED else low
        middle = begin
        if APART:
            middle = tl.maximum(tl.minimum(open_keys // BLOCK_N, high), low)
            for tile in tl.range(begin, middle):
                peak, mass, acc = _tile(
                    q, peak, mass, acc, tile * BLOCK_N, open_keys, key_head, value_head, pages, own_words, first_word,
                    row, live, rows, prefix, is_causal, scale_log2, own_depths, position, first_key, slope, KV_HEADS,
                    D, DV, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N, WORDS, FAR, WINDOW, CAP, SLOPES, "open", TAIL,
                )  # fmt: skip
        for tile in tl.range(middle, high):
            peak, mass, acc = _tile(
                q, peak, mass, acc, (first + tile) * BLOCK_N, open_keys, key_head, value_head, pages, own_words,
                first_word, row, live, rows, prefix, is_causal, scale_log2, own_depths, position, first_key, slope,
                KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N, WORDS, FAR, WINDOW, CAP, SLOPES,
                "tail" if APART else "either", TAIL,
            )  # fmt: skip
        acc = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        if (low == 0) & (high == tiles):
            lse = lse_of(peak, mass)
            write_rows(written, acc, lse, row_start, rows, block, head, m, GROUP, KV_HEADS, DV, BLOCK_DV, BLOCK_M, LSE)
        else:
            write_partial(
                partials, partial_lse, acc, peak, mass, chunk, per_chunk, first_tile, m, live, DV, BLOCK_DV, BLOCK_M
            )
            if MERGE_ROWS > 0:
                merge_if_last(
                    written, partials, partial_lse, arrivals + group, first_tile, tiles, per_chunk,
                    row_start, rows, block, head, GROUP, KV_HEADS, DV, BLOCK_DV, BLOCK_M, MERGE_ROWS, MERGE_PARTS, LSE,
                )  # fmt: skip


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, output, output_lse, partials, partial_lse, arrivals, page_table, words, depths,
    sinks, slopes, groups, chunk_table, totals, scale_log2, query_row_stride, query_head_stride, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, FAR: tl.constexpr,
    APART: tl.constexpr, FIXED: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, LSE: tl.constexpr,
    DEPENDENT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Every program takes one chunk (if FIXED, chunks in turn), and of each chunk the groups that lie in it.

    WINDOW and CAP are 0, and SINKS and SLOPES false, where the layer has none; see `first_seen`. With a WINDOW, APART
    is false. Without a TAIL no row has a key, and all see their prefix alone.

    With LSE the logarithms of the rows' masses, in base 2, are stored beside the outputs: [R, Hq] fp32.

    Where MERGE_ROWS is not 0, the last program that stores its partial of a group merges it, MERGE_ROWS at a time.
    """
    if DEPENDENT:
        # The results of the launch before may be read from here on; the launch after may start and wait.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunks = tl.load(totals + 1) if FIXED else tl.program_id(0) + 1
    for chunk in tl.range(tl.program_id(0), chunks, tl.num_programs(0), num_stages=1):
        own = chunk_table + chunk * 16
        first = tl.load(own + 8)
        last = tl.load(own + 9)
        per_chunk = tl.load(own + 10)
        for group in tl.range(first, last + 1, num_stages=1):
            record = own
            if group > first:
                record = groups + group * 8
            _attend(
                record, group, chunk, per_chunk, query, key_cache, value_cache, (output, output_lse), partials,
                partial_lse, arrivals, page_table, words, depths, sinks, slopes, scale_log2, query_row_stride,
                query_head_stride, GROUP, KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_M, BLOCK_N, WORDS, FAR,
                APART, FIXED, MERGE_ROWS, MERGE_PARTS, TAIL, WINDOW, CAP, SINKS, SLOPES, LSE,
            )  # fmt: skip
