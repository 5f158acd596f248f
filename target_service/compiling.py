"""How this package compiles its inner loops: without the GIL, and cached on disk where the disk allows it. Compiling
them again at each start took three seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from outrider.loop_cache import LoopCache
from tree_kernels.node_table import layout

Function = TypeVar("Function", bound=Callable[..., object])

# The sizes of node tables are compiled into loops of this package.
LOOPS = LoopCache(Path(__file__).parent, __name__, (Path(str(layout.__file__)),))


def compiled(function: Function) -> Function:
    """See `LoopCache.compile_loop`."""
    return LOOPS.compile_loop(function)
