"""Where only shared memory is laid out, a program needs what it needs once it is compiled."""

from __future__ import annotations

import os
import subprocess

import pytest
from warm_python import shared_python

pytest.importorskip("triton")
from compiling import TARGET, laid_out_bytes
from triton.compiler import ASTSource, compile

from tree_kernels.growth.triton_backend import _keep_kernel

TYPES = {"path_probs": "*fp64", "scores": "*fp32", "items": "i32", "rows": "i32"}


@pytest.mark.parametrize(("block", "warps"), [(16, 1), (64, 4)])
def test_a_program_needs_what_was_laid_out(block: int, warps: int) -> None:
    names, blocks = _keep_kernel.arg_names, {"BLOCK": block, "BLOCK_J": block, "DEPENDENT": False}
    signature = {name: "constexpr" if name in blocks else TYPES.get(name, "*i32") for name in names}
    source = ASTSource(_keep_kernel, signature, {(names.index(name),): size for name, size in blocks.items()})
    options = {"num_warps": warps}
    needed = laid_out_bytes(source, options)
    assert needed == 4 * block
    assert needed == compile(source, target=TARGET, options=options).metadata.shared


def test_a_forked_process_has_the_variables_that_imports_set() -> None:
    """Triton warns once in a process that lacks this one, and the first test that compiles there would fail."""
    name = "TRITON_DEFAULT_FP_FUSION"
    python = [str(shared_python("interpreter") / "python"), "-c", f"import os; print(os.environ[{name!r}])"]
    without, own = ({key: value for key, value in os.environ.items() if key != name} for _ in range(2))
    own[name] = "0"
    said = [subprocess.run(python, env=one, capture_output=True, text=True, check=True) for one in (without, own)]
    assert [one.stdout for one in said] == ["1\n", "0\n"]
