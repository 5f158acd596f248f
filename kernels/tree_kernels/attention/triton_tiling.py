"""Tilings of the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Tiling:
    """Sizes of a kernel's tiles, and how it is launched."""

    block_rows: int  # packed rows of a tile
    block_keys: int  # keys of a tile
    warps: int  # of a program
    stages: int  # of the pipeline that loads keys and values
    programs_per_sm: int  # resident at a time
    merge_rows: int = 0  # rows that the last program of a group merges at a time; 0 merges in a separate launch
    # A separate loop for keys that every row sees, which needs no mask, at the price of a second start.
    apart: bool = False
    # By `tree_kernels.hopper.attention`; `warps` are those of one of its three warpgroups.
    specialised: bool = False

    def merge_parts(self, value_width: int) -> int:
        """Partials that are merged at a time: as many as 64 registers of each thread hold."""
        return max(1, 64 * 32 * self.warps // (max(self.merge_rows, 1) * value_width))


@dataclass(frozen=True)
class Merging:
    """How a program of a separate launch merges partials."""

    rows: int  # packed rows, at a time
    parts: int  # partials of each, at a time
    warps: int


# Columns of wide values that a program merges.
MERGE_COLUMNS = 128
# With fixed splits, neither order nor number of what is summed may depend on the rest of the batch.
FIXED_MERGING = Merging(1, 16, 2)


def choose_merging(programs: int, parts: int) -> Merging:
    """The fastest of fourteen tried on an H200 (`benchmarks/results/2026-11-26-h200-merging.md`).

    Many programs that take few partials at a time hide each other's latency; many partials that are taken one after the
    other are a round trip to L2 each. `programs` are those of one row each, `parts` the most partials of a group on
    average.
    """
    if parts >= 64:
        return Merging(1, 64, 4)
    if parts >= 32:
        return Merging(1, 8, 1)
    if parts >= 16 and programs <= 256:
        return Merging(1, 16, 2)
    return Merging(2 if programs > 1024 else 1, 4, 1)


# Keys of a sequence up to which a step is short: starting and merging take longer than reading.
_SHORT = 2048
# Of the warp-specialised kernel, four warps of each warpgroup. A fifth stage changed nothing on an H200, and tiles of
# 128 keys spill registers (`benchmarks/results/2026-11-29-h200-prompt-attention.md`).
SPECIALISED = Tiling(128, 64, 4, 4, 1, specialised=True)
# Tiles of each of its programs from which it is chosen: with two Triton's takes a sixth less, with four a tenth to a
# fifth more (`benchmarks/results/2026-11-30-h200-captured-attention.md`).
_SPECIALISED_TILES = 3
# The share of programs from which, with a group for each, hardly any group is cut: then the last program merges sooner
# than another launch, with fewer groups later (the same record).
_OWN_PROGRAMS = 0.9


def choose_tiling(
    rows: int,
    group: int,
    width: int,
    itemsize: int,
    *,
    keys: int,
    sequences: int,
    kv_heads: int,
    processors: int,
    words: int,
    specialised: bool,
) -> Tiling:
    """The fastest of those tried on an H200, on average over contexts of 300 to 3,000 tokens where a step is short
    (`benchmarks/results/2026-11-30-h200-captured-attention.md`), else by `benchmarks/kernels/tree_attention.py --tune`.

    Page ids come one pipeline stage before what they point at, so that two stages buy one tile in flight.

    `rows` are those of the largest sequence, `group` the query heads of each key head, `width` a key's, `itemsize`
    bytes of an element, `keys` those before all sequences' rows, `processors` the SMs, `words` those of a row's mask,
    and `specialised` whether `tree_kernels.hopper.attention` computes such a layer.
    """
    heads, packed_rows = sequences * kv_heads, rows * group
    if specialised and packed_rows >= SPECIALISED.block_rows:
        blocks = heads * triton.cdiv(packed_rows, SPECIALISED.block_rows)
        # Of rows of its own a block sees half, on average.
        tiles = blocks * (keys / sequences + rows / 2) / SPECIALISED.block_keys
        if tiles >= _SPECIALISED_TILES * processors:
            return SPECIALISED
    short = keys <= _SHORT * sequences
    packed = max(16, triton.next_power_of_2(packed_rows))
    if itemsize == 2 and 128 < width <= 256 and packed_rows <= 16:
        # Of one row a sequence, whose programs wait for memory: 47.8 us in place of 77.3 with 64 sequences, 13.6 in
        # place of 15.2 with 8 (`benchmarks/results/2026-12-01-h200-experts-and-states.md`).
        programs = 2 * processors
        return Tiling(16, 32, 4, 2, 2, 16 if short and _OWN_PROGRAMS * programs <= heads <= programs else 0)
    if itemsize > 2 or width > 128:
        return Tiling(min(64, packed), 32, 4, 2 if itemsize > 2 else 3, 1)
    if itemsize == 2 and width <= 64 and 64 < packed_rows <= 512 and keys <= 128 * sequences and heads <= 8:
        # Of a tree in a window of 128 keys: with 64 rows 7.8 us in place of 10.3 (the same record).
        return Tiling(64, 64, 4, 2, 2)
    # Blocks of 64 rows as soon as 16 are too few: products of 64 rows are Hopper's own.
    few = packed_rows <= 64 or (short and (packed_rows <= 128 or (packed_rows <= 256 and 4 * heads <= processors)))
    if few:
        return _few_rows_tiling(
            rows, packed_rows, width, itemsize, keys=keys, sequences=sequences, heads=heads, processors=processors,
            short=short,
        )  # fmt: skip
    # Keys of a whole batch above which reading each of them once outweighs the spills of a block of 256 rows.
    if packed >= 256 and keys >= 96 * 1024 and not short:
        return Tiling(256, 64, 16, 5, 1, apart=True)
    # With masks of four words a second loop would take 4 KB more than an SM has (`tests/kernels/test_tiling.py`).
    return Tiling(128, 128, 8, 5, 1, apart=keys > 4096 * sequences and words == 1)


def _few_rows_tiling(
    rows: int,
    packed_rows: int,
    width: int,
    itemsize: int,
    *,
    keys: int,
    sequences: int,
    heads: int,
    processors: int,
    short: bool,
) -> Tiling:
    """See `choose_tiling`; `packed_rows` are those of one key head, `heads` all sequences' key heads, and
    `short` whether starting and merging take longer than reading."""
    block = 16 if packed_rows <= 16 else 64
    groups = heads * triton.cdiv(packed_rows, block)
    # Two programs on an SM hide each other's latency where there are more groups than SMs, or where each group is
    # then cut in four.
    hides = groups > processors or processors // 4 < groups <= processors // 2
    per_sm = 2 if hides or (block == 16 and keys > 16384) else 1
    programs = per_sm * processors
    merge_rows = 16 if short and _OWN_PROGRAMS * programs <= groups <= programs else 0
    if block == 16 and groups > processors:
        return Tiling(16, 128, 4, 3, per_sm, merge_rows)
    # One tile of a group too many, as a window of 1,024 keys has behind a tree: half of the programs would have two.
    # With 16 rows 10.2 us in place of 10.8 (`benchmarks/results/2026-12-01-h200-weight-rings.md`).
    tiles = groups * triton.cdiv(keys // sequences + rows, 64)
    if block == 64 and width == 128 and itemsize == 2 and processors < tiles <= processors + groups:
        return Tiling(64, 128, 4, 2, 1, merge_rows)
    return Tiling(block, 64, 4, 5, per_sm, merge_rows)
