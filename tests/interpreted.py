"""Runs a script in Triton's interpreter, which here leaves out what it does for nothing: most of its time.

`TRITON_INTERPRET=1 python interpreted.py SCRIPT`. Results are the same bit for bit.
"""

from __future__ import annotations

import functools
import gc
import math
import runpy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from known_operations import known
from triton.language import core
from triton.runtime import interpreter

# Names of Triton's own, of 3.9; another version that has others takes its time.
_OF_INTERPRETER = {"interpreter_builder", "interpreter_semantic", "_patch_attr", "_patch_lang", "_LangPatchScope"}
_OF_INTERPRETER |= {"_get_np_dtype", "_validate_np_data_size"}
_OF_SEMANTIC = {"binary_op_type_checking_impl", "computation_type_impl", "_cast_to_computation_type"}
_OF_SEMANTIC |= {"broadcast_impl_value"}
# What `core.builtin` puts around a function.
_ASKS = core.builtin(lambda: None).__code__


def leave_out() -> None:
    """Change Triton for the rest of this process."""
    semantic = type(vars(interpreter).get("interpreter_semantic"))
    if not (vars(interpreter).keys() >= _OF_INTERPRETER and vars(semantic).keys() >= _OF_SEMANTIC):
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
    _agree_at_once(semantic)
    _broadcast_at_once(semantic)


def _patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """As Triton's, but for a copy of the arguments' names at each call, and a wrapper that asks for `semantic`."""
    semantic = interpreter.interpreter_semantic
    if getattr(member, "__code__", None) is _ASKS:
        member = member.__wrapped__

    def called(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*args, **named)

    scope.set_attr(owner, name, known(owner, name, called, semantic))


def _remember_types() -> None:
    """Types and shapes are worked out once, and not for every tensor: a kernel makes millions, of a few shapes."""
    np_type, numpy_types = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(dtype: Any) -> Any:
        found = numpy_types.get(dtype.name)
        if found is None:
            found = numpy_types[dtype.name] = np_type(dtype)
        return found

    interpreter._get_np_dtype = numpy_type
    is_wide_enough, wide_enough = interpreter._validate_np_data_size, dict[Any, bool]()

    def validated(array: Any, dtype: Any) -> bool:
        key = array.dtype, dtype.name
        found = wide_enough.get(key)
        if found is None:
            found = wide_enough[key] = is_wide_enough(array, dtype)
        return found

    interpreter._validate_np_data_size = validated

    def handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not wide_enough.get((data.dtype, dtype.name)):
            self.__post_init__()

    interpreter.TensorHandle.__init__ = handle
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


def _agree_at_once(semantic: Any) -> None:
    """Two tensors are mostly of types that need no conversion, and a number mostly one that was there before; others'
    common type is found once."""
    check, common, convert = (
        getattr(semantic, name)
        for name in ("binary_op_type_checking_impl", "computation_type_impl", "_cast_to_computation_type")
    )
    # Of two types, whether neither is converted; of a type, a shape and a number, the number as such a tensor.
    unconverted, numbers = dict[Any, bool](), dict[Any, Any]()
    known = dict[Any, Any]()

    def checked(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        if type(lhs) is not core.tensor:
            return check(self, lhs, rhs, *flags, **named)
        kind, how = lhs.dtype.name, (flags, *named.items())
        if type(rhs) is core.tensor:
            types = kind, rhs.dtype.name, how
            if unconverted.get(types):
                return self.broadcast_impl_value(lhs, rhs)
            both = check(self, lhs, rhs, *flags, **named)
            unconverted[types] = (both[0].dtype.name, both[1].dtype.name) == types[:2]
            return both
        # Minus zero equals zero, and is another number.
        if type(rhs) is not int and (type(rhs) is not float or rhs == 0):
            return check(self, lhs, rhs, *flags, **named)
        # The shape is one object for all that have it.
        key = kind, id(lhs.shape), type(rhs), rhs, how
        found = numbers.get(key)
        if found is not None:
            return lhs, found
        both = check(self, lhs, rhs, *flags, **named)
        if both[0] is lhs:
            numbers[key] = both[1]
        return both

    def common_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        found = known.get(key)
        if found is None:
            found = known[key] = common(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return found

    def converted(self: Any, value: Any, dtype: Any) -> Any:
        return value if type(value) is core.tensor and value.dtype is dtype else convert(self, value, dtype)

    semantic.binary_op_type_checking_impl = checked
    semantic.computation_type_impl = common_type
    semantic._cast_to_computation_type = converted


def _broadcast_at_once(semantic: Any) -> None:
    """What shape two others make is found once. A shape is one object for all tensors that have it."""
    broadcast = semantic.broadcast_impl_value
    shapes, blocks = dict[Any, Any](), dict[Any, tuple[Any, Any]]()

    def block_of(self: Any, dtype: Any, sizes: list[int]) -> tuple[Any, Any]:
        key = dtype.name, tuple(sizes)
        found = blocks.get(key)
        if found is None:
            made = core.block_type(dtype, sizes)
            found = blocks[key] = made, made.to_ir(self.builder)
        return found

    def grown(self: Any, value: Any, sizes: list[int]) -> Any:
        made, in_ir = block_of(self, value.dtype, sizes)
        if value.type.is_block():
            return self.make_tensor(self.builder.create_broadcast(value.handle, sizes), made)
        return self.make_tensor(self.builder.create_splat(in_ir, value.handle), made)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)
        found = shapes.get(key)
        if found is None:
            both = broadcast(self, lhs, rhs)
            # Of equal rank, where no more is done than to broadcast; the shapes live on with their entry.
            if len(lhs.shape) in (0, len(rhs.shape)) or len(rhs.shape) == 0:
                sizes = [size.value for size in both[0].shape]
                shapes[key] = sizes, both[0] is lhs, both[1] is rhs, lhs.shape, rhs.shape
            return both
        sizes, lhs_fits, rhs_fits, *_ = found
        return lhs if lhs_fits else grown(self, lhs, sizes), rhs if rhs_fits else grown(self, rhs, sizes)

    semantic.broadcast_impl_value = broadcasted


if __name__ == "__main__":
    script = sys.argv.pop(1)
    # What `python SCRIPT` finds its neighbours by.
    sys.path[0] = str(Path(script).resolve().parent)
    # Nothing here is garbage but by its count: what libraries leave lives on, and a kernel's values have no cycles.
    gc.set_threshold(100_000, 50, 1000)
    leave_out()
    warnings.simplefilter("ignore")
    runpy.run_path(script, run_name="__main__")
