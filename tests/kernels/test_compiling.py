"""Where only shared memory is laid out, a program needs what it needs once it is compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from compiling import TARGET, laid_out_bytes
from triton.compiler import ASTSource, compile

from tree_kernels.growth.triton_backend import _keep_kernel

TYPES = {"path_probs": "*fp64", "scores": "*fp32", "items": "i32", "rows": "i32"}


@pytest.mark.parametrize(("block", "warps"), [(16, 1), (64, 4)])
def test_a_program_needs_what_was_laid_out(block: int, warps: int) -> None:
    names, blocks = _keep_kernel.arg_names, {"BLOCK": block, "BLOCK_J": block}
    signature = {name: "constexpr" if name in blocks else TYPES.get(name, "*i32") for name in names}
    source = ASTSource(_keep_kernel, signature, {(names.index(name),): size for name, size in blocks.items()})
    options = {"num_warps": warps}
    needed = laid_out_bytes(source, options)
    assert needed == 4 * block
    assert needed == compile(source, target=TARGET, options=options).metadata.shared
