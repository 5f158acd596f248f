"""Engines that start beside each other and are measured one after the other."""

from __future__ import annotations

import time
from pathlib import Path

_POLL_SECONDS = 0.05


def await_turn(turn: str) -> None:
    """Say by a file TURN.ready that all is loaded, and wait until there is TURN.go; at once without a name."""
    if not turn:
        return
    Path(f"{turn}.ready").touch()
    while not Path(f"{turn}.go").exists():
        time.sleep(_POLL_SECONDS)
