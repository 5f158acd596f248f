"""How the linear kernels cut their work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

# Rows of one tile. More rows take more tiles, which read the weights again.
MAX_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """Sizes of one program's tile, and how it is compiled."""

    block_rows: int  # rows of the input
    block_outputs: int  # rows of the weight
    block_inner: int  # numbers of either that are multiplied at a time
    splits: int  # programs that share a tile, each with its part of the numbers
    warps: int  # of a program
    stages: int  # blocks of weights in flight at a time
    ahead: int  # pieces of 256 bytes of each row of the weight, prefetched before the input is there; a power of two
    mapped: bool = False  # blocks are read by tensor maps (TMA, from Hopper on); with gate and up without splits


# Outputs, inner, splits, warps, stages, ahead.
_Sizes = tuple[int, int, int, int, int, int]
# By rows of a tile: for at least 8,192 outputs, at least 5,120, and fewer. Each is the fastest of those tried on
# an H200: benchmarks/results/2026-11-23-h200-linear.json, and for up to 8 rows 2026-11-21-h200-linear.json.
_WIDE: dict[int, tuple[_Sizes, _Sizes, _Sizes]] = {
    # Wide tiles, because every tile reads all rows.
    64: ((128, 128, 1, 8, 4, 8), (64, 128, 1, 4, 6, 8), (64, 128, 1, 4, 6, 8)),
    # With many outputs two programs to a processor, for which six stages would not leave room.
    32: ((64, 128, 1, 4, 4, 8), (64, 256, 1, 4, 3, 8), (64, 128, 2, 4, 6, 8)),
    16: ((64, 128, 1, 4, 4, 8), (32, 128, 2, 4, 6, 8), (64, 128, 2, 4, 6, 8)),
    # Enough programs and bytes in flight for the whole memory bandwidth.
    8: ((64, 128, 1, 4, 6, 8), (32, 256, 1, 4, 5, 16), (32, 256, 2, 4, 5, 8)),
}

# Of so few outputs, such as a gated delta net's gates, one or two of those tiles would read the weight. For 16 to 64
# rows and 64 outputs the fastest of 16 on an H200, or within 4 % of it, 3.2 to 4.5 us, where cuBLAS takes 6:
# benchmarks/results/2026-12-01-h200-experts-and-states.md.
_MOST_NARROW, _NARROW = 128, (16, 128, 8, 4, 4, 4)


class _Mapped(NamedTuple):
    """Tilings by tensor maps; None where they are no faster, or were not tried."""

    gated: _Sizes | None  # gate and up
    heads: _Sizes | None  # queries, keys and values of heads of 128
    many: _Sizes | None  # others of at least 8,192 outputs
    few: _Sizes | None


# By rows of a tile, up to as many. Of 33 to 64 rows each is the fastest of those tried on an H100, or near it, alone or
# within a step: benchmarks/results/2026-11-27-h100-64-rows.md. Of 9 to 16 rows on an H200; of 17 to 32 those that are
# faster alone make a step slower: benchmarks/results/2026-11-28-h200-mapped-products.md.
# Of 65 to 128 rows on an H200, where gate and up take 67.5 us and cuBLAS with the activation behind it 71.7:
# benchmarks/results/2026-11-30-h200-products.md.
_MAPPED = {
    128: _Mapped((128, 64, 1, 4, 3, 0), None, None, None),
    64: _Mapped((128, 128, 1, 4, 4, 2), (128, 128, 1, 8, 4, 4), (128, 128, 1, 4, 3, 0), (64, 128, 1, 4, 6, 0)),
    16: _Mapped((128, 256, 1, 4, 3, 0), (128, 128, 1, 8, 5, 0), None, (64, 256, 2, 4, 3, 0)),
}
# The same with inner sizes of 8,192 or more, and of others with at least 8,192 outputs, but fewer than 12,288: a layer
# of Llama 70B's shape on one of two ranks takes 7 % less with 32 rows and 16 % with 64, twelve of them one after the
# other on an H200: benchmarks/results/2026-11-30-h200-half-70b-products.md.
_LEAST_INNER, _MOST_OUTPUTS = 8192, 12288
_LONG = {
    64: _Mapped((128, 128, 1, 4, 3, 0), (128, 128, 2, 8, 4, 0), (64, 256, 1, 4, 3, 4), None),
    32: _Mapped((128, 128, 1, 4, 3, 0), (128, 128, 2, 8, 4, 4), (64, 256, 1, 4, 3, 4), None),
}
# Of more outputs, but fewer than 16,384, as a gated delta net's states have: the fastest alone of twenty on an H200,
# 29.9 us in place of 33.7 for 64 rows and 28.6 in place of 31.4 for 32, not tried within a step:
# benchmarks/results/2026-12-01-h200-experts-and-states.md.
_STATES, _MOST_STATES = _Mapped(None, None, (128, 128, 1, 4, 3, 0), None), 16384
# Inner, splits, warps, stages, ahead of tiles that are heads of 128, in 16 bits: for up to 32 rows of a tile, and more.
# The fastest of 32 on an H100 for both shapes of Qwen3, or within 4 % of it:
# benchmarks/results/2026-11-27-h100-head-tilings.json.
_HEADS_OF_128 = {32: (64, 2, 8, 8, 8), MAX_BLOCK_ROWS: (128, 2, 8, 3, 8)}
# The same for weights in int8, each near the fastest of those tried on an H100:
# benchmarks/results/2026-11-25-h100-linear-eight-bits.json. A program reads half the bytes, so few outputs take longer
# blocks or more splits.
_INT8_32: tuple[_Sizes, _Sizes, _Sizes] = ((64, 256, 1, 4, 4, 8), (64, 256, 2, 4, 4, 8), (128, 256, 4, 8, 3, 8))
_INT8: dict[int, tuple[_Sizes, _Sizes, _Sizes]] = {
    64: ((128, 128, 1, 4, 4, 8), (64, 128, 2, 4, 4, 8), (64, 256, 2, 4, 4, 8)),
    32: _INT8_32,
    # Not tried.
    16: _INT8_32,
    # The second as measured in levels of a head on an H200: benchmarks/results/2026-11-30-h200-level-launches.md.
    8: ((128, 256, 1, 4, 4, 8), (64, 256, 4, 4, 4, 8), (64, 256, 4, 4, 4, 8)),
}


