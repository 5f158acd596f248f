"""How the kernels for a single row cut their work."""

from __future__ import annotations

from dataclasses import dataclass

# Shorter rows are left to the matrix units' kernels, whose tilings were measured for them.
MIN_INNER = 2048


@dataclass(frozen=True, slots=True)
class VectorTiling:
    """Sizes of one program's blocks."""

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
