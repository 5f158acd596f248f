"""Compiles the kernels behind products, and those with weights in int8, for an H100 or H200, which takes no GPU,
in the shapes of common models, and writes what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import triton
from compiling import few, shared_bytes
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from tree_kernels.hopper import products as rings
from tree_kernels.hopper.ring_tiling import PART, RingKind, choose_ring_tiling
from tree_kernels.linear import triton_epilogues as epilogues
from tree_kernels.linear import triton_kernels as few_rows
from tree_kernels.linear import triton_vectors as one_row
from tree_kernels.linear.triton_tiling import (
    choose_linear_tiling,
    choose_mapped_tiling,
    choose_vector_tiling,
    whole_head_tiling,
)

HALF = (
    "product", "rows", "scaled", "bias", "residual", "norm_weight", "normed", "output", "cosines", "sines",
    "query", "key_cache", "row", "value_cache", "norm_bias", "post_weight", "post_bias", "query_norm", "key_norm",
)  # fmt: skip
OTHERS = {
    "slots": "*i32", "condition": "*i32", "counters": "*i32", "weight": "*i16", "row_scales": "*fp32",
    "squares": "*fp32", "partials": "*fp32", "epsilon": "fp32", "count": "i32", "row_stride": "i32",
    "rows_map": "*i16", "weight_map": "*i16", "parameters": "*fp32", "post_epsilon": "fp32",
    "query_epsilon": "fp32", "key_epsilon": "fp32",
}  # fmt: skip
# Llama's form.
PLAIN: dict[str, Any] = {
    "MULTIPLIER": 1.0, "POST_NORMS": False, "POST_CENTERED": False, "HAS_POST_BIAS": False, "CENTERED": False,
    "HAS_NORM_BIAS": False, "HAS_BIAS": False, "GATED": True, "ACTIVATION": "silu", "INTERLEAVED": False, "PARTS": 0,
    "VALUE_EPSILON": 0.0,
    "BLOCK_PARTS": 1, "INNER": 1, "NORMS": False, "CONDITIONAL": False,
}  # fmt: skip
SHAPES = {"smollm2": (576, 9, 3, 64, 1536), "llama": (4096, 32, 8, 128, 14336), "width 96": (3072, 32, 32, 96, 8192)}


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Name, kernel, constants and options."""
    seen: set[str] = set()
    for name, (hidden, heads, kv_heads, width, inner) in SHAPES.items():
        four = {"num_warps": 4}
        for whole in (False, True):
            flags = {"HAS_BIAS": whole, "ADDS": True, "NORMS": whole}
            sizes = {"WIDTH": hidden, "BLOCK": triton.next_power_of_2(hidden)}
            warps = {"num_warps": 4 if hidden <= 2048 else 8}
            yield f"add {name} {whole}", epilogues.add_epilogue_kernel, flags | sizes, warps
            sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "HAS_BIAS": whole}
            sizes |= {"BLOCK_HEADS": 16, "BLOCK_HALF": triton.next_power_of_2(width // 2)}
            sizes |= {"ROTARY": width, "NORMS": "heads" if whole else "none"}
            yield f"rotary {name} {whole}", epilogues.rotary_epilogue_kernel, sizes, four
        sizes["HEADS"] = 0
        yield f"rotary {name} without queries", epilogues.rotary_epilogue_kernel, sizes, four
        sizes |= {
            "HEADS": heads,
            "ROTARY": width // 2,
            "INTERLEAVED": True,
            "NORMS": "all",
            "PARTS": 4,
            "BLOCK_PARTS": 4,
        }
        yield f"rotary {name} otherwise", epilogues.rotary_epilogue_kernel, sizes, four
        sizes = {"ADDS": True, "NORMS": True, "CENTERED": True, "HAS_NORM_BIAS": True, "POST_NORMS": True}
        sizes |= {"MULTIPLIER": 0.22, "WIDTH": hidden, "BLOCK": triton.next_power_of_2(hidden)}
        yield f"add {name} otherwise", epilogues.add_epilogue_kernel, sizes, warps
        yield f"gated {name}", epilogues.gated_epilogue_kernel, {"OUTPUTS": inner, "BLOCK": 1024}, four
        for rows in (8, 16, 32, 64):
            yield from new(int8_kernels(f"int8 {name} {rows}", rows, hidden, heads, kv_heads, width, inner), seen)
        if hidden >= 2048:
            yield from new(mapped_kernels(f"mapped {name}", hidden, inner, heads, kv_heads, width), seen)
    # Of one of two ranks.
    yield from new(mapped_kernels("mapped half of llama 70b", 8192, 14336, 32, 4, 128), seen)
    yield from form_kernels()
    yield from vector_kernels()


def new(
    found: Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]], seen: set[str]
) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Those that differ from all before in more than lengths: blocks that divide these alike make the same code."""
    for name, kernel, constants, options in found:
        own = {key: value for key, value in constants.items() if key not in ("OUTPUTS", "INNER")}
        own["whole"] = constants["INNER"] % (constants["SPLITS"] * constants["BLOCK_K"]) == 0
        own["inside"] = constants.get("OUTPUTS", 0) % constants["BLOCK_N"] == 0
        key = repr((kernel.__name__, sorted(own.items()), sorted(options.items())))
        if key not in seen:
            seen.add(key)
            yield name, kernel, constants, options


def int8_kernels(
    name: str, rows: int, hidden: int, heads: int, kv_heads: int, width: int, inner: int
) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """A layer's three, in the tilings that so many rows get."""
    parts = {"PARTS": 4, "BLOCK_PARTS": 4}
    heads_of = {"HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "HAS_BIAS": True, "ROTARY": width}
    for kind, kernel, outputs, numbers, more in (
        ("add", few_rows.add_kernel, hidden, inner, {"HAS_BIAS": True, "ADDS": True, "SCALES": True}),
        ("gated", few_rows.activated_kernel, 2 * inner, hidden, parts),
        ("rotary", few_rows.rotary_kernel, (heads + 2 * kv_heads) * width, 2 * hidden, parts | heads_of),
    ):
        tiling = choose_linear_tiling(rows, outputs, numbers, int8=True)
        block_outputs = tiling.block_outputs if kind != "rotary" else math.gcd(width, tiling.block_outputs)
        sizes = {
            "BLOCK_M": tiling.block_rows,
            "BLOCK_N": block_outputs,
            "BLOCK_K": tiling.block_inner,
            "SPLITS": tiling.splits if numbers % (tiling.splits * tiling.block_inner) == 0 else 1,
            "AHEAD": tiling.ahead,
        }
        # Of few rows as in the levels of a tree, which may be left out.
        sizes |= {"INT8": True, "INNER": numbers, "MAPPED": False, "CONDITIONAL": rows == 8}
        if kind != "rotary":
            sizes["OUTPUTS"] = outputs // 2 if kind == "gated" else outputs
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        yield f"{name} {kind}", kernel, sizes | more, options


def form_kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Of few rows, what Llama's layers do not have: norms of heads, part of a head rotated, other activations."""
    heads = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "PARTS": 64, "BLOCK_PARTS": 64, "INT8": False, "MAPPED": False}
    for rows in (8, 64):
        tiling = whole_head_tiling(choose_linear_tiling(rows, 6144, 4096), 128, 6144, 4096)
        sizes = {"BLOCK_M": tiling.block_rows, "BLOCK_N": 128, "BLOCK_K": tiling.block_inner, "INNER": 4096}
        sizes |= {"SPLITS": tiling.splits, "AHEAD": tiling.ahead, "NORMS": True, "ROTARY": 128}
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        yield f"normed heads {rows}", few_rows.rotary_kernel, heads | sizes, options
    # Keys and values alone, of a head whose rows are read and not attended from.
    yield "no queries", few_rows.rotary_kernel, heads | sizes | {"HEADS": 0}, options
    sizes |= {"NORMS": False, "ROTARY": 64, "INTERLEAVED": True, "HAS_BIAS": True, "BLOCK_N": 64}
    yield "partly rotated heads", few_rows.rotary_kernel, heads | sizes, options
    # Gemma 4's, with keys and without.
    sizes |= {"INTERLEAVED": False, "ROTARY": 256, "NORMS": True, "WIDTH": 256, "BLOCK_N": 256, "BLOCK_K": 64}
    for kv_heads in (4, 0):
        own = {"HEADS": 8, "KV_HEADS": kv_heads, "VALUE_EPSILON": 1e-6}
        yield f"normed values, {kv_heads} key heads", few_rows.rotary_kernel, heads | sizes | own, options
    for kind in ("gelu", "xielu", "sigmoid"):
        sizes = {"BLOCK_M": 8, "BLOCK_N": 64, "BLOCK_K": 128, "INNER": 4096, "SPLITS": 1, "AHEAD": 8, "OUTPUTS": 12288}
        sizes |= {"PARTS": 0, "MAPPED": False, "INT8": False, "HAS_BIAS": True}
        options = {"num_warps": 4, "num_stages": 4}
        yield kind, few_rows.activated_kernel, sizes | {"ACTIVATION": kind, "GATED": False}, options


