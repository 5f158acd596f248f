"""How the latent-attention kernel is cut for a step.

The choices follow from sizes, and from what the compiler reports for an sm_90 target (shared memory, registers, spills;
`tests/kernels/test_tiling.py` holds the first). Of some sixteen that a Hopper GPU has room for they were the fastest or
nearly so in a sweep on an H200 (`benchmarks/kernels/latent_attention.py --sweep`; its table was not kept).
"""

from __future__ import annotations

import triton

from tree_kernels.attention.triton_tiling import Tiling


def choose_latent_tiling(packed_rows: int, latent: int, itemsize: int) -> Tiling:
    """The tiling of a step, made for DeepSeek's 512 + 64 in 16 bits.

    All heads of all rows of a sequence are packed into the rows of a tile, so that a latent is read once for all of
    them; a tile of latents is key and value in one, and lies in shared memory once.

    - Up to 16 packed rows attention is bound by reading: 1,152 bytes a key against 35 kFLOP. One program with tiles of
      64 keys is faster than two on an SM with tiles of half the size, in all but the longest batches, and leaves half
      as many partials to merge.
    - From 64 on, a tile of 64 rows fills a warpgroup's instructions. Its output is 64 x 512 in fp32, 128 registers of
      each of 256 threads, and queries (72 KB), two tiles of 64 keys (144 KB) and weights (8 KB) take 224 of the SM's
      227 KB: one program, and taller tiles would spill in the loop (as compiled, it reads back four words a tile).
      More rows are more blocks, which find the latents in L2.

    `packed_rows` are rows times query heads, of the largest sequence, and `itemsize` bytes of an element.
    """
    # Wider latents leave no room for a second tile beside the first.
    if itemsize > 2 or latent > 512:
        return Tiling(16, 16, 4, 2, 1)
    packed = max(16, triton.next_power_of_2(packed_rows))
    if packed == 16:
        return Tiling(16, 64, 8, 5, 1)
    # Packed rows that a warpgroup's matrix unit takes at a time.
    if packed < 64:
        return Tiling(32, 64, 8, 3, 1)
    return Tiling(64, 64, 8, 2, 1)
