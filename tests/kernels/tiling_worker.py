"""Compiles the attention kernels for an H100 or H200, which takes no GPU, in the tilings that need most of an SM's
memory, and writes what each needs as JSON to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import compiling
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tree_kernels.attention.triton_kernels import attention_kernel
from tree_kernels.attention.triton_tiling import SPECIALISED, Tiling, choose_tiling
from tree_kernels.hopper.attention import specialised_kernel
from tree_kernels.latent_attention.triton_kernels import latent_kernel
from tree_kernels.latent_attention.triton_tiling import choose_latent_tiling

GROUP, KV_HEADS, WIDTH = 4, 8, 128
LATENT = 512
POINTERS = {
    **dict.fromkeys(("query", "key_cache", "value_cache", "cache", "output"), "*bf16"),
    **dict.fromkeys(("output_lse", "partials", "partial_lse", "sinks", "slopes"), "*fp32"),
    **dict.fromkeys(("arrivals", "page_table", "groups", "chunk_table", "totals", "depths"), "*i32"),
    "words": "*i64",
}
NUMBERS = {"scale_log2": "fp32", "query_row_stride": "i32", "query_head_stride": "i32"}


def chosen() -> Iterator[tuple[Tiling, int]]:
    """Every tiling of 128 rows and more, with the words of its masks."""
    found = set()
    for rows in (32, 64, 128, 256, 2048):
        for sequences in (1, 8, 64):
            for keys in (1024, 8192, 32768, 131072):
                for words in (1, 4):
                    sizes = {"keys": keys * sequences, "sequences": sequences, "words": words}
                    tiling = choose_tiling(
                        rows, GROUP, WIDTH, 2, kv_heads=KV_HEADS, processors=132, specialised=False, **sizes
                    )
                    if tiling.block_rows >= 128 and (rows > 64 or words == 1):
                        found.add((tiling, words))
    yield from sorted(found, key=repr)


def shared_bytes(tiling: Tiling, words: int, window: int = 0, *, slopes: bool = False, width: int = WIDTH) -> int:
    """Of one program; a negative window is of chunks."""
    constants: dict[str, Any] = {
        "GROUP": GROUP, "KV_HEADS": KV_HEADS, "D": width, "DV": width, "BLOCK_D": width, "BLOCK_DV": width,
        "PAGE_SIZE": 16, "BLOCK_M": tiling.block_rows, "BLOCK_N": tiling.block_keys, "WORDS": words, "FAR": False,
        "APART": tiling.apart, "FIXED": False, "MERGE_ROWS": tiling.merge_rows,
        "MERGE_PARTS": tiling.merge_parts(width), "WINDOW": window, "CAP": 0.0, "SINKS": False, "SLOPES": slopes,
        "LSE": True, "DEPENDENT": True,
    }  # fmt: skip
    return compiled_bytes(attention_kernel, constants, tiling)


def specialised_bytes() -> int:
    """Of one program of the warp-specialised kernel, for a cache of more than 2**31 bytes and masks of four words."""
    constants: dict[str, Any] = {
        "GROUP": GROUP, "KV_HEADS": KV_HEADS, "D": WIDTH, "PAGE_SIZE": 16, "BLOCK_N": SPECIALISED.block_keys,
        "STAGES": SPECIALISED.stages, "WORDS": 4, "FAR": True, "LSE": True,
        "DEPENDENT": True,
    }  # fmt: skip
    return compiled_bytes(specialised_kernel, constants, SPECIALISED, "*i32", leaves_registers)


def latent_bytes(tiling: Tiling, words: int, page_size: int) -> int:
    """Of one program of latent attention at DeepSeek's widths."""
    constants: dict[str, Any] = {
        "GROUP": 16, "LATENT": LATENT, "ROTARY": 64, "BLOCK_LATENT": LATENT, "BLOCK_ROTARY": 64,
        "PAGE_SIZE": page_size, "BLOCK_M": tiling.block_rows, "BLOCK_N": tiling.block_keys, "WORDS": words,
        "FAR": True, "DEPENDENT": True,
    }  # fmt: skip
    return compiled_bytes(latent_kernel, constants, tiling)


def leaves_registers(ptx: str) -> None:
    """ptxas waits for each product of a kernel that sets its warps' registers."""
    assert "wgmma" in ptx and "setmaxnreg" not in ptx


def compiled_bytes(
    kernel: Any,
    constants: dict[str, Any],
    tiling: Tiling,
    words: str = "*i64",
    check: Callable[[str], None] | None = None,
) -> int:
    """Shared memory of a program, compiled for compute capability 9.0."""
    names = kernel.arg_names
    signature = {name: (POINTERS | NUMBERS | {"words": words}).get(name, "constexpr") for name in names}
    pointers = [name for name in (*POINTERS, *list(NUMBERS)[1:]) if name in names]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": True}
    return compiling.shared_bytes(source, options, by_flags=True, check=check)


def main() -> None:
    found = {f"{tiling}, {words} words": shared_bytes(tiling, words) for tiling, words in chosen()}
    # Of two programs on an SM, of which each has half.
    wide = choose_tiling(
        1, GROUP, 256, 2, keys=640, sequences=1, kv_heads=4, processors=132, words=1, specialised=False
    )
    found["heads of 256"] = wide.programs_per_sm * shared_bytes(wide, 1, width=256)
    found["chunks"] = shared_bytes(replace(next(chosen())[0], apart=False), 1, window=-128)
    found["slopes"] = shared_bytes(next(chosen())[0], 1, slopes=True)
    found["specialised"] = specialised_bytes()
    latent = {choose_latent_tiling(rows, LATENT, 2) for rows in (1, 16, 32, 64, 256, 4096)}
    for tiling in latent:
        # Masks of four words, and an id for each key, take most.
        found[f"latent, {tiling}"] = latent_bytes(tiling, words=4, page_size=1)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
