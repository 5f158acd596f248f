"""Deadlines and retries, for every client of this package."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from outrider.errors import OutriderError

Answer = TypeVar("Answer")
# Jitter, so that callers refused together spread out: each waits up to this share longer than requested.
_SPREAD = 0.25


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

    async def call(self, timeout: float | None, begin: Callable[[float | None], Awaitable[Answer]]) -> Answer:
        """The result of `begin`, which gets a timeout in seconds and raises errors of `outrider.errors`."""
        attempt = Attempt(self, self.call_timeout if timeout is None else timeout)
        while True:
            try:
                return await begin(attempt.seconds_left())
            except OutriderError as error:
                if not await attempt.again(error):
                    raise


# For programs that set their own deadlines for generations and handle refusals themselves.
SINGLE_ATTEMPT = Policy(generate_timeout=None, attempts=1)


class Attempt:
    """The attempts made at one call, and its deadline."""

    def __init__(self, policy: Policy, timeout: float | None) -> None:
        """`timeout` is for all attempts, in seconds. Needs a running event loop."""
        self._policy = policy
        self._end = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self._made = 1

    def seconds_left(self) -> float | None:
        """Until the deadline; None without one."""
        return None if self._end is None else max(0.0, self._end - asyncio.get_running_loop().time())

    async def again(self, error: Exception) -> bool:
        """Whether to retry the call, after the wait that the error requests."""
        after = error.retry_after if isinstance(error, OutriderError) else None
        if after is None or self._made >= self._policy.attempts:
            return False
        wait = after * 2 ** (self._made - 1) * (1 + random.uniform(0, _SPREAD))
        left = self.seconds_left()
        if left is not None and wait >= left:
            return False
        self._made += 1
        await asyncio.sleep(wait)
        return True
