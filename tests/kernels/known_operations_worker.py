"""Does each operation of `known_operations` twice for the same types and shapes, beside what Triton does for it, and
writes what differs as JSON to standard output.

A process of its own, because Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import itertools
import json
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (4, 1), (1, 8), (4, 8))
TYPES = {tl.int1: bool, tl.int32: np.int32, tl.int64: np.int64, tl.uint32: np.uint32} | {
    tl.float16: np.float16, tl.float32: np.float32,
}  # fmt: skip
NUMBERS = (3, -2, 0, 0.0, -0.0, 2.5, 1e30)
SEMANTIC = interpreter.interpreter_semantic
NAMES = {
    "lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal", "eq": "equal",
    "ne": "not_equal", "and_": "and_", "or_": "or_", "floordiv": "floordiv", "mod": "mod",
}  # fmt: skip
# What a kernel writes, and what Triton calls for it.
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    name: (getattr(operator, name), getattr(SEMANTIC, theirs)) for name, theirs in NAMES.items()
} | {
    name: (getattr(operator, name), lambda x, y, name=name: getattr(SEMANTIC, name)(x, y, False))
    for name in ("add", "sub", "mul")
}  # fmt: skip


@triton.jit
def nothing() -> None:
    tl.program_id(0)


def tensor(random: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> Any:
    data = random.integers(-9 if dtype is not tl.uint32 else 0, 9, shape or (1,))
    data = data > 0 if dtype is tl.int1 else data.astype(TYPES[dtype]) + TYPES[dtype](1 / 3)
    found = made(data, dtype, shape)
    if dtype is tl.int1 and random.integers(2):
        # As a comparison of integers leaves it.
        found.handle.dtype = tl.int32
    return found


def made(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return core.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, [*shape]) if shape else dtype)


def result(function: Callable[..., Any], *arguments: Any) -> tuple[str, ...]:
    """All that is seen of what a function gives, or the error."""
    try:
        found = function(*arguments)
    except Exception as error:
        return (type(error).__name__,)
    data = found.handle.data
    return str(found.type), str(found.handle.dtype), str(data.dtype), str(data.shape), data.tobytes().hex()


def cases(random: np.random.Generator) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """Name, both functions, and what they are called with."""
    kinds = [*itertools.product(TYPES, SHAPES)]
    for (one, shape), (other, wide) in itertools.product(kinds, kinds):
        sides = tensor(random, one, shape), tensor(random, other, wide)
        for name, both in OPERATORS.items():
            yield f"{name} {one}{shape} {other}{wide}", *both, sides
        flags = tensor(random, tl.int1, (4, 8))
        yield f"where {one}{shape} {other}{wide}", core.where, SEMANTIC.where, (flags, *sides)
    memory = random.integers(-99, 99, 64).astype(np.int32)
    for (one, shape), number in itertools.product(kinds, NUMBERS):
        side = tensor(random, one, shape)
        for name, (ours, theirs) in OPERATORS.items():
            yield f"{name} {one}{shape} {number}", ours, theirs, (side, number)
            if name in ("add", "sub", "mul"):
                yield f"{name} {number} {one}{shape}", ours, theirs, (number, side)
        yield f"where {one}{shape} {number}", core.where, SEMANTIC.where, (tensor(random, tl.int1, shape), side, number)
    for (one, shape), dtype in itertools.product(kinds, TYPES):
        side = tensor(random, one, shape)
        yield f"{one}{shape} to {dtype}", lambda x, y: x.to(y), SEMANTIC.cast, (side, dtype)
        if len(shape) == 1:
            yield f"{one}{shape} as a row", lambda x: x[None, :], lambda x: SEMANTIC.expand_dims(x, 0), (side,)
            yield f"{one}{shape} as a column", lambda x: x[:, None], lambda x: SEMANTIC.expand_dims(x, 1), (side,)
    policy = core._normalize_cache_policy(None, "", "")
    for shape in SHAPES:
        places = random.integers(0, 64, shape or (1,))
        at = made((memory.ctypes.data + 4 * places).astype(np.uint64), core.pointer_type(tl.int32), shape)
        yield f"step {shape}", operator.add, lambda x, y: SEMANTIC.add(x, y, False), (at, tensor(random, tl.int32, ()))
        yield f"step {shape} by 3", operator.add, lambda x, y: SEMANTIC.add(x, y, False), (at, 3)
        for mask, other in itertools.product((None, tensor(random, tl.int1, shape)), (None, 0, -7)):
            if mask is not None or other is None:
                yield (
                    f"load {shape} {mask is None} {other}",
                    core.load,
                    lambda x, y, z: SEMANTIC.load(x, y, z if z is None else SEMANTIC.to_tensor(z), policy, False),
                    (at, mask, other),
                )


def main() -> None:
    interpreter._patch_lang(nothing.fn)
    random, found, different = np.random.default_rng(0), 0, []
    for _ in range(2):
        for name, ours, theirs, arguments in cases(random):
            one = result(ours, *arguments)
            found += len(one) > 1
            if one != result(theirs, *arguments):
                different.append(name)
    json.dump({"found": found, "different": different}, sys.stdout)


if __name__ == "__main__":
    main()
