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
    """What the target serves, once it has loaded its model.

    `console` shows the wait, if any. `timeout` is in seconds; None has no limit. Raises `Loading` if the target still
    loads after it, and what `Client.info` raises.
    """
    end = None if timeout is None else asyncio.get_running_loop().time() + timeout
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
                    return await client.info(timeout)
                except Loading as error:
                    loading = error
    raise loading
