"""What a start does ahead of its launches: collect what they compile, and have it compiled."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from tree_kernels.ahead.processes import CompilerProcesses

log = logging.getLogger(__name__)


class AheadCompiler:
    """Compiles ahead with processes of its own, or does nothing with none, and where an earlier start has compiled all
    of it."""

    def __init__(self, command: Sequence[str], processes: int, launched: str = "") -> None:
        """`command` runs `CHILD`. The processes start now, and import while a model is being loaded. `launched` says
        what all launches depend on: once everything was compiled for such a text, the next start with it compiles
        nothing; empty always compiles."""
        self._kept = _record_of(launched) if processes and launched else None
        self.is_kept = self._kept is not None and self._kept.exists()
        self._compilers = CompilerProcesses(command, processes) if processes and not self.is_kept else None

    @property
    def compiles_ahead(self) -> bool:
        """Whether anything is compiled ahead, or was by an earlier start."""
        return self._compilers is not None or self.is_kept

    def compile(self, what: str, launches: Iterable[Callable[[], object]]) -> int:
        """Run `launches` without launching anything, and return once what they would compile is compiled: how many
        kernels. None of it changes a result: what is not compiled here is compiled where it is launched.

        `what` is for the log. Of what `launches` raise the first is logged: what such a one would compile is compiled
        later too.
        """
        if self._compilers is None:
            return 0
        from tree_kernels.ahead.collecting import collecting

        begin, entries = time.monotonic(), 0

        def put(entry: str) -> None:
            nonlocal entries
            entries += 1
            assert self._compilers is not None
            self._compilers.submit(entry)

        broken = 0
        with torch.inference_mode(), collecting(put):
            for launch in launches:
                try:
                    launch()
                # A start must not fail by what only makes it faster: what is wrong raises again where it is launched.
                except Exception:
                    broken += 1
                    if broken == 1:
                        log.warning("not all of %s can be compiled ahead", what, exc_info=True)
        collected = time.monotonic() - begin
        # For one round of compiling; what is not done by then is compiled where it is launched. Chosen: several times
        # what a start on 16 cores takes.
        compiled = self._compilers.wait(300.0)
        failures, self._compilers.failures = self._compilers.failures, []
        if broken or failures or not compiled:
            self._kept = None
        if failures:
            log.warning("%d kernels of %s were not compiled ahead: %s", len(failures), what, failures[0])
        if entries:
            seconds = time.monotonic() - begin
            log.info("compiled %d kernels of %s in %.1f s, collected in %.1f s", entries, what, seconds, collected)
        return entries

    def close(self, *, whole: bool = False) -> None:
        """End the processes. `whole` if everything was compiled that launches depend on, which is kept."""
        if self._compilers is not None:
            self._compilers.close()
            self._compilers = None
            if whole and self._kept is not None:
                # Kernels may have been found in a cache that cannot be written: then the next start collects again.
                with contextlib.suppress(OSError):
                    self._kept.parent.mkdir(parents=True, exist_ok=True)
                    self._kept.touch()


def _record_of(launched: str) -> Path:
    """A file beside the compiled kernels, so that it goes with them. Where it is there and something else changed that
    launches depend on, such as the memory of a cache, what is missing is compiled where it is launched."""
    from triton import __version__, knobs

    name = hashlib.sha256(f"{launched} {torch.__version__} {__version__}".encode()).hexdigest()
    return Path(knobs.cache.dir) / "outrider-ahead" / name
