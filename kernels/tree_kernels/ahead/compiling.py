"""What a start does ahead of its launches: collect what they compile, and have it compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from tree_kernels.ahead.processes import CompilerProcesses

log = logging.getLogger(__name__)


class AheadCompiler:
    """Compiles ahead with processes of its own, or does nothing with none."""

    def __init__(self, command: Sequence[str], processes: int) -> None:
        """`command` runs `CHILD`. The processes start now, and import while a model is being loaded."""
        self._compilers = CompilerProcesses(command, processes) if processes else None

    @property
    def has_processes(self) -> bool:
        """Whether anything is compiled ahead."""
        return self._compilers is not None

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
        self._compilers.wait(300.0)
        failures, self._compilers.failures = self._compilers.failures, []
        if failures:
            log.warning("%d kernels of %s were not compiled ahead: %s", len(failures), what, failures[0])
        if entries:
            seconds = time.monotonic() - begin
            log.info("compiled %d kernels of %s in %.1f s, collected in %.1f s", entries, what, seconds, collected)
        return entries

    def close(self) -> None:
        """End the processes."""
        if self._compilers is not None:
            self._compilers.close()
            self._compilers = None
