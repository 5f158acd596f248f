"""How this package compiles its inner loops: without the GIL, and cached on disk where the disk allows it. Compiling
them again at each start took three seconds."""

from __future__ import annotations

from pathlib import Path

from outrider.loop_cache import LoopCache
from tree_kernels.node_table import layout

# The sizes of node tables are compiled into loops of this package.
LOOPS = LoopCache(Path(__file__).parent, __name__, (Path(str(layout.__file__)),))
compiled = LOOPS.compile_loop
