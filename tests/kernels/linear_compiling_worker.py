"""Compiles the kernels behind products for an H100 or H200, which takes no GPU, in the shapes of common models, and
writes what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tree_kernels.linear import triton_epilogues as epilogues

HALF = (
    "product", "bias", "residual", "norm_weight", "normed", "output", "cosines", "sines", "query", "key_cache",
    "value_cache",
)  # fmt: skip
SHAPES = {"smollm2": (576, 9, 3, 64, 1536), "llama": (4096, 32, 8, 128, 14336), "width 96": (3072, 32, 32, 96, 8192)}


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Name, kernel, constants and warps."""
    for name, (hidden, heads, kv_heads, width, inner) in SHAPES.items():
        for whole in (False, True):
            flags = {"HAS_BIAS": whole, "ADDS": True, "NORMS": whole}
            sizes = {"WIDTH": hidden, "BLOCK": triton.next_power_of_2(hidden)}
            yield f"add {name} {whole}", epilogues.add_epilogue_kernel, flags | sizes, 4 if hidden <= 2048 else 8
            sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "HAS_BIAS": whole}
            sizes |= {"BLOCK_HEADS": 16, "BLOCK_TURN": triton.next_power_of_2(width // 2)}
            yield f"rotary {name} {whole}", epilogues.rotary_epilogue_kernel, sizes, 4
        yield f"gated {name}", epilogues.gated_epilogue_kernel, {"OUTPUTS": inner, "BLOCK": 1024}, 4


def compiled(kernel: Any, constants: dict[str, Any], warps: int) -> int:
    """Bytes of shared memory of one program."""
    names, constants = kernel.arg_names, constants | {"DEPENDENT": True}
    types = dict.fromkeys(HALF, "*bf16") | {"slots": "*i32", "epsilon": "fp32"}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": True})
    # It waits for the launch before.
    assert "griddepcontrol.wait" in found.asm["ptx"]
    return int(found.metadata.shared)


def main() -> None:
    json.dump({name: compiled(*rest) for name, *rest in kernels()}, sys.stdout)


if __name__ == "__main__":
    main()
