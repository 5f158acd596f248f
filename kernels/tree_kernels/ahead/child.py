"""A process that compiles kernels into Triton's cache: an entry of JSON for each line of its input, and a line for each
that is done: empty, or why it could not be compiled."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def compile_entry(text: str) -> None:
    """Compile what one launch would, see `collecting.collecting`, without a device. Raises what the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    entry = json.loads(text)
    kernel, of = getattr(importlib.import_module(entry["module"]), entry["name"]), entry["specialization"]
    constants = dict(zip(map(tuple, of["constant_keys"]), map(_constant, of["constant_vals"]), strict=True))
    attributes = dict(zip(map(tuple, of["attrs_keys"]), of["attrs_vals"], strict=True))
    signature = {name: _as_tuple(value) for name, value in of["signature"].items()}
    options = {name: _as_tuple(value) for name, value in of["options"].items()}
    # Triton 3.6 makes another one where other kernels were looked at before: a launch would not find what is compiled.
    kernel.hash = entry["cache_key"]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    triton.compile(source, target=GPUTarget(*entry["target"]), options=options)


def _constant(value: Any) -> Any:
    """As `triton.runtime.jit.serialize_specialization_data` writes it."""
    import triton.language as tl

    if isinstance(value, str) and tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, Mapping) and "constexpr" in value:
        return tl.constexpr(_as_tuple(value["constexpr"]))
    return _as_tuple(value)


def _as_tuple(value: Any) -> Any:
    """JSON has lists where Triton has tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def main() -> None:
    # What is printed by libraries must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            compile_entry(line)
            answer = ""
        # Reported to the parent, which compiles it where it is launched.
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        try:
            answers.write(answer + "\n")
            answers.flush()
        except BrokenPipeError:
            # The parent has ended.
            os._exit(0)


if __name__ == "__main__":
    main()
