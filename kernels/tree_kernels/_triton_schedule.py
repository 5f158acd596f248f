"""Triton kernels that prepare a step of tree attention on the device: ancestor words, and who reads which keys.

Words: a *group* is one key head of one block of BLOCK_M packed rows (packed row = row * GROUP + member, so that all
query heads of a key head share what is read); a *tile* is BLOCK_N keys; all tiles of all groups stand in one line,
which is cut into *chunks* of equal length, one program each. A group that a cut falls into leaves one *partial* per
chunk, merged afterwards. With a fixed chunk length every group starts a chunk of its own, so that where it is cut
depends on nothing but its sequence.

A record describes a group in 8 integers: first row, rows, prefix length, start in the page table, block, first tile,
tiles, 2 * head + causal.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pick(hit, values):  # type: ignore[no-untyped-def]
    """[I, B] one-hot and [B] -> [I]."""
    return tl.sum(tl.where(hit, values[None, :], 0), 1)


@triton.jit
def ancestor_kernel(  # type: ignore[no-untyped-def]
    query_starts, causal, parents, words, BLOCK_R: tl.constexpr, WORDS: tl.constexpr
):
    """Ancestor words of one sequence per program, by walking from every row to the root. words: [R, WORDS] int64."""
    start = tl.load(query_starts + tl.program_id(0))
    rows = tl.load(query_starts + tl.program_id(0) + 1) - start
    rows = tl.where(tl.load(causal + tl.program_id(0)) > 0, 0, rows)
    row = tl.arange(0, BLOCK_R)
    live = row < rows
    word = tl.arange(0, WORDS)
    one = tl.full([BLOCK_R, WORDS], 1, tl.int64)
    bits = tl.zeros([BLOCK_R, WORDS], tl.int64)
    at = tl.where(live, row, 0)
    # Bounded by the number of rows, so that a malformed tree cannot hang the device.
    for _ in tl.range(0, tl.minimum(rows, BLOCK_R)):
        bits |= tl.where((at // 64)[:, None] == word[None, :], one << (at % 64).to(tl.int64)[:, None], 0)
        at = tl.load(parents + start + at, mask=live & (at > 0), other=0)
    tl.store(words + (start + row)[:, None] * WORDS + word[None, :], bits, mask=live[:, None])


@triton.jit
def schedule_kernel(  # type: ignore[no-untyped-def]
    query_starts,
    prefix_lengths,
    causal,
    page_starts,
    groups,
    chunk_groups,
    totals,
    sequences,
    programs,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Lengths of B sequences -> records of groups, first and last group of each chunk, and totals.

    Program i writes groups and chunks i * BLOCK_I onwards; each repeats the sums over sequences.
    """
    b = tl.arange(0, BLOCK_B)
    live = b < sequences
    start = tl.load(query_starts + b, mask=live, other=0)
    rows = tl.load(query_starts + b + 1, mask=live, other=0) - start
    prefix = tl.load(prefix_lengths + b, mask=live, other=0)
    is_causal = tl.load(causal + b, mask=live, other=0)
    page_start = tl.load(page_starts + b, mask=live, other=0)
    blocks = (rows * GROUP + BLOCK_M - 1) // BLOCK_M
    tiles = (prefix + rows + BLOCK_N - 1) // BLOCK_N
    group_counts = blocks * KV_HEADS
    if FIXED_TILES > 0:
        tiles = (tiles + FIXED_TILES - 1) // FIXED_TILES * FIXED_TILES
        per_chunk = tl.full([], FIXED_TILES, tl.int32)
    else:
        per_chunk = tl.maximum((tl.sum(tiles * group_counts, 0) + programs - 1) // programs, MIN_TILES)
    weights = tiles * group_counts
    tile_ends = tl.cumsum(weights, 0)
    group_ends = tl.cumsum(group_counts, 0)
    total_tiles = tl.sum(weights, 0)
    total_groups = tl.sum(group_counts, 0)
    chunks = (total_tiles + per_chunk - 1) // per_chunk
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)

    owner = tl.sum((group_ends[None, :] <= i[:, None]).to(tl.int32), 1)
    hit = owner[:, None] == b[None, :]
    local = i - _pick(hit, group_ends - group_counts)
    own_blocks = tl.maximum(_pick(hit, blocks), 1)
    own_rows = _pick(hit, rows)
    own_prefix = _pick(hit, prefix)
    own_causal = _pick(hit, is_causal)
    block = local % own_blocks
    # A causal block sees no key beyond its last row.
    last_row = tl.minimum(((block + 1) * BLOCK_M - 1) // GROUP, own_rows - 1)
    keys = own_prefix + tl.where(own_causal > 0, last_row + 1, own_rows)
    record = groups + i * 8
    own = i < total_groups
    tl.store(record, _pick(hit, start), mask=own)
    tl.store(record + 1, own_rows, mask=own)
    tl.store(record + 2, own_prefix, mask=own)
    tl.store(record + 3, _pick(hit, page_start), mask=own)
    tl.store(record + 4, block, mask=own)
    tl.store(record + 5, _pick(hit, tile_ends - weights) + local * _pick(hit, tiles), mask=own)
    tl.store(record + 6, (keys + BLOCK_N - 1) // BLOCK_N, mask=own)
    tl.store(record + 7, local // own_blocks * 2 + own_causal, mask=own)

    for end in tl.static_range(2):
        tile = i * per_chunk
        if end == 1:
            tile = tl.minimum(tile + per_chunk, total_tiles) - 1
        owner = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        hit = owner[:, None] == b[None, :]
        into = (tile - _pick(hit, tile_ends - weights)) // tl.maximum(_pick(hit, tiles), 1)
        tl.store(chunk_groups + i * 2 + end, _pick(hit, group_ends - group_counts) + into, mask=i < chunks)
    if tl.program_id(0) == 0:
        tl.store(totals, per_chunk)
        tl.store(totals + 1, chunks)
        tl.store(totals + 2, total_groups)
