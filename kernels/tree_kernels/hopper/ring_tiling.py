"""How products by a ring of weights cut their work; see `tree_kernels.hopper.weight_ring`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Rows of the weight that a warpgroup multiplies at a time, of which a tile has one or two parts.
PART = 64


class RingKind(StrEnum):
    """What a product ends in."""

    SUM = "sum"  # the residual and the next norm: one part a tile
    GATED = "gated"  # an activation, of gate's and of up's part
    HEADS = "heads"  # rotary embedding, of both halves of a head

    @property
    def parts(self) -> int:
        """Parts of 64 rows that a tile has."""
        return 1 if self is RingKind.SUM else 2


@dataclass(frozen=True, slots=True)
class RingTiling:
    """Sizes of one program's tile, and how many blocks of it are in flight."""

    block_rows: int  # rows of the input
    block_inner: int  # numbers of either that are multiplied at a time
    splits: int  # programs that share a tile, each with its part of the numbers
    stages: int  # blocks of weights and rows in the ring


# Numbers at a time and stages, by rows of a tile: the fastest of those tried for a layer of Llama 8B's shape within a
# step on an H200 (benchmarks/results/2026-12-01-h200-weight-rings.md); where there is none, Triton's own were faster.
_TRIED: dict[RingKind, dict[int, tuple[int, int]]] = {
    # One program a processor, whose ring has all of its memory.
    RingKind.SUM: {8: (128, 10), 16: (128, 10), 32: (128, 8), 64: (128, 6)},
    # Two programs a processor.
    RingKind.GATED: {8: (128, 3), 16: (128, 3), 32: (64, 5), 64: (128, 2)},
    RingKind.HEADS: {8: (64, 6), 16: (128, 5), 64: (64, 6)},
}
# Shares of the processors that programs must be at least and at most: of sums 128 were tried on 132 processors, of
# gate's and up's 224, of heads 96. With fewer the memory has too little to do, and more leave a second turn for few.
_PROGRAMS: dict[RingKind, tuple[float, float]] = {
    RingKind.SUM: (0.9, 1.0),
    RingKind.GATED: (1.0, 2.0),
    RingKind.HEADS: (0.7, 1.0),
}
# Shorter rows of the weight were not tried; of longer ones other tilings of gate and up and of heads were, and of more
# outputs of sums, and not rings: see `triton_tiling`.
_LEAST_INNER, _MOST_INNER, _MOST_SUMS = 4096, 8191, 8191


def choose_ring_tiling(kind: RingKind, rows: int, outputs: int, inner: int, *, processors: int) -> RingTiling | None:
    """The tiling for `rows` times a weight [outputs, inner] in 16 bits, on a device with so many `processors`. None
    where that was not tried, or is slower than what else there is."""
    block_rows = max(8, 1 << (rows - 1).bit_length())
    tried, tiles = _TRIED[kind].get(block_rows), outputs // (kind.parts * PART)
    if tried is None or outputs % (kind.parts * PART) or inner < _LEAST_INNER:
        return None
    if (outputs > _MOST_SUMS) if kind is RingKind.SUM else (inner > _MOST_INNER):
        return None
    least, most = (share * processors for share in _PROGRAMS[kind])
    splits = 1 if kind is RingKind.GATED else int(most // tiles)
    block_inner, stages = tried
    if not least <= tiles * splits <= most or inner % (splits * block_inner):
        return None
    # A ring holds no more than its program's part of the numbers.
    return RingTiling(block_rows, block_inner, splits, min(stages, inner // splits // block_inner))
