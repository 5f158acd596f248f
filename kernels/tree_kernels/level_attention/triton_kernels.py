"""The Triton kernel that attends for a level of trees. Groups, tiles and partials are those of
`attention.triton_schedule`; a group's keys are cut into parts of equal length, one program each."""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.attention.triton_kernels import LOG2_E, attend_tile
from tree_kernels.attention.triton_merge import merge_if_last, write_partial, write_rows


@triton.jit
def _ancestor_words(parents, row, live, depth):  # type: ignore[no-untyped-def]
    """[M] int64 words of rows of one tail, by at most `depth` steps from each row towards the root."""
    one = tl.full(row.shape, 1, tl.int64)
    # The root, in which every walk ends.
    bits = one
    at = tl.where(live, row, 0)
    for _ in tl.range(0, depth):
        bits |= one << at.to(tl.int64)
        at = tl.load(parents + at, mask=at > 0, other=0)
    return bits


@triton.jit(do_not_specialize=["tail", "first_row", "depth"])
def level_kernel(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, output, partials, partial_lse, arrivals, query_starts, prefix_lengths, page_starts,
    page_table, parents, sinks, scale_log2, query_row_stride, query_head_stride, tail, first_row, depth,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LEAST_TILES: tl.constexpr, FAR: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, group of a sequence, sequence): its part of the keys, of at least LEAST_TILES. The last program of
    a group that was cut merges it. ROWS are those of a level, from `first_row` of a tail on."""
    BLOCKS: tl.constexpr = (ROWS * GROUP + BLOCK_M - 1) // BLOCK_M
    part, parts, b = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    own_row = (block * BLOCK_M + m) // GROUP
    query_head = head * GROUP + (block * BLOCK_M + m) % GROUP
    live = own_row < ROWS
    at = (b * ROWS + own_row)[:, None].to(tl.int64) * query_row_stride + query_head[:, None] * query_head_stride
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    there = tl.load(query_starts + b + 1) > tl.load(query_starts + b)
    prefix = tl.load(prefix_lengths + b)
    rows = first_row + ROWS
    tiles = (prefix + rows + BLOCK_N - 1) // BLOCK_N
    each = tl.maximum((tiles + parts - 1) // parts, LEAST_TILES)
    low = part * each
    high = tl.minimum(low + each, tiles)
    if there & (low < high):
        pages = page_table + tl.load(page_starts + b)
        q = tl.load(query + at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        row = first_row + own_row
        words = _ancestor_words(parents + b * tail, row, live, depth)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if SINKS:  # noqa: SIM102  one is known to the compiler, the other is not
            if low == 0:  # of the first part a key without a value
                peak = tl.load(sinks + query_head, mask=live, other=0.0).to(tl.float32) * LOG2_E
                mass += 1.0
        is_causal = tl.full([], 0, tl.int32)
        for tile in tl.range(low, high):
            peak, mass, acc = attend_tile(
                q, peak, mass, acc, tile * BLOCK_N, prefix, key_cache + head * D, value_cache + head * DV, pages,
                parents, words, row, live, rows, prefix, is_causal, scale_log2, parents, row, 0, row, KV_HEADS, D, DV,
                BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N, 1, FAR, 0, CAP, False, "either",
            )  # fmt: skip
        acc = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        written = (output, partial_lse)
        if tiles <= each:
            write_rows(
                written, acc, mass, b * ROWS, ROWS, block, head, m, GROUP, KV_HEADS, DV, BLOCK_DV, BLOCK_M, False
            )
        else:
            group = b * tl.num_programs(1) + tl.program_id(1)
            # Parts of a group stand side by side, as if each were a chunk of one tile.
            first_part, cut = group * parts, (tiles + each - 1) // each
            write_partial(
                partials, partial_lse, acc, peak, mass, first_part + part, 1, first_part, m, live, DV, BLOCK_DV, BLOCK_M
            )
            merge_if_last(
                written, partials, partial_lse, arrivals + group, first_part, cut, 1, b * ROWS, ROWS, block, head,
                GROUP, KV_HEADS, DV, BLOCK_DV, BLOCK_M, MERGE_ROWS, MERGE_PARTS, False,
            )  # fmt: skip
