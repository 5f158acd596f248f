"""Inner loops that numba compiles, cached on disk where the disk allows it. Only services have numba."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class LoopCache:
    """The compiled loops of one package, kept in a folder of its own for every state of their modules.

    numba detects stale code by the function's own file, but functions and numbers of other files may be compiled into
    it. Attributes:
        package: the package's folder.
        compiler: the name of the package's module whose decorators compile: modules that name it are its modules.
        others: files of other packages that are compiled into them.
    """

    package: Path
    compiler: str
    others: Sequence[Path] = ()

    @functools.cached_property
    def folder(self) -> Path:
        """Where compiled code is kept. `NUMBA_CACHE_DIR` overrides the user's cache folder."""
        digest = hashlib.sha256()
        modules = sorted(self.package.rglob("*.py"))
        sources = [source for path in modules if self.compiler.encode() in (source := path.read_bytes())]
        for source in (*sources, *(path.read_bytes() for path in self.others)):
            digest.update(source)
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        base = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(user_cache) / "outrider" / "compiled")
        return base / digest.hexdigest()[:16]

    def compile_loop(self, function: Function, *, inlined: bool = False) -> Function:
        """numba's nopython mode with the GIL released, cached in `folder` where that can be written. With `inlined`
        always inlined in its callers."""
        import numba

        options = {"nogil": True, "forceinline": inlined}
        before = numba.config.CACHE_DIR
        # Read by numba while it decorates, and by nothing else then; there is no argument for it.
        numba.config.CACHE_DIR = str(self.folder)
        try:
            return numba.njit(function, cache=True, **options)  # type: ignore[no-any-return]
        except RuntimeError:
            # No folder can be written, as in a read-only container: each process compiles.
            return numba.njit(function, **options)  # type: ignore[no-any-return]
        finally:
            numba.config.CACHE_DIR = before
