"""The Triton kernel that prepares a step of tree attention on the device: ancestor words, and how work is divided.

Words: a *group* is one key head of one block of BLOCK_M packed rows (packed row = row * GROUP + member, so that all
query heads of a key head share what is read); a *tile* is BLOCK_N keys; all tiles of all groups stand in one line,
which is cut into *chunks* of equal length, one program each. A group that a cut falls into leaves one *partial* per
chunk, merged afterwards. Where it costs little, and with a fixed chunk length always, every group starts a chunk of
its own: then no program begins twice, and with a fixed length where a group is cut depends on nothing but its sequence.

A sequence's rows are a chain (`causal` is 1), a tree (0), or see the keys before them alone (-1). A causal block sees
fewer tiles the earlier its rows are. So the blocks of a key head stand in *pairs*, the first with the last, the second
with the last but one, which have about as many tiles each; an odd block stands alone behind them.

A record describes a group in 8 integers: first row, rows, prefix length, start in the page table, block, first tile,
tiles, 2 * head + causal. A chunk is described in 16, so that a program reads no more before its first page: the record
of its first group, then first group, last group and the tiles of a chunk. An absent chunk's last group is before its
first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.attention.triton_mask import first_seen
from tree_kernels.triton_condition import is_wanted


@triton.jit
def _ancestors(start, rows, parents, words, depths, BLOCK_R: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ancestor words and depths of one sequence's rows, by walking from every row to the root. words: [R, WORDS] int64,
    depths: [R] int32."""
    row = tl.arange(0, BLOCK_R)
    live = row < rows
    word = tl.arange(0, WORDS)
    one = tl.full([BLOCK_R, WORDS], 1, tl.int64)
    bits = tl.zeros([BLOCK_R, WORDS], tl.int64)
    at = tl.where(live, row, 0)
    depth = tl.zeros([BLOCK_R], tl.int32)
    walked = 0
    deepest = tl.max(at, 0)
    # Bounded by the number of rows, so that a malformed tree cannot hang the device. Testing for the end costs as
    # much as a few steps.
    while (walked < rows) & (deepest > 0):
        for _ in tl.static_range(4):
            bits |= tl.where((at // 64)[:, None] == word[None, :], one << (at % 64).to(tl.int64)[:, None], 0)
            depth += (at > 0).to(tl.int32)
            at = tl.load(parents + start + at, mask=live & (at > 0), other=0)
        walked += 4
        deepest = tl.max(at, 0)
    # The root, in which every walk ends.
    bits |= tl.where(word[None, :] == 0, one, 0)
    tl.store(words + (start + row)[:, None] * WORDS + word[None, :], bits, mask=live[:, None])
    tl.store(depths + start + row, depth, mask=live)


@triton.jit
def _last_common(page_starts, page_table, common, b, sequences):  # type: ignore[no-untyped-def]
    """The last of the common pages of each sequence `b` [B]; -1 of one without."""
    count = tl.load(common + b, mask=(b >= 0) & (b < sequences), other=0)
    start = tl.load(page_starts + b, mask=count > 0, other=0)
    return tl.load(page_table + start + count - 1, mask=count > 0, other=-1)


@triton.jit
def split_kernel(  # type: ignore[no-untyped-def]
    query_starts, prefix_lengths, page_starts, page_table, common, shared_starts, shared_prefixes, shared_causal,
    own_prefixes, own_page_starts, sequences, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program b writes what sequence b is in both parts of a step, and the last one the end of `shared_starts` [B + 1]:
    see `triton_planning.CommonParts`. The rows of a group are those of its first sequence there."""
    own = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    last = _last_common(page_starts, page_table, common, b, sequences)
    begins = (last != _last_common(page_starts, page_table, common, b - 1, sequences)) | (b == 0)
    starts = tl.load(query_starts + b, mask=b < sequences, other=0)
    # Of the next group for a sequence that does not begin one, so that it has no rows.
    following = tl.where(begins & (b >= own) & (b < sequences), starts, tl.load(query_starts + sequences))
    tl.store(shared_starts + own, tl.min(following, 0))
    if own < sequences:
        count = tl.load(common + own)
        tl.store(shared_prefixes + own, count * PAGE_SIZE)
        tl.store(shared_causal + own, CAUSAL)
        tl.store(own_prefixes + own, tl.load(prefix_lengths + own) - count * PAGE_SIZE)
        tl.store(own_page_starts + own, tl.load(page_starts + own) + count)


@triton.jit
def first_seen_tile(  # type: ignore[no-untyped-def]
    prefix, block, causal, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """The tile of the first key that a block's rows see: the window's of its first row in a chain, the root's in a
    tree, whose rows may have any depth."""
    position = prefix + tl.where(causal > 0, block * BLOCK_M // GROUP, 0)
    return first_seen(position, WINDOW) // BLOCK_N


@triton.jit
def _seen_tiles(  # type: ignore[no-untyped-def]
    block, prefix, rows, causal, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """Tiles of the keys that a block's rows see."""
    # A causal block sees no key beyond its last row.
    last_row = tl.minimum(((block + 1) * BLOCK_M - 1) // GROUP, rows - 1)
    keys = prefix + tl.where(causal > 0, last_row + 1, tl.where(causal < 0, 0, rows))
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    if WINDOW != 0:
        tiles -= first_seen_tile(prefix, block, causal, GROUP, BLOCK_M, BLOCK_N, WINDOW)
    return tiles


@triton.jit
def _paired(  # type: ignore[no-untyped-def]
    tiles, first_block, blocks, prefix, rows, causal, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Room in the line of tiles for a pair of a sequence's blocks, and for all blocks of a key head, where none sees
    more than `tiles`."""
    pair, alone = 2 * tiles, tiles
    if WINDOW == 0:
        first = _seen_tiles(first_block, prefix, rows, causal, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        # As if the last block were full: then what a pair sees grows by a constant from block to block.
        last = _seen_tiles(first_block + blocks - 1, prefix, 1 << 30, 1, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        middle = _seen_tiles(first_block + blocks // 2, prefix, rows, causal, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        # One more, since both blocks of another pair may end within a tile.
        pair = tl.where(causal > 0, tl.minimum(first + last + 1, pair), pair)
        alone = tl.where(causal > 0, middle, alone)
    return pair, blocks // 2 * pair + blocks % 2 * alone


@triton.jit
def _first_of_pair(  # type: ignore[no-untyped-def]
    pair, first_block, prefix, rows, causal, is_even, pair_tiles, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Tiles of the first block of each `pair` [I] of a sequence: half of a pair's where `is_even`."""
    seen = _seen_tiles(first_block + pair, prefix, rows, causal, GROUP, BLOCK_M, BLOCK_N, WINDOW)
    return tl.where(is_even, pair_tiles // 2, seen)


@triton.jit
def _divide(tiles, group_counts, weights, programs, FIXED_TILES: tl.constexpr, CANDIDATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of a chunk, and whether every group starts one. tiles, group_counts, weights: [B]; `weights` are a
    sequence's tiles where none does."""
    if FIXED_TILES > 0:
        return tl.full([], FIXED_TILES, tl.int32), tl.full([], 1, tl.int32)
    even = tl.maximum((tl.sum(weights, 0) + programs - 1) // programs, 1)
    # The shortest of some longer chunks for which there are enough programs although every group starts a new one.
    longer = even + tl.arange(0, CANDIDATES) * ((even + 63) // 64)
    needed = tl.sum(((tiles[None, :] + longer[:, None] - 1) // longer[:, None]) * group_counts[None, :], 1)
    shortest = tl.min(tl.where(needed <= programs, longer, 1 << 30), 0)
    own = (shortest <= even + even // 8 + 1).to(tl.int32)
    return tl.where(own > 0, shortest, even), own


@triton.jit
def _write_totals(totals, chunk_table, per_chunk, chunks, groups, max_chunks, BLOCK_I: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what holds for all sequences, and the chunks that are absent."""
    tl.store(totals, per_chunk)
    # Lengths that advance on the device may outgrow the room, and must not be written or run beyond it.
    tl.store(totals + 1, tl.minimum(chunks, max_chunks))
    tl.store(totals + 2, groups)
    for at in tl.range(chunks, max_chunks, BLOCK_I):
        absent = at + tl.arange(0, BLOCK_I)
        tl.store(chunk_table + absent * 16 + 8, tl.zeros([BLOCK_I], tl.int32), mask=absent < max_chunks)
        tl.store(chunk_table + absent * 16 + 9, tl.full([BLOCK_I], -1, tl.int32), mask=absent < max_chunks)


@triton.jit(do_not_specialize=["first_row", "end_row", "condition"])
def schedule_kernel(  # type: ignore[no-untyped-def]
    query_starts, prefix_lengths, causal, page_starts, parents, words, depths, groups, chunk_table, arrivals, totals,
    condition, sequences, programs, max_chunks, first_row, end_row,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FIXED_TILES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, WORDS: tl.constexpr, BLOCK_I: tl.constexpr,
    WINDOW: tl.constexpr, CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program b writes the records of sequence b's groups, the chunks that begin or end in it, and its words.

    Each repeats the sums over sequences. Only blocks of a tail with rows from `first_row` to `end_row` have groups.
    BLOCK_R is 0 where the words exist already or nothing is a tree. Tiles before the WINDOW of every row, 0 for none,
    are left out, but for fixed chunks, which are cut at the same keys whatever the rows. A launch that is not wanted
    leaves attention nothing to do.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.arange(0, BLOCK_B)
    here = b == tl.program_id(0)
    start = tl.load(query_starts + b, mask=b < sequences, other=0)
    rows = tl.load(query_starts + b + 1, mask=b < sequences, other=0) - start
    prefix = tl.load(prefix_lengths + b, mask=b < sequences, other=0)
    own_start = tl.load(query_starts + tl.program_id(0))
    own_rows = tl.load(query_starts + tl.program_id(0) + 1) - own_start
    own_prefix = tl.load(prefix_lengths + tl.program_id(0))
    own_causal = tl.load(causal + tl.program_id(0))
    page_start = tl.load(page_starts + tl.program_id(0))
    if CONDITIONAL:
        wanted = is_wanted(condition).to(tl.int32)
        rows, own_rows, end_row = rows * wanted, own_rows * wanted, end_row * wanted
    first_block = first_row * GROUP // BLOCK_M
    end_blocks = (tl.minimum(rows, end_row) * GROUP + BLOCK_M - 1) // BLOCK_M
    kinds = tl.load(causal + b, mask=b < sequences, other=0)
    tiles = (prefix + tl.where(kinds < 0, 0, rows) + BLOCK_N - 1) // BLOCK_N
    # None of rows that see no key.
    head_blocks = tl.where(tiles > 0, tl.maximum(end_blocks - first_block, 0), 0)
    group_counts = head_blocks * KV_HEADS
    if WINDOW != 0 and FIXED_TILES == 0:
        tiles -= first_seen_tile(prefix, first_block, kinds, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        # A chain's block sees no more than the windows of its first and last row hold.
        most = (BLOCK_M - 1) // GROUP + 1 + (WINDOW if WINDOW > 0 else -WINDOW)
        tiles = tl.where(kinds > 0, tl.minimum(tiles, (most + BLOCK_N - 1) // BLOCK_N + 1), tiles)
    pair_tiles, head_tiles = _paired(
        tiles, first_block, head_blocks, prefix, rows, kinds, GROUP, BLOCK_M, BLOCK_N, WINDOW
    )
    per_chunk, aligned = _divide(tiles, group_counts, head_tiles * KV_HEADS, programs, FIXED_TILES, 16)
    tiles = tl.where(aligned > 0, (tiles + per_chunk - 1) // per_chunk * per_chunk, tiles)
    pair_tiles = tl.where(aligned > 0, 2 * tiles, pair_tiles)
    head_tiles = tl.where(aligned > 0, tiles * head_blocks, head_tiles)
    weights = head_tiles * KV_HEADS
    total_tiles = tl.sum(weights, 0)
    chunks = (total_tiles + per_chunk - 1) // per_chunk
    first_group = tl.sum(tl.where(b < tl.program_id(0), group_counts, 0), 0)
    first_tile = tl.sum(tl.where(b < tl.program_id(0), weights, 0), 0)
    own_groups = tl.sum(tl.where(here, group_counts, 0), 0)
    pair_tiles = tl.maximum(tl.sum(tl.where(here, pair_tiles, 0), 0), 1)
    head_tiles = tl.maximum(tl.sum(tl.where(here, head_tiles, 0), 0), 1)
    is_even = (aligned > 0) | (own_causal <= 0) | (WINDOW != 0)
    blocks = tl.maximum(own_groups // KV_HEADS, 1)
    own = (
        own_start, own_rows, own_prefix, page_start, own_causal, first_block, blocks, first_tile, pair_tiles,
        head_tiles, is_even,
    )  # fmt: skip
    # Fixed chunks are cut at the same keys whatever a row sees.
    CUT: tl.constexpr = 0 if FIXED_TILES > 0 else WINDOW
    if tl.program_id(0) == 0:
        _write_totals(totals, chunk_table, per_chunk, chunks, tl.sum(group_counts, 0), max_chunks, BLOCK_I)
    _write_groups(groups, arrivals, first_group, own_groups, own, GROUP, BLOCK_M, BLOCK_N, BLOCK_I, CUT)
    end_tile = first_tile + own_groups // blocks * head_tiles
    _write_chunks(
        chunk_table, first_group, end_tile, total_tiles, per_chunk, max_chunks, own, GROUP, BLOCK_M, BLOCK_N, BLOCK_I,
        CUT,
    )  # fmt: skip
    if BLOCK_R > 0:  # noqa: SIM102  one is known to the compiler, the other is not
        if own_causal == 0:
            _ancestors(own_start, own_rows, parents, words, depths, BLOCK_R, WORDS)


@triton.jit
def _write_groups(  # type: ignore[no-untyped-def]
    groups, arrivals, first_group, own_groups, own, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write the records of one sequence's groups, none of which has left a partial."""
    for at in tl.range(0, own_groups, BLOCK_I):
        local = at + tl.arange(0, BLOCK_I)
        _record(groups + (first_group + local) * 8, local, local < own_groups, own, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        tl.store(arrivals + first_group + local, tl.zeros([BLOCK_I], tl.int32), mask=local < own_groups)


@triton.jit
def _write_chunks(  # type: ignore[no-untyped-def]
    chunk_table, first_group, end_tile, total_tiles, per_chunk, max_chunks, own, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write the beginnings and the ends of chunks that lie in one sequence's tiles."""
    _, _, _, _, _, _, _, first_tile, _, _, _ = own
    end_chunk = (end_tile + per_chunk - 1) // per_chunk
    for at in tl.range((first_tile + per_chunk - 1) // per_chunk, end_chunk, BLOCK_I):
        chunk = at + tl.arange(0, BLOCK_I)
        begins = (chunk * per_chunk < end_tile) & (chunk < max_chunks)
        local = _group_at(chunk * per_chunk - first_tile, own, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        _record(chunk_table + chunk * 16, local, begins, own, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        tl.store(chunk_table + chunk * 16 + 8, first_group + local, mask=begins)
        tl.store(chunk_table + chunk * 16 + 10, tl.zeros([BLOCK_I], tl.int32) + per_chunk, mask=begins)
    chunks = tl.minimum((total_tiles + per_chunk - 1) // per_chunk, max_chunks)
    for at in tl.range(first_tile // per_chunk, end_chunk, BLOCK_I):
        chunk = at + tl.arange(0, BLOCK_I)
        last_tile = tl.minimum((chunk + 1) * per_chunk, total_tiles) - 1
        ends = (chunk < chunks) & (last_tile >= first_tile) & (last_tile < end_tile)
        local = _group_at(last_tile - first_tile, own, GROUP, BLOCK_M, BLOCK_N, WINDOW)
        tl.store(chunk_table + chunk * 16 + 9, first_group + local, mask=ends)


@triton.jit
def _group_at(  # type: ignore[no-untyped-def]
    tile, own, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """The group of one sequence, `own`, in whose room each `tile` [I] of that sequence lies."""
    _, rows, prefix, _, causal, first_block, blocks, _, pair_tiles, head_tiles, is_even = own
    at = tile % head_tiles
    pair = tl.minimum(at // pair_tiles, blocks // 2)
    first = _first_of_pair(
        pair, first_block, prefix, rows, causal, is_even, pair_tiles, GROUP, BLOCK_M, BLOCK_N, WINDOW
    )
    is_second = (at - pair * pair_tiles >= first) & (pair < blocks // 2)
    return tile // head_tiles * blocks + 2 * pair + is_second.to(tl.int32)


@triton.jit
def _record(  # type: ignore[no-untyped-def]
    to, local, there, own, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """Write the records of groups `local` [I] of one sequence, `own`, to `to` [I]."""
    start, rows, prefix, page_start, causal, first_block, blocks, first_tile, pair_tiles, head_tiles, is_even = own
    head = local // blocks
    pair = local % blocks // 2
    is_second = local % blocks % 2
    block = first_block + tl.where(is_second > 0, blocks - 1 - pair, pair)
    first = _first_of_pair(
        pair, first_block, prefix, rows, causal, is_even, pair_tiles, GROUP, BLOCK_M, BLOCK_N, WINDOW
    )
    zero = tl.zeros_like(local)
    tl.store(to, zero + start, mask=there)
    tl.store(to + 1, zero + rows, mask=there)
    tl.store(to + 2, zero + prefix, mask=there)
    tl.store(to + 3, zero + page_start, mask=there)
    tl.store(to + 4, block, mask=there)
    tl.store(to + 5, first_tile + head * head_tiles + pair * pair_tiles + is_second * first, mask=there)
    tl.store(to + 6, _seen_tiles(block, prefix, rows, causal, GROUP, BLOCK_M, BLOCK_N, WINDOW), mask=there)
    tl.store(to + 7, head * 2 + tl.maximum(causal, 0), mask=there)
