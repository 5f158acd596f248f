"""A target that loads its model is waited for, and whoever waits is told."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from outrider.errors import DeadlineExceeded, Loading
from outrider_client.client import Client
from outrider_client.results import TargetInfo
from outrider_client.terminal.waiting import waiting

# As often as the target itself says; whoever looks at a spinner does not see more.
_LOOK_SECONDS = 1.0


async def until_loaded(client: Client, console: Console, timeout: float | None = None) -> TargetInfo:
    """What the target serves, as soon as it has loaded it.

    `console` shows that it is waited for, where it has to be. `timeout` is in seconds; None waits for as long as it
    loads. Raises `Loading` where it still does then, and what `Client.info` raises.
    """
    end = None if timeout is None else time.monotonic() + timeout
    try:
        return await client.info(timeout)
    except Loading as error:
        loading = error
    with waiting(console, "the target is loading its model; Ctrl-C ends the wait"):
        while end is None or time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS if end is None else min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))
            try:
                return await client.info(None if end is None else max(0.001, end - time.monotonic()))
            except Loading as error:
                loading = error
            except DeadlineExceeded:
                break
    raise loading
