"""What kernels of conditional launches ask; see `tree_kernels.conditional_launch`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_wanted(condition):  # type: ignore[no-untyped-def]
    """Whether a `CONDITIONAL` launch has to do anything. From the L2 cache: another processor wrote it."""
    return tl.load(condition, cache_modifier=".cg") > 0
