"""How the kernels of experts cut their work."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 8, 64
# Pairs of a row and an expert up to which a program looks for its own among all, in place of a launch that lists them.
# Chosen, not measured: one load of each thread.
MAX_PAIRS = 128
# Rows of an expert vary: with this many times their mean in a block, few experts need two.
_SPARE_ROWS = 3


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Sizes of one program's tile, and how it is compiled."""

    block_rows: int
    block_outputs: int  # rows of the weight
    block_inner: int  # numbers of either that are multiplied at a time
    warps: int
    stages: int  # blocks in flight


@dataclass(frozen=True, slots=True)
class ExpertTilings:
    """Of both products."""

    gated: ExpertTiling
    down: ExpertTiling


# By rows of a block. Chosen so that two programs fit a processor of Hopper with about 100 KB in flight each, as the
# linear layers' tilings do; not yet measured.
_TILINGS = {
    8: ExpertTiling(8, 64, 128, 4, 5),
    16: ExpertTiling(16, 64, 128, 4, 4),
    32: ExpertTiling(32, 128, 128, 4, 3),
    64: ExpertTiling(64, 128, 128, 8, 3),
}


def rows_of_a_block(rows: int, top_k: int, experts: int) -> int:
    """Rows of a tile, so that few experts need more than one."""
    wanted = min(rows, -(-_SPARE_ROWS * rows * top_k // experts))
    block = _MIN_BLOCK_ROWS
    while block < min(wanted, _MAX_BLOCK_ROWS):
        block *= 2
    return block


def choose_expert_tilings(rows: int, top_k: int, experts: int, *, invariant: bool = False) -> ExpertTilings:
    """The tilings of `rows` that choose `top_k` of so many experts. `invariant` makes them the same for any number."""
    tiling = _TILINGS[16 if invariant else rows_of_a_block(rows, top_k, experts)]
    return ExpertTilings(tiling, tiling)
