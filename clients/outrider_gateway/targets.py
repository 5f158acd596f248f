"""The targets behind the gateway: which are healthy, what they serve, and which one takes a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence

from outrider.errors import OutriderError
from outrider.model_names import answers_to
from outrider.runtime import end_tasks
from outrider.telemetry.registry import Reading
from outrider_client.client import Client
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import TargetInfo
from outrider_gateway.balancing import choose
from outrider_gateway.failures import NoTarget, TooMany

logger = logging.getLogger(__name__)
_HEALTH_TIMEOUT_SECONDS = 5.0
# Errors about the caller: the target itself serves.
_ABOUT_THE_CALLER = ("UNAUTHENTICATED", "PERMISSION_DENIED")


class Target:
    """One target service. `info` is its last answer to `GetInfo`, `running` counts its answers to this gateway."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.address = client.address
        self.healthy = False
        self._logged = ""
        self.info: TargetInfo | None = None
        self.running = 0
        self.recheck = asyncio.Event()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def leave_out(self) -> None:
        """A call found it gone or about to stop: no more requests until its health is checked."""
        self._becomes(False, "a call failed")
        self.recheck.set()

    async def check_health(self) -> None:
        try:
            serving = await self.client.serving(_HEALTH_TIMEOUT_SECONDS)
            if serving:
                self.info = await self.client.info(_HEALTH_TIMEOUT_SECONDS)
            self._becomes(serving, "not serving")
        except ServiceUnreachable as error:
            self._becomes(False, str(error))
        except OutriderError as error:
            self._becomes(error.code.name in _ABOUT_THE_CALLER, error.reason)
        except Exception as error:
            # An answer that nothing can be made of, say. A watch that ended with it would never look again.
            self._becomes(False, repr(error))

    def _becomes(self, healthy: bool, reason: str) -> None:
        state = "healthy" if healthy else f"left out: {reason}"
        # Also why one is left out that never was healthy, and once more where that is for another reason.
        if state != self._logged:
            logger.log(logging.INFO if healthy else logging.WARNING, "target %s is %s", self.address, state)
        self.healthy, self._logged = healthy, state


class Targets:
    """All targets. Use it with `async with`: inside, the health of each is checked again and again."""

    def __init__(self, clients: Sequence[Client], *, health_seconds: float, load_bound: float) -> None:
        self.all = tuple(Target(client) for client in clients)
        self._health_seconds = health_seconds
        self._load_bound = load_bound
        self._watches: list[asyncio.Task[None]] = []
        # Answers of requests that were let in.
        self._admitted = 0

    async def __aenter__(self) -> Targets:
        await asyncio.gather(*(target.check_health() for target in self.all))
        self._watches = [asyncio.create_task(self._watch(target)) for target in self.all]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._watches)
        await asyncio.gather(*(target.client.close() for target in self.all))

    @property
    def healthy(self) -> list[Target]:
        return [target for target in self.all if target.healthy]

    @contextlib.contextmanager
    def admitting(self, answers: int, limit: int) -> Iterator[None]:
        """Let in a request for so many answers, which count until the block ends, also before a target writes them.
        Raises `TooMany` where they would be more than `limit` with those that were let in before."""
        if self._admitted + answers > limit:
            raise TooMany(limit)
        self._admitted += answers
        try:
            yield
        finally:
            self._admitted -= answers

    def pick(self, key: str, model: str, avoiding: Collection[Target] = ()) -> Target:
        """The target for a request of the tenant `key`. Raises `NoTarget`. Where some serve the model that is asked
        for, only they count; where none does, any can say so."""
        able = [target for target in self.healthy if target not in avoiding]
        serving = [target for target in able if target.info is not None and answers_to(target.info.names, model)]
        loads = {target.address: target.running for target in serving or able}
        if not loads:
            raise NoTarget
        address = choose(key, loads, self._load_bound)
        return next(target for target in able if target.address == address)

    def readings(self) -> Iterator[Reading]:
        for target in self.all:
            yield "outrider_gateway_running", (target.address,), target.running
            yield "outrider_gateway_target_healthy", (target.address,), float(target.healthy)

    async def _watch(self, target: Target) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(target.recheck.wait(), self._health_seconds)
                target.recheck.clear()
                # One that drains still answers for a moment.
                await asyncio.sleep(min(0.2, self._health_seconds))
            await target.check_health()
