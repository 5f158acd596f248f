"""Compiles the attention of a level for an H100 or H200, which takes no GPU, and writes what shared memory each tiling
needs as JSON to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from compiling import few, shared_bytes
from triton.compiler import ASTSource

from tree_kernels.level_attention.triton_backend import tiling_of
from tree_kernels.level_attention.triton_kernels import level_kernel

POINTERS = {
    **dict.fromkeys(("partials", "partial_lse", "sinks"), "*fp32"),
    **dict.fromkeys(
        ("arrivals", "query_starts", "prefix_lengths", "page_starts", "page_table", "parents"), "*i32"
    ),
    **dict.fromkeys(("tail", "first_row", "depth", "query_row_stride", "query_head_stride"), "i32"),
    "scale_log2": "fp32",
}  # fmt: skip
KV_HEADS = 8


def kernels() -> Iterator[tuple[str, Any, str, dict[str, Any], dict[str, int]]]:
    """Name, kernel, type of numbers, constants and options."""
    for rows, group, width, kind, capped in (
        (8, 4, 128, "bf16", False), (1, 4, 128, "bf16", False), (8, 8, 128, "bf16", True), (2, 4, 64, "bf16", False),
        (8, 4, 256, "bf16", False), (8, 8, 128, "fp32", False),
    ):  # fmt: skip
        tiling = tiling_of(rows * group, width, 4 if kind == "fp32" else 2)
        constants: dict[str, Any] = {
            "ROWS": rows, "GROUP": group, "KV_HEADS": KV_HEADS, "D": width, "DV": width, "BLOCK_D": width,
            "BLOCK_DV": width, "PAGE_SIZE": 16, "BLOCK_M": tiling.block_rows, "BLOCK_N": tiling.block_keys,
            "LEAST_TILES": 4, "FAR": capped, "CAP": 30.0 if capped else 0.0, "SINKS": capped,
            "MERGE_ROWS": tiling.merge_rows, "MERGE_PARTS": tiling.merge_parts(width), "EARLY": True,
        }  # fmt: skip
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        yield f"{rows} x {group} rows, {width} {kind}", level_kernel, kind, constants, options


def compiled(kernel: Any, kind: str, constants: dict[str, Any], options: dict[str, int]) -> int:
    """Bytes of shared memory of one program."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, f"*{kind}") for name in names}
    numbers = ("query", "key_cache", "value_cache", "output", "partials", "query_row_stride", "query_head_stride")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in numbers}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    return shared_bytes(source, {**options, "launch_pdl": True})


def main() -> None:
    json.dump({name: compiled(*rest) for name, *rest in few(kernels())}, sys.stdout)


if __name__ == "__main__":
    main()
