"""Deadlines and retries, for every client of this package."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from outrider.errors import OutriderError

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Policy:
    """Deadlines in seconds (None: none), and how many attempts to make at a call.

    A call is retried only when the service sends a time to wait (`RetryInfo`: its queue is full, or it is about to
    stop) and nothing was received yet. The waits double, and never pass the deadline. A refused connection fails at
    once.
    """

    call_timeout: float | None = 10.0
    generate_timeout: float | None = 600.0
    attempts: int = 4

    def __post_init__(self) -> None:
        for name in ("call_timeout", "generate_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name}: expected a positive number of seconds or None, got {seconds}")
        if self.attempts < 1:
            raise ValueError(f"attempts: expected at least 1, got {self.attempts}")

    async def call(
        self,
        timeout: float | None,
        begin: Callable[[float | None], Awaitable[Answer]],
        cancelled: asyncio.Event | None = None,
    ) -> Answer:
        """The result of `begin`, which gets a timeout in seconds and raises errors of `outrider.errors`. `timeout` is
        for all attempts: `call_timeout` if None, and infinite for none. A wait for the next attempt ends early when
        `cancelled` is set; `begin` then has to raise."""
        now = asyncio.get_running_loop().time
        seconds = self.call_timeout if timeout is None else timeout
        end = math.inf if seconds is None else now() + seconds
        made = 0
        while True:
            made += 1
            try:
                return await begin(None if end == math.inf else max(0.0, end - now()))
            except OutriderError as error:
                if error.retry_after is None or made >= self.attempts:
                    raise
                # Jitter, so that callers refused together spread out: each waits up to this share longer than
                # requested.
                wait = error.retry_after * 2 ** (made - 1) * (1 + random.uniform(0, 0.25))
                if wait >= end - now():
                    raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for((cancelled or asyncio.Event()).wait(), wait)


# For programs that set their own deadlines for generations and handle refusals themselves.
SINGLE_ATTEMPT = Policy(generate_timeout=None, attempts=1)
