"""How this package compiles its inner loops: without the GIL, and cached on disk where the disk allows it."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

from outrider import noise, tree

# Arrays of the compiled loops.
Numbers = npt.NDArray[np.int32]
Reals = npt.NDArray[np.float64]

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """numba's nopython mode with the GIL released, cached in `cache_folder()` where that can be written."""
    return _compile(function, forceinline=False)


def inlined(function: Function) -> Function:
    """Like `compiled`, for small helpers of one caller: always inlined, since passing their arrays costs more."""
    return _compile(function, forceinline=True)


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """In compiled code, an integer as an untyped pointer, which numba has no expression for."""

    def convert(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), convert


@functools.cache
def cache_folder() -> Path:
    """Where compiled code is kept: a folder of its own for every state of the compiled modules.

    numba detects stale code by the function's own file, but functions of other files may be compiled into it.
    `NUMBA_CACHE_DIR` overrides the user's cache folder.
    """
    digest = hashlib.sha256()
    modules = sorted(Path(__file__).parent.rglob("*.py"))
    sources = [source for path in modules if b"draft_service.compiling" in (source := path.read_bytes())]
    for source in (*sources, *(Path(str(module.__file__)).read_bytes() for module in (noise, tree))):
        digest.update(source)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(user_cache) / "outrider" / "compiled")
    return base / digest.hexdigest()[:16]


def _compile(function: Function, *, forceinline: bool) -> Function:
    options = {"nogil": True, "forceinline": forceinline}
    before = numba.config.CACHE_DIR
    # Read by numba while it decorates, and by nothing else then; there is no argument for it.
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        return numba.njit(function, cache=True, **options)  # type: ignore[no-any-return]
    except RuntimeError:
        # No folder can be written, as in a read-only container: each process compiles.
        return numba.njit(function, **options)  # type: ignore[no-any-return]
    finally:
        numba.config.CACHE_DIR = before


@inlined
def largest(values: Reals, count: int) -> int:
    """The index of the first of the largest among the first `count` values."""
    best = 0
    for i in range(1, count):
        if values[i] > values[best]:
            best = i
    return best
