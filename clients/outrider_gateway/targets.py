"""The targets behind the gateway: which are healthy, what they serve, and which one takes a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.errors import DeadlineExceeded, Loading, OutriderError
from outrider.model_names import answers_to
from outrider.runtime import end_tasks
from outrider.telemetry.registry import Reading
from outrider_client.client import Client
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import TargetInfo
from outrider_gateway.balancing import choose, ranked
from outrider_gateway.discovery import AddressSource
from outrider_gateway.failures import NoTarget, loading_message

logger = logging.getLogger(__name__)
# Chosen.
_HEALTH_TIMEOUT_SECONDS = 5.0
# Errors about the caller: the target itself serves.
_ABOUT_THE_CALLER = ("UNAUTHENTICATED", "PERMISSION_DENIED")
# States that need no warning.
_LOADING, _STARTING = "loading its model", "being started"


class Target:
    """One target service. `info` is its last answer to `GetInfo`, `running` counts its answers to this gateway, `state`
    is the text for a caller."""

    def __init__(self, client: Client, start_seconds: float = 0.0) -> None:
        """Until `start_seconds` from now, one that was never reached is being started."""
        self.client = client
        self.address = client.address
        self.healthy = False
        # It was healthy, and then an answer about its health was late, for the first time.
        self.late = False
        self.state = "it was not asked yet"
        self.info: TargetInfo | None = None
        self.running = 0
        self.recheck = asyncio.Event()
        self._unused = asyncio.Event()
        self._logged = ""
        self._reached = False
        self._made_at = time.monotonic()
        self._start_seconds = start_seconds

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self.running += 1
        self._unused.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._unused.set()

    async def close_when_unused(self) -> None:
        """Close its connection once the last of its answers has ended."""
        if self.running:
            await self._unused.wait()
        await self.client.close()

    @property
    def starts(self) -> bool:
        """Whether it was found to be started, or to load its model."""
        return self._logged in (_LOADING, _STARTING)

    def leave_out(self, error: OutriderError | ServiceUnreachable) -> None:
        """A call found it gone or about to stop: no more requests until its health is checked."""
        self._becomes(False, str(error))
        self.recheck.set()

    async def check_health(self) -> None:
        was_healthy, self.late = self.healthy, False
        try:
            if await self.client.serving(_HEALTH_TIMEOUT_SECONDS):
                self.info = await self.client.info(_HEALTH_TIMEOUT_SECONDS)
                self._becomes(True, "healthy")
            else:
                await self._ask_why_not()
        except ServiceUnreachable as error:
            self._unreached(error)
        except DeadlineExceeded:
            self.late = was_healthy
            self._becomes(False, f"it has not answered within {_HEALTH_TIMEOUT_SECONDS:g} s")
        except OutriderError as error:
            about_the_caller = error.code.name in _ABOUT_THE_CALLER
            self._becomes(about_the_caller, "healthy" if about_the_caller else error.message)
        except Exception as error:
            # An answer that cannot be read, for example. A watch that ended with it would never look again.
            self._becomes(False, repr(error))

    async def _ask_why_not(self) -> None:
        """Of one that is reached and not ready."""
        try:
            await self.client.info(_HEALTH_TIMEOUT_SECONDS)
        except Loading as error:
            self._becomes(False, _LOADING, loading_message(error))
        except OutriderError as error:
            unknown = error.code.name in _ABOUT_THE_CALLER
            self._becomes(False, "it loads its model, or is about to stop" if unknown else error.message)
        else:
            self._becomes(False, "it is about to stop, or makes no progress")

    def _unreached(self, error: ServiceUnreachable) -> None:
        passed = time.monotonic() - self._made_at
        if self._reached or passed >= self._start_seconds or error.tls_problem:
            self._becomes(False, str(error))
        else:
            self._becomes(False, _STARTING, f"{_STARTING} ({passed:.0f} s so far)")

    def _becomes(self, healthy: bool, reason: str, state: str = "") -> None:
        """`state` has what changes from one look to the next."""
        # Also why one is left out that never was healthy, and once more where that is for another reason.
        if reason != self._logged:
            expected = healthy or reason in (_LOADING, _STARTING)
            text = reason if expected else f"left out: {reason}"
            logger.log(logging.INFO if expected else logging.WARNING, "target %s is %s", self.address, text)
        self._reached = self._reached or reason != _STARTING
        self.healthy, self._logged, self.state = healthy, reason, state or reason


@dataclass
class FoundTargets:
    """The targets that a source finds, by address. `connect` makes the client of one."""

    source: AddressSource
    connect: Callable[[str], Client]
    by_address: dict[str, Target] = field(default_factory=dict)


class Targets:
    """All targets. Use it with `async with`: inside, the health of each is checked again and again, and sources are
    asked as often.

    A target whose address leaves its source gets no further request, and its answers end undisturbed. A source without
    any address changes nothing: a name server may be away, and health shows which targets are.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        health_seconds: float,
        load_bound: float,
        start_seconds: float = 0.0,
        sources: Sequence[FoundTargets] = (),
    ) -> None:
        self.all = tuple(Target(client, start_seconds) for client in clients)
        self._health_seconds = health_seconds
        self._load_bound = load_bound
        self._start_seconds = start_seconds
        self._sources = sources
        self._lookups: list[asyncio.Task[None]] = []
        self._watches: dict[Target, asyncio.Task[None]] = {}
        self._leaving: dict[Target, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Targets:
        await asyncio.gather(*map(self._join, self.all), *map(self._look_up, self._sources))
        self._lookups = [asyncio.create_task(self._follow(found)) for found in self._sources]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._lookups)
        await end_tasks(*self._watches.values(), *self._leaving.values())
        await asyncio.gather(*(target.client.close() for target in (*self.all, *self._leaving)))

    @property
    def usable(self) -> list[Target]:
        """The healthy targets. Where none is, those that are late for the first time: a machine with other work may
        answer late while it serves, and a frozen one is late again."""
        return [target for target in self.all if target.healthy] or [target for target in self.all if target.late]

    def preferred(self, key: str) -> list[Target]:
        """The usable targets in the order in which `key` prefers them."""
        usable = {target.address: target for target in self.usable}
        return [usable[address] for address in ranked(key, usable)]

    def unavailable(self) -> NoTarget:
        """Why no target is healthy, as far as it is known."""
        states = [f"{target.address}: {target.state}" for target in self.all]
        states += [f"{found.source}: no address is known" for found in self._sources if not found.by_address]
        return NoTarget("; ".join(states[:3]) + ("; ..." if len(states) > 3 else ""))

    def pick(self, key: str, model: str, avoiding: Collection[Target] = ()) -> Target:
        """The target for a request of the tenant `key`. Raises `NoTarget`, with the reasons. Where some serve the model
        that is asked for, only they count; where none does, any can report it."""
        able = [target for target in self.usable if target not in avoiding]
        serving = [target for target in able if target.info is not None and answers_to(target.info.names, model)]
        loads = {target.address: target.running for target in serving or able}
        if not loads:
            raise self.unavailable()
        address = choose(key, loads, self._load_bound)
        return next(target for target in able if target.address == address)

    def readings(self) -> Iterator[Reading]:
        for target in self.all:
            yield "outrider_gateway_running", (target.address,), target.running
            yield "outrider_gateway_target_healthy", (target.address,), float(target.healthy)

    async def _follow(self, found: FoundTargets) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            await self._look_up(found)

    async def _look_up(self, found: FoundTargets) -> None:
        addresses = await found.source.addresses()
        if not addresses:
            return
        unknown = (address for address in addresses if address not in found.by_address)
        joined = [Target(found.connect(address), self._start_seconds) for address in unknown]
        found.by_address.update({target.address: target for target in joined})
        self.all += tuple(joined)
        # Whoever takes the place of others is ready before they go.
        await asyncio.gather(*map(self._join, joined))
        for address in found.by_address.keys() - set(addresses):
            self._retire(found.by_address.pop(address))

    async def _join(self, target: Target) -> None:
        await target.check_health()
        self._watches[target] = asyncio.create_task(self._watch(target))

    def _retire(self, target: Target) -> None:
        logger.info("target %s is left out: its source has it no longer", target.address)
        self.all = tuple(other for other in self.all if other is not target)
        self._watches.pop(target).cancel()
        self._leaving[target] = leaving = asyncio.create_task(target.close_when_unused())
        leaving.add_done_callback(lambda _: self._leaving.pop(target, None))

    async def _watch(self, target: Target) -> None:
        while True:
            # What a start takes is waited for by people; it is answered by a process that does nothing else yet.
            # Chosen: less than a hundredth of a start on a GPU, 35 s.
            pause = min(0.25, self._health_seconds) if target.starts else self._health_seconds
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(target.recheck.wait(), pause)
                target.recheck.clear()
                # One that drains still answers for a moment.
                await asyncio.sleep(min(0.2, self._health_seconds))
            await target.check_health()
