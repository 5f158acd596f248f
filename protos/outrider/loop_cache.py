"""Inner loops that numba compiles, cached on disk where the disk allows it. Only services have numba."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from outrider.processes.python import module_command

log = logging.getLogger(__name__)
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
    _beside: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False, repr=False, compare=False)

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

    def compile_beside(self, calls: Sequence[str]) -> None:
        """Where nothing is cached yet, compile in other processes while this one loads what it serves: each of `calls`,
        a `MODULE:FUNCTION` that runs its loops once, in a process of its own. A first start waited 36 s for the loops
        of a merged draft (H200 host, `benchmarks/results/2026-11-28-h200-start.md`)."""
        # The folder itself is made where loops are declared.
        if next(self.folder.rglob("*.nbi"), None) is not None:
            return
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        for call in calls:
            command = module_command(__name__, call)
            self._beside.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment))

    def wait(self) -> None:
        """Wait for what is compiled beside, before loops are called: this process would compile the same. What could
        not be compiled there is compiled where it is called first."""
        while self._beside:
            process = self._beside.pop()
            if process.wait():
                log.warning("%s ended with status %d", " ".join(map(str, process.args[-2:])), process.returncode)  # type: ignore[index]

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


def main() -> None:
    """Call the `MODULE:FUNCTION` that the command line names."""
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
