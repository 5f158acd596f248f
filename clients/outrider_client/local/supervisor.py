"""Services on one machine: a draft or gateway that dies is restarted; when the target dies, all stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from outrider.runtime import end_tasks, signal_handlers
from outrider_client.connection import Tls
from outrider_client.local.process import Child, ServiceDied, ServiceSlow, wait_serving

Emit = Callable[[str, str], None]
# For a service to become healthy, and to end after SIGTERM.
START_SECONDS, STOP_SECONDS = 600.0, 35.0
# Back-off doubles from the first to the longest, and is reset once a service ran for so long.
FIRST_BACKOFF, LONGEST_BACKOFF, HEALTHY_AFTER = 0.5, 30.0, 30.0


@dataclass(frozen=True)
class ServiceCommand:
    """How to start a service, and its address. `token` and `tls` are for its health checks."""

    name: str
    argv: Sequence[str]
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)
    token: str = ""
    tls: Tls | None = None


@dataclass
class Supervisor:
    """Runs a target, and beside it a draft, whose death costs only speed, and a gateway.

    `emit(name, line)` receives every line of a service, and the supervisor's under the name "outrider".
    """

    target: ServiceCommand
    draft: ServiceCommand | None
    emit: Emit
    gateway: ServiceCommand | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _children: dict[str, Child] = field(default_factory=dict)
    # The exit status after a stop.
    _status: int = 0

    async def supervise(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Run until a signal, the target's end, or invalid settings of draft or gateway. Returns the exit status: 0
        after a signal, else non-zero. Raises `OSError` where a service cannot be started for the first time."""
        handlers = {signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal}
        # Ignored under nohup.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._on_signal if sys.stdin.isatty() else self._on_hangup
        kept: dict[str, asyncio.Task[None]] = {}
        with signal_handlers(handlers):
            try:
                beside = filter(None, (self.draft, self.gateway))
                kept |= {command.name: asyncio.create_task(self._keep(command)) for command in beside}
                return await self._run_target(on_ready)
            finally:
                self._stopping.set()
                # They may be waiting for their back-off.
                await end_tasks(*kept.values())
                for name in kept:
                    await self._stop(name)
                for task in kept.values():
                    if not task.cancelled():
                        # Raises what prevented a first start.
                        task.result()

    def _on_hangup(self) -> None:
        """Without a terminal, whose end it would be: have the services read their tokens again."""
        for name, child in self._children.items():
            # The gateway has none.
            if name != "gateway":
                child.send_signal(signal.SIGHUP)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self.emit("outrider", "stopping at once")
            for child in self._children.values():
                child.send_signal(signal.SIGKILL)
            return
        self.emit("outrider", "stopping: running requests may finish; once more stops at once")
        self._stopping.set()

    async def _start(self, command: ServiceCommand) -> Child:
        emit = partial(self.emit, command.name)
        child = await Child.start(command.name, command.argv, emit, command.environment)
        self._children[command.name] = child
        return child

    async def _stop(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None and child.status is None:
            await child.stop(STOP_SECONDS)

    async def _run_target(self, on_ready: Callable[[], None]) -> int:
        child = await self._start(self.target)
        died = asyncio.create_task(child.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        ready = asyncio.create_task(self._when_ready(child, on_ready))
        try:
            await asyncio.wait({died, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                # The gateway before the target that it forwards to, and the target before its draft.
                await self._stop("gateway")
                await self._stop("target")
                return self._status
            status = died.result()
            self.emit("outrider", str(ServiceDied("target", status)))
            return status if status > 0 else 1
        finally:
            await end_tasks(died, stopping, ready)

    async def _when_ready(self, target: Child, on_ready: Callable[[], None]) -> None:
        command = self.target

        def refused(cause: str) -> None:
            asks = "with the TLS settings of [client]" if command.tls else "without TLS, as [client] has none"
            self.emit("outrider", f"waiting for the target on {command.address}, asked {asks}: {cause}")

        try:
            await wait_serving(target, command.address, START_SECONDS, command.token, command.tls, refused)
        except ServiceDied:
            # `_run_target` reports it.
            return
        except ServiceSlow as error:
            self.emit("outrider", str(error))
        else:
            on_ready()

    async def _keep(self, command: ServiceCommand) -> None:
        """Run a service, and restart it whenever it ends."""
        backoff = FIRST_BACKOFF
        loop = asyncio.get_running_loop()
        first = True
        while not self._stopping.is_set():
            started = loop.time()
            try:
                child = await self._start(command)
            except OSError as error:
                if first:
                    self._stopping.set()
                    raise
                # Such as too many processes, which may pass.
                ended = f"the {command.name} service cannot be started: {error.strerror or error}"
            else:
                status = await child.wait()
                if self._stopping.is_set():
                    return
                # Of invalid settings, where a restart would not help.
                if first and status == 2:
                    self.emit("outrider", f"the {command.name} service refuses its settings, see above")
                    self._status = status
                    self._stopping.set()
                    return
                ended = str(ServiceDied(command.name, status))
            first = False
            if loop.time() - started >= HEALTHY_AFTER:
                backoff = FIRST_BACKOFF
            self.emit("outrider", f"{ended}; starting it again in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
