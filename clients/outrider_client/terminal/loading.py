"""Waits, visibly, for a target that loads its model."""

from __future__ import annotations

import asyncio
import contextlib

from rich.console import Console

from outrider.errors import DeadlineExceeded, Loading
from outrider_client.client import Client
from outrider_client.results import TargetInfo
from outrider_client.terminal.waiting import waiting

# The interval that the target itself suggests.
_POLL_SECONDS = 1.0


async def until_loaded(client: Client, console: Console, timeout: float | None = None) -> TargetInfo:
    """What the target serves, once it has loaded its model. `console` shows the wait, if any. `timeout` is in seconds;
    None has no limit. Raises `Loading` if the target still loads after it, and what `Client.info` raises."""
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    try:
        return await client.info(timeout)
    except Loading as error:
        loading = error
    message = "the target is loading its model; Ctrl-C ends the wait"
    with waiting(console, message), contextlib.suppress(TimeoutError, DeadlineExceeded):
        async with asyncio.timeout_at(end):
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                try:
                    # With the time that is left, the call's own pauses before it tries again do not pass the end.
                    return await client.info(None if end is None else max(0.001, end - loop.time()))
                except Loading as error:
                    loading = error
    raise loading
