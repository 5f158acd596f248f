"""Waiting for what has to come: the bound ends a test that hangs, and is never what a test is about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

# Far longer than anything takes on a machine that ten others use as well, and far shorter than pytest's own limit.
HUNG_SECONDS = 300.0
_PAUSE_SECONDS = 0.005


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until `condition()` holds. Raises `TimeoutError` after `HUNG_SECONDS`."""
    async with asyncio.timeout(HUNG_SECONDS):
        while not condition():
            await asyncio.sleep(_PAUSE_SECONDS)


def wait_until(condition: Callable[[], object], problem: str = "it did not come to that") -> None:
    """Let other threads and processes run until `condition()` holds. Fails with `problem` after `HUNG_SECONDS`."""
    hung = time.monotonic() + HUNG_SECONDS
    while not condition():
        assert time.monotonic() < hung, problem
        time.sleep(_PAUSE_SECONDS)


def ever_longer() -> Iterator[float]:
    """Seconds for a limit that has to pass only after something was done in time: each is tried once the one before
    was too short for that, and the last is `HUNG_SECONDS`."""
    yield from (0.5, 4.0, 32.0, HUNG_SECONDS)
