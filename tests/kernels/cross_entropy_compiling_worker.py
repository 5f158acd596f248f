"""Compiles the kernel of the loss for an H100 or H200, which takes no GPU, and writes its shared memory as JSON."""

from __future__ import annotations

import json
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tree_kernels.cross_entropy import triton_backend

INTEGERS = {"vocabulary": "i32", "logits_stride": "i32", "probs_stride": "i32"}


def shared_memory(dtype: str, *, gradient: bool) -> int:
    """Bytes that a program takes."""
    pointers = {"logits": f"*{dtype}", "probs": f"*{dtype}", "distributions": "*i64", "weights": "*fp32"}
    types = pointers | {"losses": "*fp32"} | INTEGERS | {"GRADIENT": "constexpr", "BLOCK": "constexpr"}
    constants = {"GRADIENT": gradient, "BLOCK": triton_backend._BLOCK}
    source = ASTSource(triton_backend._row_kernel, types, constants)
    options = {"num_warps": triton_backend._WARPS}
    return int(compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)


if __name__ == "__main__":
    cases = [(dtype, gradient) for dtype in ("bf16", "fp32") for gradient in (False, True)]
    json.dump({f"{dtype} {gradient}": shared_memory(dtype, gradient=gradient) for dtype, gradient in cases}, sys.stdout)