def choose_mapped_tiling(
    rows: int, outputs: int, inner: int, *, gated: bool = False, head_width: int | None = None
) -> LinearTiling | None:
    """The tiling for `rows` times a weight [outputs, inner] that is read by tensor maps, with gate above up if it is
    `gated`, or queries, keys and values in heads of a width, of which each tile is one. None where that is no faster,
    or was not tried."""
    block_rows, many = 1 << (rows - 1).bit_length(), outputs >= 8192
    # Half a narrow block, which is gate's or up's part of it, is too small for the matrix units.
    if inner < 2048 or (gated and not many) or outputs <= _MOST_NARROW:
        return None
    is_long = inner >= _LEAST_INNER if gated or head_width is not None else many and outputs < _MOST_OUTPUTS
    mapped = _LONG.get(block_rows) if is_long else None
    if not gated and head_width is None and _MOST_OUTPUTS <= outputs < _MOST_STATES and 16 < rows <= MAX_BLOCK_ROWS:
        mapped = _STATES
    mapped = _MAPPED.get(block_rows) if mapped is None else mapped
    if mapped is None:
        return None
    if head_width is not None:
        sizes = mapped.heads if mapped.heads is not None and head_width == mapped.heads[0] else None
    elif gated:
        sizes = mapped.gated
    else:
        sizes = mapped.many if many else mapped.few
    if sizes is None or inner % (sizes[1] * sizes[2]):
        return None
    return LinearTiling(block_rows, *sizes, mapped=True)


def choose_linear_tiling(
    rows: int, outputs: int, inner: int, *, invariant: bool = False, int8: bool = False
) -> LinearTiling:
    """The tiling for `rows` times a weight [outputs, inner]. `invariant` makes it the same for any number of rows."""
    block_rows = MAX_BLOCK_ROWS
    while not invariant and block_rows > 8 and block_rows // 2 >= rows:
        block_rows //= 2
    full = block_rows == MAX_BLOCK_ROWS
    if inner < 2048:
        # As measured on an H200: benchmarks/results/2026-11-21-h200-linear.json.
        splits = 3 if inner >= 1024 and not full else 1
        block_outputs = (64 if full else 32) if outputs >= 768 else 16
        return LinearTiling(block_rows, block_outputs, 64, splits, 4 if full else 2, 9, 8)
    if outputs <= _MOST_NARROW and not int8:
        return LinearTiling(block_rows, *_NARROW)
    many, some, few = (_INT8 if int8 else _WIDE)[block_rows]
    if outputs >= 8192:
        return LinearTiling(block_rows, *many)
    if full and not int8 and inner >= 8192:
        # Of long rows of the weight, where there would be too few tiles without splits.
        return LinearTiling(block_rows, 64, 128, 2, 4, 6, 8)
    return LinearTiling(block_rows, *(some if outputs >= 5120 else few))


def heads_take_a_launch(rows: int, width: int, *, invariant: bool) -> bool:
    """Whether norms of heads of `width` are faster in a launch behind their product than in tiles that are heads: of
    256, 19.6 us in place of 50.4 for 64 rows, and 21.8 in place of 28.5 for 16
    (benchmarks/results/2026-12-01-h200-experts-and-states.md). Of up to 8 rows it was not tried. `invariant` ones are
    multiplied as 64 rows are."""
    return width > 128 and (invariant or rows > 8)


