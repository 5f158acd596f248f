"""How the attention kernel is cut for a step."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut and launched: packed rows and keys of a tile, warps, pipeline stages, programs per SM."""

    block_rows: int
    block_keys: int
    warps: int
    stages: int
    programs_per_sm: int


# Keys of a whole batch past which reading each of them once outweighs what a block of 256 rows spills.
_MANY_KEYS = 128 * 1024


def choose_tiling(packed_rows: int, width: int, itemsize: int, *, keys: int, busy: bool) -> Tiling:
    """The fastest of those tried on an H200 (`benchmarks/tree_attention.py --tune`).

    Page ids come one pipeline stage before what they point at, so that two stages buy one tile in flight.

    Args:
        packed_rows: rows times query heads per key head, of the largest sequence.
        width: of a key.
        itemsize: bytes of an element.
        keys: of all sequences.
        busy: whether there is more work than SMs, so that two programs on one hide each other's waits.
    """
    packed = max(16, triton.next_power_of_2(packed_rows))
    if itemsize > 2:
        return Tiling(min(64, packed), 32, 4, 2, 1)
    if width > 128:
        return Tiling(min(64, packed), 32, 4, 3, 1)
    if packed <= 64:
        return Tiling(packed, 64, 4, 5, 2 if busy or packed <= 32 else 1)
    if packed >= 256 and keys >= _MANY_KEYS:
        return Tiling(256, 64, 16, 5, 1)
    return Tiling(128, 128, 8, 5, 1)
