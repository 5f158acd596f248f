"""How the kernels of experts cut their work."""

from __future__ import annotations

from dataclasses import dataclass

from tree_kernels.linear.triton_tiling import VectorTiling

# Pairs of a row and an expert up to which a program looks for its own among all, in place of a launch that lists them.
# Chosen, not measured: one load of each thread.
MAX_PAIRS = 128


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


@dataclass(frozen=True, slots=True)
class ExpertVectorTilings:
    """Of both products for very few rows. A program of `down` loads all experts of a row together, whatever its
    `chunks`."""

    gated: VectorTiling
    down: VectorTiling


# Each the fastest with 1, 2 and 4 rows of Qwen3-30B-A3B's shape on an H100, or within 1 % of it:
# benchmarks/results/2026-11-27-h100-vectors.json.
ROUTER_VECTORS = VectorTiling(2, 2, 4)
_SAME_16, _SAME_32 = ExpertTiling(16, 64, 128, 4, 4), ExpertTiling(32, 128, 128, 4, 3)
_SAME_64 = ExpertTiling(64, 128, 128, 8, 3)
# By rows of a block. For 8, each the fastest of 65 with one row of Qwen3-30B-A3B's shape on an H100:
# benchmarks/results/2026-11-27-h100-experts.json. The others are chosen so that two programs fit a processor of Hopper
# with about 100 KB in flight each; with 16 to 256 rows of that shape they take 1.05 to 1.13 of the bytes' time.
_TILINGS = {
    8: ExpertTilings(ExpertTiling(16, 64, 256, 4, 3), ExpertTiling(16, 128, 128, 4, 3)),
    16: ExpertTilings(_SAME_16, _SAME_16),
    32: ExpertTilings(_SAME_32, _SAME_32),
    64: ExpertTilings(_SAME_64, _SAME_64),
}
# Of widths that the block of numbers above does not divide, so that every block's loads would be masked and the last
# mostly empty. The fastest, or within 0.2 % of it, for blocks of 8 and of 32 rows of gpt-oss-20b's shape on an H200:
# benchmarks/results/2026-12-01-h200-experts-and-states.md. More rows were not tried.
_UNEVEN = ExpertTilings(ExpertTiling(16, 64, 64, 4, 8), ExpertTiling(16, 128, 64, 4, 8))


def rows_of_a_block(rows: int, top_k: int, experts: int) -> int:
    """Rows of a tile, so that few experts need more than one."""
    # Rows of an expert vary: with this many times their mean in a block, few experts need two.
    wanted = min(rows, -(-3 * rows * top_k // experts))
    block = 8
    while block < min(wanted, 64):
        block *= 2
    return block


def choose_expert_tilings(
    rows: int, top_k: int, experts: int, hidden: int, inner: int, *, invariant: bool = False
) -> ExpertTilings:
    """The tilings of `rows` that choose `top_k` of so many experts, of widths `hidden` and `inner`. `invariant` makes
    them the same for any number of rows."""
    block = 16 if invariant else rows_of_a_block(rows, top_k, experts)
    usual = _TILINGS[block]
    if block == 64:
        return usual
    return ExpertTilings(
        _UNEVEN.gated if hidden % usual.gated.block_inner else usual.gated,
        _UNEVEN.down if inner % usual.down.block_inner else usual.down,
    )


def reads_few_rows(rows: int, hidden: int) -> bool:
    """Whether so many rows of a hidden size go through registers."""
    # More rows were not tried. Shorter ones of a weight leave threads without work. Chosen.
    return 0 < rows <= 4 and hidden >= 2048


def choose_expert_vectors(rows: int, hidden: int, inner: int, *, itemsize: int) -> ExpertVectorTilings | None:
    """The tilings for so many rows of experts of widths `hidden` and `inner`; None where matrix units multiply."""
    if not reads_few_rows(rows, hidden) or inner < 512 or itemsize != 2:
        return None
    # The fastest with 1, 2 and 4 rows, as `ROUTER_VECTORS`.
    return ExpertVectorTilings(VectorTiling(4, 1, 4), VectorTiling(2, 1, 1))
