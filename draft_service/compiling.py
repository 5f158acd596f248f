"""How this package compiles its inner loops: without the GIL, and cached on disk where the disk allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

from outrider import noise, tree
from outrider.loop_cache import LoopCache

# Arrays of the compiled loops.
Numbers = npt.NDArray[np.int32]
Reals = npt.NDArray[np.float64]

Function = TypeVar("Function", bound=Callable[..., object])


# Noise and trees are compiled into loops of this package.
LOOPS = LoopCache(Path(__file__).parent, __name__, (Path(str(noise.__file__)), Path(str(tree.__file__))))
compiled = LOOPS.compile_loop


def inlined(function: Function) -> Function:
    """Like `compiled`, for small helpers of one caller: always inlined, since passing their arrays costs more."""
    return LOOPS.compile_loop(function, inlined=True)


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """In compiled code, an integer as an untyped pointer, which numba has no expression for."""

    def convert(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), convert


@inlined
def largest(values: Reals, count: int) -> int:
    """The index of the first of the largest among the first `count` values."""
    best = 0
    for i in range(1, count):
        if values[i] > values[best]:
            best = i
    return best
