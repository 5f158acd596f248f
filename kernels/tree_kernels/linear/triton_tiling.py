"""How the linear kernels cut their work."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of one tile. More rows take more tiles, which read the weights again.
MAX_BLOCK_ROWS = 64
_MIN_BLOCK_ROWS = 8


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """Sizes of one program's tile, and how it is compiled.

    Attributes:
        block_rows: rows of the input.
        block_outputs: rows of the weight.
        block_inner: numbers of either that are multiplied at a time.
        splits: programs that share a tile, each with its part of the numbers.
        warps: of a program.
        stages: blocks of weights on their way at a time.
        ahead: 256 bytes of each row's weights asked for before the input is there, so many times. A power of two.
    """

    block_rows: int
    block_outputs: int
    block_inner: int
    splits: int
    warps: int
    stages: int
    ahead: int


def choose_linear_tiling(
    rows: int, outputs: int, inner: int, *, invariant: bool = False, int8: bool = False
) -> LinearTiling:
    """The tiling for `rows` times a weight [outputs, inner]. `invariant` makes it one for any number of rows."""
    block_rows = MAX_BLOCK_ROWS
    while not invariant and block_rows > _MIN_BLOCK_ROWS and block_rows // 2 >= rows:
        block_rows //= 2
    # Each line is the fastest of those tried on an H200: benchmarks/results/2026-11-23-h200-linear.json, and of up to 8
    # rows and of small shapes 2026-11-21-h200-linear.json.
    if inner < 2048:
        full = block_rows == MAX_BLOCK_ROWS
        splits = 3 if inner >= 1024 and not full else 1
        block_outputs = (64 if full else 32) if outputs >= 768 else 16
        return LinearTiling(block_rows, block_outputs, 64, splits, 4 if full else 2, 9, 8)
    return LinearTiling(block_rows, *(_INT8 if int8 else _WIDE)[block_rows](outputs, inner))


# Outputs, inner, splits, warps, stages, ahead.
_Sizes = tuple[int, int, int, int, int, int]


def _of_64_rows(outputs: int, inner: int) -> _Sizes:
    """Wide tiles, because every tile reads all rows, and parts where too few of them would be left."""
    if outputs >= 8192:
        return 128, 128, 1, 8, 4, 8
    return (64, 128, 2, 4, 6, 8) if inner >= 8192 else (64, 128, 1, 4, 6, 8)


def _of_32_rows(outputs: int, _inner: int) -> _Sizes:
    """Where there are many outputs, two programs to a processor, which six stages have no room for."""
    if outputs >= 8192:
        return 64, 128, 1, 4, 4, 8
    return (64, 256, 1, 4, 3, 8) if outputs >= 5120 else (64, 128, 2, 4, 6, 8)


def _of_16_rows(outputs: int, _inner: int) -> _Sizes:
    """Tiles as for 32 rows, with more programs where there are fewer outputs."""
    if outputs >= 8192:
        return 64, 128, 1, 4, 4, 8
    return (32, 128, 2, 4, 6, 8) if outputs >= 5120 else (64, 128, 2, 4, 6, 8)


def _of_few_rows(outputs: int, _inner: int) -> _Sizes:
    """Enough programs and bytes on their way for the whole memory."""
    if outputs >= 8192:
        return 64, 128, 1, 4, 6, 8
    return (32, 256, 1, 4, 5, 16) if outputs >= 5120 else (32, 256, 2, 4, 5, 8)


def _of_64_rows_int8(outputs: int, _inner: int) -> _Sizes:
    """Tiles as for bfloat16, with longer blocks of a row where there are few outputs: half the bytes a number."""
    if outputs >= 8192:
        return 128, 128, 1, 4, 4, 8
    return (64, 128, 2, 4, 4, 8) if outputs >= 5120 else (64, 256, 2, 4, 4, 8)


def _of_32_rows_int8(outputs: int, _inner: int) -> _Sizes:
    """More splits than for bfloat16, since each program reads half the bytes of it."""
    if outputs >= 8192:
        return 64, 256, 1, 4, 4, 8
    return (64, 256, 2, 4, 4, 8) if outputs >= 5120 else (128, 256, 4, 8, 3, 8)


def _of_few_rows_int8(outputs: int, _inner: int) -> _Sizes:
    """Four splits where there are few outputs, for enough programs."""
    if outputs >= 8192:
        return 128, 256, 1, 4, 4, 8
    return (64, 256, 1, 4, 4, 8) if outputs >= 5120 else (64, 256, 4, 4, 4, 8)


# Each near the fastest of those tried on an H100: benchmarks/results/2026-11-25-h100-linear-eight-bits.json. 16 rows
# were not tried, and take those of 32.
_INT8 = {
    64: _of_64_rows_int8,
    32: _of_32_rows_int8,
    16: _of_32_rows_int8,
    8: _of_few_rows_int8,
}
_WIDE = {64: _of_64_rows, 32: _of_32_rows, 16: _of_16_rows, 8: _of_few_rows}
