"""Compiles the kernels that grow trees for an H100 or H200, which takes no GPU, in the shapes of common drafters, and
writes what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from compiling import few, shared_bytes
from triton.compiler import ASTSource

from tree_kernels.growth import triton_backend as _triton_growth
from tree_kernels.growth import triton_children as _triton_children

POINTERS = {
    **dict.fromkeys(("numbers", "item_scores"), "*fp32"),
    **dict.fromkeys(("temperatures", "values"), "*fp32"),
    **dict.fromkeys(("item_path_probs", "path_probs", "frontier_path_probs", "next_path_probs"), "*fp64"),
    **dict.fromkeys(("top_p", "min_p"), "*fp64"),
    **dict.fromkeys(("sources", "seeds", "positions", "records"), "*i64"),
    **dict.fromkeys(("sharpness", "floor"), "fp32"),
    **dict.fromkeys(
        ("item_tokens", "item_parents", "frontier", "next_frontier", "next_tokens", "tokens", "parents", "limits",
         "tail_parents", "token_ids", "condition", "worth", "places", "coupled", "top_k", "kept"), "*i32",
    ),
    "logits": "*bf16",
}  # fmt: skip
# Where a name means another type than above: what a race is given, and scores before and after they are kept.
GUMBEL_MAX = {"values": "*bf16", "places": "*i64", "scores": "*fp64"}

# As on Hopper, where launches wait by themselves.
SCAN = {"CHUNK": 1024, "CONDITIONAL": True, "DEPENDENT": True}


def kernels() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """Name, kernel, types of its own, constants and warps."""
    for width, chunks, vocabulary in ((4, 32, 32000), (8, 32, 32000), (10, 126, 128256), (32, 126, 128256)):
        name = f"width {width}, {vocabulary} tokens"
        block_chunks, best = 1 << (chunks - 1).bit_length(), 1 << (chunks * width - 1).bit_length()
        block_width = 1 << (width - 1).bit_length()
        scan = SCAN | {"BEST": width, "BLOCK_BEST": block_width}
        yield f"scan, {name}", _triton_children._scan_kernel, {}, scan, 4
        mapped = {"WIDTH": width, "MAPPED": True, "CONDITIONAL": True, "BLOCK_CHUNKS": block_chunks}
        likeliest = mapped | {"BLOCK": best, "BLOCK_WIDTH": block_width, "DEPENDENT": True}
        yield f"likeliest, {name}", _triton_children._likeliest_kernel, {"scores": "*fp64"}, likeliest, 4
        # Of a race the width is but how often a loop goes round: the widest has the code of the others of its chunks.
        for entrants, sharp in ((128, True), (2048, False)) if width in (8, 32) else ():
            gumbel_max = mapped | {"BLOCK": entrants, "SHARP": sharp}
            yield f"race of {entrants}, {name}", _triton_children._gumbel_max_kernel, GUMBEL_MAX, gumbel_max, 4
    yield "scan for a race", _triton_children._scan_kernel, {}, SCAN | {"BEST": 0, "BLOCK_BEST": 1}, 4
    for width, breadth in ((1, 1), (4, 4), (10, 10), (2, 8), (24, 8)):
        for places, deep, last in ((1, False, False), (width, True, False), (width, True, True)):
            constants = {
                "PLACES": places,
                "WIDTH": width,
                "BREADTH": breadth,
                "LAST": last,
                "DEEP": deep,
                "WEIGHED": True,
            }
            rivals = 16 if width == breadth == 1 else 256
            constants |= {"BLOCK": 16, "BLOCK_J": rivals, "BLOCK_W": 1 << (width - 1).bit_length(), "DEPENDENT": True}
            warps = 4 if rivals > 16 else 1
            name = f"grow {places} of {width} x {breadth}, {deep} {last}"
            yield name, _triton_growth._grow_kernel, {"scores": "*fp64"}, constants, warps
    for rivals, warps in ((16, 1), (256, 4)):
        yield (
            f"keep, {rivals} at a time",
            _triton_growth._keep_kernel,
            {"scores": "*fp32"},
            {"BLOCK": 16, "BLOCK_J": rivals, "DEPENDENT": True},
            warps,
        )


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> int:
    """Bytes of shared memory of one program."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else (POINTERS | types).get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return shared_bytes(source, {"num_warps": warps})


def main() -> None:
    json.dump({name: compiled(*rest) for name, *rest in few(kernels())}, sys.stdout)


if __name__ == "__main__":
    main()
