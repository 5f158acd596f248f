"""Compiles the experts' kernels for an H100 or H200, which takes no GPU, in the shape of Qwen3-30B-A3B, and writes
what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from compiling import few, shared_bytes
from examples import is_full
from triton.compiler import ASTSource

from tree_kernels.experts import triton_kernels, triton_routing, triton_vectors
from tree_kernels.experts.triton_tiling import (
    MAX_PAIRS,
    ROUTER_VECTORS,
    choose_expert_tilings,
    choose_expert_vectors,
)

HALF = (
    "rows",
    "weight",
    "following",
    "output",
    "residual",
    "norm_weight",
    "norm_bias",
    "scaled",
    "normed",
    "right",
    "inputs",
    "bias",
)
OTHERS = {
    "squares": "*fp32", "correction": "*fp32", "partials": "*fp32", "counters": "*i32", "experts": "*i32",
    "weights": "*fp32", "order": "*i32", "sizes": "*i32", "parameters": "*fp32", "parts": "*fp32", "epsilon": "fp32",
    "least_sum": "fp32", "clamped_sum": "fp32", "scaling": "fp32", "count": "i32", "pairs": "i32", "capacity": "i32",
    "row_stride": "i32", "shares": "*fp32", "logits": "*fp32", "present": "*i32",
}  # fmt: skip
# Hidden size, width of an expert, experts, experts of a row.
SHAPES = {"qwen3": (2048, 768, 128, 8), "gpt_oss": (2880, 2880, 32, 4)}
# What the kernels are compiled for beside sizes.
GATES = {
    "qwen3": {
        "ACTIVATION": "silu",
        "LIMIT": 0.0,
        "LIMITS_ACTIVATED": False,
        "OFFSET": 0.0,
        "GATED": True,
        "HAS_BIAS": False,
    },
    "gpt_oss": {
        "ACTIVATION": "quick_gelu",
        "LIMIT": 7.0,
        "LIMITS_ACTIVATED": False,
        "OFFSET": 1.0,
        "GATED": True,
        "HAS_BIAS": True,
    },
}


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Name, kernel, constants and options."""
    parts = {"PARTS": 64, "BLOCK_PARTS": 64}
    for name, (hidden, inner, experts, top_k) in SHAPES.items():
        yield from vector_kernels(name, hidden, inner, experts, top_k)
        for rows in (5, 8, 64, 256):
            tilings = choose_expert_tilings(rows, top_k, experts, hidden, inner)
            pairs = rows * top_k
            listed = triton.next_power_of_2(pairs) if pairs <= MAX_PAIRS else 0
            gated = {"OUTPUTS": inner, "INNER": hidden, "TOP_K": top_k, "PIECE": 1024} | parts | GATES[name]
            down = {"OUTPUTS": hidden, "INNER": inner, "HAS_BIAS": GATES[name]["HAS_BIAS"]}
            for kind, kernel, own, tiling in (
                ("gated", triton_kernels.expert_gated_kernel, gated, tilings.gated),
                ("down", triton_kernels.expert_down_kernel, down, tilings.down),
            ):
                sizes = {"PAIRS": listed, "BLOCK_M": tiling.block_rows, "BLOCK_N": tiling.block_outputs}
                sizes |= {"BLOCK_K": tiling.block_inner}
                options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
                yield f"{kind} {name} {rows}", kernel, sizes | own, options
    common = {"INNER": 2048, "TOP_K": 8, "BLOCK_TOP_K": 8, "RENORMALISES": True, "ROUNDS": True, "SPLITS": 8}
    common |= parts | {"BLOCK_N": 16, "BLOCK_K": 128, "AHEAD": 4}
    for rows in (8, 16):
        own = {"EXPERTS": 128, "BLOCK_E": 128, "TILES": 8, "BLOCK_M": rows, "SIGMOID": False, "CORRECTS": False}
        own |= {"GROUPS": 1, "TOP_GROUPS": 1, "TOP2": False, "HAS_BIAS": False, "PADDED": True}
        yield f"route {rows}", triton_routing.route_kernel, common | own, {"num_warps": 4, "num_stages": 4}
    own |= {"EXPERTS": 256, "BLOCK_E": 256, "TILES": 16, "SIGMOID": True, "CORRECTS": True, "GROUPS": 8}
    own |= {"TOP_GROUPS": 4, "TOP2": True}
    yield "route groups in fp32", triton_routing.route_kernel, common | own, {"num_warps": 4, "num_stages": 4}
    yield "order", triton_routing.order_kernel, {"BLOCK": 1024}, {"num_warps": 4}
    sizes = {"TOP_K": 8, "MULTIPLIER": 1.0, "ADDS": True, "WIDTH": 2048, "BLOCK": 2048, "HAS_NORM_BIAS": False}
    for norms, centered in ((False, False), (True, False), (True, True)):
        own = {"NORMS": norms, "CENTERED": centered}
        yield f"combine {norms} {centered}", triton_kernels.combine_kernel, sizes | own, {"num_warps": 4}


