"""Runs a script in Triton's interpreter, which here leaves out what it does for nothing: more than half of its time.

`TRITON_INTERPRET=1 python interpreted.py SCRIPT`. Results are the same bit for bit.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from triton.runtime import interpreter


def leave_out() -> None:
    # Names of Triton's own, of 3.9; another version that has others takes its time.
    if not {"interpreter_builder", "_patch_lang", "_LangPatchScope"} <= vars(interpreter).keys():
        return
    # It computes each sum and product of integers once more, in 64 bits, for an assertion that only `debug` makes.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    # It replaces the members of `triton.language` anew at each call of a function in a kernel; they may stay replaced.
    patched: Callable[[Any], Any] = functools.cache(interpreter._patch_lang)

    def patched_for_good(function: Any) -> Any:
        patched(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patched_for_good


if __name__ == "__main__":
    script = sys.argv.pop(1)
    # What `python SCRIPT` finds its neighbours by.
    sys.path[0] = str(Path(script).resolve().parent)
    leave_out()
    runpy.run_path(script, run_name="__main__")
