"""A real draft process for tests that kill, freeze and restart it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from forked import Child
from waits import HUNG_SECONDS

from benchmarks.drafters.random_trees import RANDOM


class Service:
    """`python -m draft_service` on a unix socket, to be killed, frozen and started again. Its log is beside it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/draft.sock"
        self._log = folder / "draft.log"
        self._child: Child | None = None

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    def start(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        flags = ["--listen", self.address, "--log-level", "warning"]
        chosen = arguments if "--drafter" in arguments else ("--drafter", RANDOM, *arguments)
        own = {**os.environ, **(environment or {})}
        self._child = Child("draft_service", [*flags, *chosen], self._log, environment=own)
        self._child.start()

    def send(self, number: signal.Signals) -> None:
        assert self._child is not None
        self._child.send(number)

    def wait(self, seconds: float = HUNG_SECONDS) -> int:
        """Its exit status, once it has ended."""
        assert self._child is not None
        return self._child.wait(seconds)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the process and wait for its end; its exit status."""
        self.send(number)
        # A frozen process takes no other signal to heart.
        self.send(signal.SIGCONT)
        return self.wait()
