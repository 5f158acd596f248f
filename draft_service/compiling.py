"""How this package compiles its inner loops: without the GIL, and cached on disk where the disk allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """numba's nopython mode with the GIL released.

    The result is cached beside the source, or in the user's cache folder (`NUMBA_CACHE_DIR` names another).
    Where neither can be written, as in a read-only container, each process compiles anew.
    """
    try:
        return numba.njit(function, nogil=True, cache=True)  # type: ignore[no-any-return]
    except RuntimeError:
        return numba.njit(function, nogil=True)  # type: ignore[no-any-return]


def inlined(function: Function) -> Function:
    """Like `compiled`, for small helpers of one caller: always inlined, since passing their arrays costs more."""
    try:
        return numba.njit(function, nogil=True, cache=True, forceinline=True)  # type: ignore[no-any-return]
    except RuntimeError:
        return numba.njit(function, nogil=True, forceinline=True)  # type: ignore[no-any-return]
