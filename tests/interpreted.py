"""Runs a script in Triton's interpreter, which here leaves out what it does for nothing: three quarters of its time.

`TRITON_INTERPRET=1 python interpreted.py SCRIPT`. Results are the same bit for bit.
"""

from __future__ import annotations

import functools
import gc
import math
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from triton.language import core
from triton.runtime import interpreter

# Names of Triton's own, of 3.9; another version that has others takes its time.
_OF_INTERPRETER = {"interpreter_builder", "interpreter_semantic", "_patch_attr", "_patch_lang", "_LangPatchScope"}
_OF_INTERPRETER |= {"_get_np_dtype"}


def leave_out() -> None:
    """Change Triton for the rest of this process."""
    if not vars(interpreter).keys() >= _OF_INTERPRETER:
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
    interpreter._patch_attr = _patch_attr
    _remember_types()
    _compare_types_at_once()


def _patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """As Triton's, but for a copy of the arguments' names at each call."""
    semantic = interpreter.interpreter_semantic

    def called(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*args, **named)

    scope.set_attr(owner, name, called)


def _remember_types() -> None:
    """Types and shapes are worked out once, and not for every tensor: a kernel makes millions, of a few shapes."""
    np_type, numpy_types = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(dtype: Any) -> Any:
        found = numpy_types.get(dtype.name)
        if found is None:
            found = numpy_types[dtype.name] = np_type(dtype)
        return found

    interpreter._get_np_dtype = numpy_type
    make_block, blocks = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape.values if type(shape) is core.tuple else shape)
        if any(type(size) is not int for size in sizes):
            make_block(self, element_ty, shape)
            return
        key = element_ty.name, sizes
        found = blocks.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        else:
            vars(self).update(found)
            self.element_ty = element_ty

    core.block_type.__init__ = block

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape.values) if type.is_block() else ())

    core.tensor.__init__ = tensor


def _compare_types_at_once() -> None:
    """A type that is compared is mostly the very one, and what may be a constant mostly no list of such."""
    unwrap, equal, equal_blocks = core._unwrap_if_constexpr, core.dtype.__eq__, core.block_type.__eq__
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrapped
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.block_type.__eq__ = lambda self, other: self is other or equal_blocks(self, other)


if __name__ == "__main__":
    script = sys.argv.pop(1)
    # What `python SCRIPT` finds its neighbours by.
    sys.path[0] = str(Path(script).resolve().parent)
    # Nothing here is garbage but by its count: what libraries leave lives on, and a kernel's values have no cycles.
    gc.set_threshold(100_000, 50, 1000)
    leave_out()
    runpy.run_path(script, run_name="__main__")
