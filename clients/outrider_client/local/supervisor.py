"""Services on one machine: a dead draft or gateway is started again, a dead target ends the whole."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider_client.connection import Tls
from outrider_client.local.mps import Mps
from outrider_client.local.process import Child, ServiceDied, ServiceSlow, wait_serving

Emit = Callable[[str, str], None]
# The exit status of a service whose settings cannot work. Another start would change nothing.
SETTINGS_REFUSED = 2


@dataclass(frozen=True)
class ServiceCommand:
    """How to start a service, and where it will answer. `token` and `tls` are for asking for its health."""

    name: str
    argv: Sequence[str]
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)
    token: str = ""
    tls: Tls | None = None


@dataclass(frozen=True)
class RestartTimes:
    """Times in seconds. Back-off doubles from `first_backoff` to `longest_backoff`, and starts over after a
    life of `healthy_after`."""

    start: float = 600.0
    stop: float = 35.0
    first_backoff: float = 0.5
    longest_backoff: float = 30.0
    healthy_after: float = 30.0


class Supervisor:
    """Runs a target and what stands beside it: a draft, whose death costs speed and nothing else, and a gateway."""

    def __init__(
        self,
        target: ServiceCommand,
        draft: ServiceCommand | None,
        emit: Emit,
        times: RestartTimes | None = None,
        gateway: ServiceCommand | None = None,
        mps: Mps | None = None,
    ) -> None:
        """`emit(name, line)` gets every line of a service, and our own under the name "outrider". `mps` runs from
        before the first service until after the last."""
        self._target = target
        self._beside = [command for command in (draft, gateway) if command is not None]
        self._mps = mps
        self._emit = emit
        self._times = times or RestartTimes()
        self._stopping = asyncio.Event()
        self._children: dict[str, Child] = {}
        # What the whole ends with when it is asked to stop.
        self._status = 0

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Run until a signal, the target's end, or settings that something beside it refuses. Returns the exit status:
        0 after a signal, else non-zero."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        kept: dict[str, asyncio.Task[None]] = {}
        try:
            if self._mps is not None:
                await self._start_mps(self._mps)
            if self._stopping.is_set():
                return self._status
            kept |= {command.name: asyncio.create_task(self._keep(command)) for command in self._beside}
            return await self._run_target(on_ready)
        finally:
            self._stopping.set()
            for name, task in kept.items():
                # It may be between two lives, with nothing to wait for but its back-off.
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                await self._stop(name)
            if self._mps is not None:
                await self._mps.stop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._emit("outrider", "stopping at once")
            for child in self._children.values():
                child.kill()
            return
        self._emit("outrider", "stopping: running requests may finish; once more stops at once")
        self._stopping.set()

    async def _start_mps(self, mps: Mps) -> None:
        """Return once it has started or cannot, or somebody asks to stop meanwhile."""
        starting = asyncio.create_task(mps.start())
        asked = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
        finally:
            for task in (starting, asked):
                task.cancel()
            await asyncio.gather(starting, asked, return_exceptions=True)

    async def _start(self, command: ServiceCommand) -> Child:
        environment = {**command.environment, **(self._mps.environment(command.name) if self._mps else {})}
        child = Child(command.name, command.argv, lambda line: self._emit(command.name, line), environment)
        self._children[command.name] = child
        await child.start()
        return child

    async def _stop(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None and child.status is None:
            await child.stop(self._times.stop)

    async def _run_target(self, on_ready: Callable[[], None]) -> int:
        child = await self._start(self._target)
        died = asyncio.create_task(child.wait())
        asked = asyncio.create_task(self._stopping.wait())
        ready = asyncio.create_task(self._when_ready(child, on_ready))
        try:
            await asyncio.wait({died, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                # The gateway first, whose answers come from the target; then the target, which its draft still helps.
                await self._stop("gateway")
                await self._stop("target")
                return self._status
            status = died.result()
            self._emit("outrider", str(ServiceDied("target", status)))
            return status if status > 0 else 1
        finally:
            for task in (died, asked, ready):
                task.cancel()
            await asyncio.gather(died, asked, ready, return_exceptions=True)

    async def _when_ready(self, target: Child, on_ready: Callable[[], None]) -> None:
        try:
            await wait_serving(target, self._target.address, self._times.start, self._target.token, self._target.tls)
        except ServiceDied:
            return
        except ServiceSlow as error:
            self._emit("outrider", str(error))
            return
        on_ready()

    async def _keep(self, command: ServiceCommand) -> None:
        backoff = self._times.first_backoff
        loop = asyncio.get_running_loop()
        first = True
        while not self._stopping.is_set():
            born = loop.time()
            status = await (await self._start(command)).wait()
            if self._stopping.is_set():
                return
            if first and status == SETTINGS_REFUSED:
                self._emit("outrider", f"the {command.name} service refuses its settings, see above")
                self._status = status
                self._stopping.set()
                return
            first = False
            if loop.time() - born >= self._times.healthy_after:
                backoff = self._times.first_backoff
            self._emit("outrider", f"{ServiceDied(command.name, status)}; starting it again in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._times.longest_backoff)
