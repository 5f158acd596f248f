"""Compiles sums over ranks for an H100, which takes no GPU, and writes what shared memory each needs as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tree_kernels.rank_sums.triton_kernels import add_parts_kernel

OTHERS: dict[str, Any] = {"count": "i32", "epsilon": "fp32", "post_epsilon": "fp32"}
PLAIN = {
    "RANK": 1, "LEAVES_TOGETHER": False, "POST_NORMS": False, "POST_CENTERED": False, "HAS_POST_BIAS": False,
    "MULTIPLIER": 1.0, "ADDS": True, "NORMS": True, "CENTERED": False, "HAS_NORM_BIAS": False, "DEPENDENT": True,
}  # fmt: skip
SANDWICH = {"POST_NORMS": True, "MULTIPLIER": 0.22, "CENTERED": True, "HAS_NORM_BIAS": True}
ALONE = {"LEAVES_TOGETHER": True, "ADDS": False, "NORMS": False}
CASES = {"two ranks": (2, 4096, {}), "four ranks": (4, 8192, ALONE), "other forms": (2, 2880, SANDWICH)}


def compiled(ranks: int, width: int, more: dict[str, Any]) -> int:
    """Bytes of shared memory of one program."""
    constants = PLAIN | more | {"RANKS": ranks, "WIDTH": width, "BLOCK": 1 << (width - 1).bit_length()}
    names = add_parts_kernel.arg_names
    types = OTHERS | {"parts": ("*bf16",) * ranks, "signals": ("*i32",) * ranks}
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name] == "*bf16"}
    attributes |= {(names.index("parts"), rank): [["tt.divisibility", 16]] for rank in range(ranks)}
    source = ASTSource(
        add_parts_kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert "ld.global.v4" in found.asm["ptx"] and "acquire" in found.asm["ptx"]
    return int(found.metadata.shared)


def main() -> None:
    json.dump({name: compiled(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