def vector_kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Of one row of Qwen3-8B's shape."""
    heads = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "ROTARY": 128, "NORMS": True}
    parts = {"PARTS": 1024, "BLOCK_PARTS": 1024}
    for kind, kernel, outputs, inner, more in (
        ("add", one_row.add_vector_kernel, 4096, 12288, {"ADDS": True, "SCALES": True}),
        ("gated", one_row.activated_vector_kernel, 24576, 4096, parts),
        ("rotary", one_row.rotary_vector_kernel, 6144, 4096, parts | heads),
    ):
        tiling = choose_vector_tiling(outputs, inner, itemsize=2, gated=kind == "gated", scaled=kind == "add")
        assert tiling is not None
        sizes = {"INNER": inner, "BLOCK_N": tiling.block_outputs, "CHUNKS": tiling.chunks}
        sizes |= {"BLOCK_T": tiling.block_inner}
        sizes |= {} if kind == "rotary" else {"OUTPUTS": outputs // (2 if kind == "gated" else 1)}
        yield f"vectors {kind}", kernel, sizes | more, {"num_warps": tiling.warps}


def mapped_kernels(
    name: str, hidden: int, inner: int, heads: int, kv_heads: int, width: int
) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """Those that read by tensor maps."""
    heads_of = {"HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "ROTARY": width, "NORMS": True}
    kinds = (
        ("add", few_rows.add_kernel, hidden, inner, {"HAS_BIAS": True, "ADDS": True, "SCALES": True}),
        ("gated", few_rows.activated_kernel, 2 * inner, hidden, {"PARTS": 4, "BLOCK_PARTS": 4}),
        ("heads", few_rows.rotary_kernel, (heads + 2 * kv_heads) * width, hidden, heads_of),
    )
    for rows, (kind, kernel, outputs, numbers, more) in itertools.product((16, 32, 64, 128), kinds):
        of_heads = width if kind == "heads" else None
        tiling = choose_mapped_tiling(rows, outputs, numbers, gated=kind == "gated", head_width=of_heads)
        if tiling is None:
            continue
        sizes = {"BLOCK_M": rows, "BLOCK_N": tiling.block_outputs, "BLOCK_K": tiling.block_inner}
        sizes |= {"SPLITS": tiling.splits, "AHEAD": tiling.ahead}
        sizes |= {"INT8": False, "INNER": numbers, "MAPPED": True}
        if kind != "heads":
            sizes["OUTPUTS"] = outputs // 2 if kind == "gated" else outputs
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        yield f"{name} {rows} {kind}", kernel, sizes | more, options


def ring_bytes() -> Iterator[tuple[str, int]]:
    """Shared memory of a ring of weights, where it is the most at Llama 8B's shape, with all that a family may have."""
    flags = {"HAS_BIAS": True, "ADDS": True, "SCALES": True, "NORMS": True, "MULTIPLIER": 0.22, "ACTIVATION": "silu"}
    flags |= {"SUMS": 64, "BLOCK_SUMS": 64, "HEADS": 32, "KV_HEADS": 8}
    types = dict.fromkeys(HALF, "*bf16") | OTHERS
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    for kind, kernel, rows, outputs, inner in (
        (RingKind.SUM, rings.ring_add_kernel, 64, 4096, 14336),
        (RingKind.GATED, rings.ring_activated_kernel, 16, 28672, 4096),
        (RingKind.HEADS, rings.ring_rotary_kernel, 16, 6144, 4096),
    ):
        tiling = choose_ring_tiling(kind, rows, outputs, inner, processors=132)
        assert tiling is not None
        own = {"OUTPUTS": outputs // 2 if kind is RingKind.GATED else outputs, "INNER": inner}
        own |= {"SPLITS": tiling.splits, "BLOCK_M": rows, "BLOCK_K": tiling.block_inner, "STAGES": tiling.stages}
        names, maps = kernel.arg_names, {"rows_map": rows, "weight_map": PART}
        constants = {(names.index(key),): value for key, value in (flags | own).items() if key in names}
        described = {one: f"tensordesc<bf16[{size},{tiling.block_inner}],{layout!r}>" for one, size in maps.items()}
        signature = {
            name: "constexpr" if (at,) in constants else (types | described)[name] for at, name in enumerate(names)
        }
        aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] == "*"}
        source = GluonASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": 4, "launch_pdl": True}
        # Two programs of gate and up share a processor's memory.
        programs = 2 if kind is RingKind.GATED else 1
        yield f"ring {kind}", programs * shared_bytes(source, options, by_flags=True, check=is_ring)


def is_ring(ptx: str) -> None:
    """Blocks are read by tensor maps and multiplied by a warpgroup, whose registers stay as they are."""
    assert "cp.async.bulk.tensor" in ptx and "wgmma.mma_async" in ptx and "griddepcontrol.wait" in ptx
    assert "setmaxnreg" not in ptx


def compiled(name: str, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> int:
    """Bytes of shared memory of one program."""
    names = kernel.arg_names
    constants = {each: value for each, value in (PLAIN | constants).items() if each in names} | {"DEPENDENT": True}
    types = dict.fromkeys(HALF, "*bf16") | OTHERS
    if name.startswith("mapped"):
        outputs = constants["BLOCK_N"] // (2 if name.endswith("gated") else 1)
        blocks = {"rows_map": constants["BLOCK_M"], "weight_map": outputs}
        types |= {each: f"tensordesc<bf16[{size},{constants['BLOCK_K']}]>" for each, size in blocks.items()}
        types["weight"] = "*bf16"
    if not name.startswith("int8"):
        types["weight"] = "*bf16"
    if name.startswith("vectors"):
        types["product"] = "*fp32"
    signature = {each: "constexpr" if each in constants else types[each] for each in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, each in enumerate(names)
        if signature[each].startswith("*") or each == "row_stride"
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)

    def check(ptx: str) -> None:
        # It waits for the launch before, and takes words apart on their way from shared memory to the matrix units.
        assert "griddepcontrol.wait" in ptx
        if name.startswith("vectors"):
            # The first weights are in flight before it waits, 16 bytes a thread.
            assert ".v4.b32" in ptx.partition("griddepcontrol.wait")[0]
        assert ("min.bf16x2" in ptx) == name.startswith("int8")
        assert ("cp.async.bulk.tensor" in ptx) == name.startswith("mapped")

    # What is checked differs by these.
    kind = name.partition(" ")[0] if name.startswith(("int8", "mapped")) else ""
    return shared_bytes(source, options | {"launch_pdl": True}, kind=kind, check=check)


def main() -> None:
    json.dump({one[0]: compiled(*one) for one in few(kernels())} | dict(ring_bytes()), sys.stdout)


if __name__ == "__main__":
    main()
