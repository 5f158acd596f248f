"""Operations of Triton's interpreter that are one call of NumPy wherever they were done before for the same types and
shapes: what Triton finds out about these each time, in ten calls and more, is found once.

NumPy broadcasts as Triton does. Where anything is converted, Triton's own code is called.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

_ARITHMETIC: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
_OPERATORS = {**_ARITHMETIC, **_COMPARISONS, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or}
_SIGNED = {f"int{bits}" for bits in (8, 16, 32, 64)}
_INTEGERS = _SIGNED | {f"u{name}" for name in _SIGNED}
_NUMBERS = _INTEGERS | {"fp16", "fp32", "fp64"}
_FLAG = np.dtype(bool)
_new_handle, _new_tensor = interpreter.TensorHandle.__new__, core.tensor.__new__


def _rounded_to_zero(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


# Of integers alone.
_WHOLE = {"floordiv": _rounded_to_zero, "mod": np.fmod}
_WAYS = {f"__{name}__": function for name, function in (_OPERATORS | _WHOLE).items()}
_REVERSED = {f"__r{name}__": function for name, function in _ARITHMETIC.items()}


def known(owner: Any, name: str, member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """What stands for a member of `triton.language`, or of its tensors: itself, or what calls it the first time."""
    if owner is core.tensor:
        if name in _WAYS:
            return _operator(member, _WAYS[name], semantic)
        if name in _REVERSED:
            return _reversed(member, _REVERSED[name], semantic)
        others = {"__getitem__": _index, "to": _conversion}
        return others[name](member) if name in others else member
    if not isinstance(owner, ModuleType):
        return member
    if name == "where":
        return _where(member, semantic)
    return _load(member, semantic) if name == "load" else member


def _part(value: Any) -> tuple[Any, Any] | None:
    """What an operation depends on of a tensor or number; None for anything else."""
    kind = type(value)
    if kind is core.tensor:
        # A type's name says all of it, and a shape is one object for all that have it.
        return value.dtype.name, id(value.shape)
    # Minus zero equals zero, and is another number.
    return (kind, value or repr(value)) if kind is int or kind is float else None


def _made(like: Any, data: Any, dtype: Any) -> Any:
    """A tensor of the same type as `like`."""
    handle = _new_handle(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    made = _new_tensor(core.tensor)
    made.handle, made.type, made.dtype, made.numel, made.shape = handle, like.type, like.dtype, like.numel, like.shape
    return made


def _number(value: Any, dtype: Any, semantic: Any) -> Any:
    """A number as a tensor's data where it takes the type of the tensor beside it; None where that is converted."""
    kind = semantic.to_tensor_type(value)
    if dtype.name not in _NUMBERS or semantic.computation_type_impl(dtype, False, kind, True, False).name != dtype.name:
        return None
    return semantic.scalar_constant(value, dtype).handle.data


def _operator(member: Callable[..., Any], function: Any, semantic: Any) -> Callable[[Any, Any], Any]:
    """Of a tensor and another, or a number."""
    ways = dict[Any, Any]()

    def called(self: Any, other: Any, _semantic: Any = None) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        part = _part(other)
        if part is None:
            return member(self, other)
        key = self.dtype.name, id(self.shape), part
        way = ways.get(key)
        if way:
            like, number, width, flags = way
            own = self.handle
            right = other.handle.data if number is None else number
            if width:
                return _made(like, own.data + width * right.astype(np.uint64), own.dtype)
            if not flags or own.data.dtype is right.dtype is _FLAG:
                return _made(like, function(own.data, right), own.dtype)
        made = member(self, other)
        if way is None:
            found = _way(self, other, function, semantic)
            ways[key] = found is not None and (_made(made, None, None), *found)
        return made

    return called