def whole_head_tiling(tiling: LinearTiling, width: int, outputs: int, inner: int) -> LinearTiling:
    """A tiling whose tiles are heads of `width`, for norms of heads, in place of one for the same product.

    Programs share a head, so that there are no fewer of them, and each has as many bytes of weights in flight.
    """
    inner_of_block, splits, warps, stages, ahead = _HEADS_OF_128[32 if tiling.block_rows <= 32 else MAX_BLOCK_ROWS]
    if width == 128 and inner % (splits * inner_of_block) == 0 and inner >= 1024:
        return LinearTiling(tiling.block_rows, width, inner_of_block, splits, warps, stages, ahead)
    if tiling.block_outputs == width:
        return tiling
    # As many as 64 rows of an 8B layer have, whose memory is busy.
    programs = max(96, -(-outputs // tiling.block_outputs) * tiling.splits)
    # With longer blocks a program's stages would be too few. Not measured.
    splits, block_inner = 1, min(tiling.block_inner, 64)
    while splits < 8 and splits * (outputs // width) < programs and inner % (2 * splits * block_inner) == 0:
        splits *= 2
    in_flight = tiling.block_outputs * tiling.block_inner * tiling.stages
    stages = max(3, in_flight // (width * block_inner))
    # No further than a program's own share of a row, 128 numbers a piece.
    ahead = min(tiling.ahead, 1 << max(0, (inner // splits // 128).bit_length() - 1))
    # Of more numbers four warps would spill: 1,096 bytes a thread of 64 rows by 256 columns, 0 with eight (ptxas).
    # Numbers of a tile that four warps hold in registers: 64 rows by 128 columns.
    warps = max(tiling.warps, 8) if tiling.block_rows * width > 8192 else tiling.warps
    return replace(
        tiling, block_outputs=width, block_inner=block_inner, splits=splits, warps=warps, stages=stages, ahead=ahead,
        mapped=False,
    )  # fmt: skip


# For one row, shorter rows of a weight are left to the matrix units' kernels, whose tilings were measured for them.
MIN_INNER = 2048


@dataclass(frozen=True, slots=True)
class VectorTiling:
    """Sizes of one program's blocks, for a single row."""

    block_outputs: int  # rows of the weight; a power of two
    chunks: int  # loads of each thread and row of the weight that are in flight together; a power of two
    warps: int

    @property
    def block_inner(self) -> int:
        """Numbers of a row that all threads of a program load at a time."""
        # Numbers of a thread's load, 16 bytes in half precision, and threads of a warp.
        return 8 * 32 * self.warps


def choose_vector_tiling(
    outputs: int, inner: int, *, itemsize: int, gated: bool = False, scaled: bool = False
) -> VectorTiling | None:
    """The tiling for one row times a weight [outputs, inner] of numbers of `itemsize` bytes; None where matrix units
    multiply. `gated` for gate and up together, `scaled` where the sum is scaled for a norm."""
    if inner < MIN_INNER or itemsize != 2:
        return None
    # Each the fastest of 13 to 16 with one row of the shapes of Qwen3-8B, Qwen3-30B-A3B and Llama-8B on an H100, or
    # near it: benchmarks/results/2026-11-27-h100-vectors.json. Those of 4,096 to 8,192 numbers with half of Llama-8B's
    # gate and up, half of its down, and its queries, keys and values are the fastest of 21 or 22 on an H200:
    # benchmarks/results/2026-11-30-h200-products.md. Where a sum is scaled for a norm, each program leaves a part of
    # the squares, and every program of the next launch reads all parts: those have four outputs or more.
    if gated or (inner < 4096 and (outputs > 4096 or scaled)):
        return VectorTiling(2 if inner >= 4096 and outputs <= 16384 else 8, 1, 4)
    # Of products with nothing behind them, as one of two ranks has, and few outputs: 3 to 7 % faster than the other two
    # (benchmarks/results/2026-11-28-h100-ranks.md).
    if inner < 8192 and outputs <= 4096 and not scaled:
        return VectorTiling(4, 2 if inner > 4096 else 1, 4)
    if inner < 8192 and outputs <= 8192 and not scaled:
        return VectorTiling(8, 1, 2)
    if inner < 8192:
        return VectorTiling(4, 2 if outputs >= 4096 else 1, 8) if scaled else VectorTiling(2, 2, 4)
    # Of long rows, which fill the device's last wave of programs or leave it half empty.
    return {12288: VectorTiling(4, 4, 8), 14336: VectorTiling(4, 1, 8)}.get(inner, VectorTiling(4, 1, 4))
