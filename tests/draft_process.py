"""A real draft process for tests that kill, freeze and restart it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


class Service:
    """`python -m draft_service` on a unix socket, to be killed, frozen and started again."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/draft.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "draft_service", "--listen", self.address, "--log-level", "warning"]
        chosen = arguments if "--drafter" in arguments else ("--drafter", "random", *arguments)
        self.process = subprocess.Popen([*command, *chosen], env={**os.environ, **(environment or {})})

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the process and wait for its end; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        # A frozen process takes no other signal to heart.
        self.process.send_signal(signal.SIGCONT)
        return self.process.wait(timeout=10)