def _way(self: Any, other: Any, function: Any, semantic: Any) -> tuple[Any, int, bool] | None:
    """How an operator computes: with a number's data for the other tensor's; on pointers, of elements of so many bytes;
    and whether on flags. None where something is converted for it."""
    name, is_tensor = self.dtype.name, type(other) is core.tensor
    if self.dtype.is_ptr():
        kind = other.dtype if is_tensor else semantic.to_tensor_type(other)
        if function is not np.add or kind.name not in _SIGNED:
            return None
        number = None if is_tensor else semantic.scalar_constant(other, kind).handle.data
        return number, max(1, self.handle.get_element_ty().primitive_bitwidth // 8), False
    bits = function in (np.bitwise_and, np.bitwise_or)
    if name == "int1":
        # Triton writes a single flag out for a block, in the type that it was compared in.
        alike = is_tensor and other.dtype.name == name and bool(other.shape) == bool(self.shape)
        return (None, 0, True) if bits and alike else None
    if name not in (_INTEGERS if bits or function in _WHOLE.values() else _NUMBERS):
        return None
    if is_tensor:
        return (None, 0, False) if other.dtype.name == name else None
    number = _number(other, self.dtype, semantic)
    return None if number is None else (number, 0, False)


def _reversed(member: Callable[..., Any], function: Any, semantic: Any) -> Callable[[Any, Any], Any]:
    """Of a number and a tensor."""
    ways = dict[Any, Any]()

    def called(self: Any, other: Any, _semantic: Any = None) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        if type(other) is core.tensor or (part := _part(other)) is None:
            return member(self, other)
        key = self.dtype.name, id(self.shape), part
        way = ways.get(key)
        if way:
            like, number = way
            return _made(like, function(number, self.handle.data), self.dtype)
        made = member(self, other)
        if way is None:
            number = _number(other, self.dtype, semantic)
            ways[key] = number is not None and (_made(made, None, None), number)
        return made

    return called


def _index(member: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """`tensor[:, None]` and its like."""
    likes, whole = dict[Any, Any](), slice(None)

    def called(self: Any, slices: Any, _semantic: Any = None) -> Any:
        if type(slices) is not tuple or any(one is not None and one != whole for one in slices):
            return member(self, slices)
        key = self.dtype.name, id(self.shape), tuple([one is None for one in slices])
        like = likes.get(key)
        if like is None:
            made = member(self, slices)
            likes[key] = _made(made, None, None)
            return made
        return _made(like, self.handle.data[slices], self.handle.dtype)

    return called


def _conversion(member: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.to(type)`."""
    ways = dict[Any, Any]()

    def called(self: Any, dtype: Any, *rest: Any, _semantic: Any = None, **named: Any) -> Any:
        if rest or named or type(dtype) is not core.dtype:
            return member(self, dtype, *rest, **named)
        key = self.dtype.name, id(self.shape), dtype.name
        way = ways.get(key)
        if way:
            like, types = way
            return self if like is None else _made(like, self.handle.data.astype(types), dtype)
        made = member(self, dtype)
        if way is None:
            like = None if made is self else _made(made, None, None)
            plain = self.dtype.name in {*_NUMBERS, "int1"} and dtype.name in _NUMBERS
            ways[key] = (plain or made is self) and (like, made.handle.data.dtype)
        return made

    return called


def _where(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """Of flags, and tensors of one type or numbers."""
    ways = dict[Any, Any]()

    def called(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        x, y = (one.value if type(one) is core.constexpr else one for one in (x, y))
        parts = _part(x), _part(y)
        if type(condition) is not core.tensor or None in parts or condition.handle.data.dtype is not _FLAG:
            return member(condition, x, y)
        key = condition.dtype.name, id(condition.shape), parts
        way = ways.get(key)
        if way:
            like, *numbers = way
            left, right = (
                one.handle.data if number is None else number for one, number in zip((x, y), numbers, strict=True)
            )
            dtype = y.handle.dtype if numbers[1] is None else like.dtype
            return _made(like, np.where(condition.handle.data, left, right), dtype)
        made = member(condition, x, y)
        if way is None:
            ways[key] = condition.dtype.name == "int1" and _choice(x, y, made, semantic)
        return made

    return called


def _choice(x: Any, y: Any, made: Any, semantic: Any) -> tuple[Any, Any, Any] | bool:
    """A tensor like the result, and data of what is a number. False where something is converted."""
    numbers = []
    for one in (x, y):
        if type(one) is core.tensor:
            if one.dtype.name != made.dtype.name or one.dtype.name == "int1":
                return False
            numbers.append(None)
        elif made.dtype.name not in _NUMBERS:
            return False
        else:
            numbers.append(semantic.scalar_constant(one, made.dtype).handle.data)
    return _made(made, None, None), numbers[0], numbers[1]


def _load(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """With or without a mask, and with nothing, a number, or a tensor in place of what is masked."""
    ways = dict[Any, Any]()

    def called(pointer: Any, mask: Any = None, other: Any = None, _semantic: Any = None, **named: Any) -> Any:
        mask, other = (one.value if type(one) is core.constexpr else one for one in (mask, other))
        parts = _part(mask), _part(other)
        is_known = (mask is None or type(mask) is core.tensor) and (other is None or parts[1] is not None)
        if not is_known or "volatile" in named or type(pointer) is not core.tensor:
            return member(pointer, mask, other, **named)
        key = pointer.dtype.name, id(pointer.shape), parts, *named.items()
        way = ways.get(key)
        at = pointer.handle.data
        if way:
            like, dtype, types, flags, number = way
            if mask is not None:
                flags = mask.handle.data
                flags = flags if flags.shape == at.shape else np.broadcast_to(flags, at.shape)
            instead = other.handle.data if number is None else number
            return _made(like, interpreter._interpreter.load(at, flags, instead, types), dtype)
        made = member(pointer, mask, other, **named)
        if way is None:
            ways[key] = _reading(pointer, mask, other, made, semantic)
        return made

    return called


def _reading(pointer: Any, mask: Any, other: Any, made: Any, semantic: Any) -> tuple[Any, ...] | bool:
    """A tensor like what is read, its type for Triton and for NumPy, the mask where none is given, and what stands for
    what is masked where it is no tensor. False where something is converted, or pointers are broadcast."""
    kind = pointer.dtype.element_ty
    if made.shape is not pointer.shape or kind.name == "int1":
        return False
    if mask is not None and mask.dtype.name != "int1":
        return False
    at, types = pointer.handle.data, made.handle.data.dtype
    number = None
    if other is None:
        number = np.zeros_like(at, dtype=types)
    elif type(other) is not core.tensor:
        whole = semantic.broadcast_impl_value(pointer, semantic.to_tensor(other))[1]
        number = semantic.cast(whole, kind).handle.data
    elif other.dtype.name != kind.name or other.shape is not pointer.shape:
        return False
    return _made(made, None, None), made.handle.dtype, types, np.ones_like(at, dtype=bool), number