def vector_kernels(
    name: str, hidden: int, inner: int, experts: int, top_k: int
) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Of one row. The last product's loop over an expert's inner size is unrolled: of gpt-oss's, it takes five times as
    long to compile as of a size that has every other constant too, and needs as much shared memory."""
    if not is_full():
        inner = min(inner, SHAPES["qwen3"][1])
    tilings, parts = choose_expert_vectors(1, hidden, inner, itemsize=2), {"PARTS": 512, "BLOCK_PARTS": 512}
    assert tilings is not None
    biased = {"HAS_BIAS": GATES[name]["HAS_BIAS"]}
    down = biased | {
        "OUTPUTS": hidden,
        "INNER": inner,
        "BLOCK_E": top_k,
        "MULTIPLIER": 1.0,
        "ADDS": True,
        "SCALES": True,
    }
    route = {"INNER": hidden, "EXPERTS": experts, "BLOCK_E": experts, "BLOCK_TOP_K": top_k, "SIGMOID": False}
    route |= {"CORRECTS": False, "GROUPS": 1, "TOP_GROUPS": 1, "TOP2": False, "RENORMALISES": True, "ROUNDS": False}
    route |= biased | {"PADDED": True, "TILES": experts // ROUTER_VECTORS.block_outputs} | parts
    gated = {"OUTPUTS": inner, "INNER": hidden} | parts | GATES[name]
    for kind, kernel, own, tiling in (
        ("gated", triton_vectors.expert_gated_vector_kernel, gated, tilings.gated),
        ("down", triton_vectors.expert_down_vector_kernel, down, tilings.down),
        ("route", triton_routing.route_vector_kernel, route, ROUTER_VECTORS),
    ):
        sizes = {"TOP_K": top_k, "BLOCK_N": tiling.block_outputs, "BLOCK_T": tiling.block_inner}
        sizes |= {} if kind == "down" else {"CHUNKS": tiling.chunks}
        yield f"vectors {kind} {name}", kernel, sizes | own, {"num_warps": tiling.warps}


def compiled(name: str, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> int:
    """Bytes of shared memory of one program."""
    names, constants = kernel.arg_names, constants | {"DEPENDENT": True}
    types = dict.fromkeys(HALF, "*bf16") | OTHERS
    if name.startswith("down"):
        types["output"] = "*fp32"
    if name.endswith("fp32"):
        types["weight"] = "*fp32"
    signature = {each: "constexpr" if each in constants else types[each] for each in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, each in enumerate(names)
        if (signature[each].startswith("*") and each != "present") or each == "row_stride"
    }
    source = ASTSource(kernel, signature, {(names.index(each),): value for each, value in constants.items()}, aligned)

    def check(ptx: str) -> None:
        assert "griddepcontrol.wait" in ptx
        # Blocks of weights are in flight while others are multiplied.
        assert ("cp.async.cg" in ptx) == name.startswith(("gated", "down", "route"))

    return shared_bytes(source, options | {"launch_pdl": True}, check=check)


def main() -> None:
    json.dump({one[0]: compiled(*one) for one in few(kernels())}, sys.stdout)


if __name__ == "__main__":
    main()
