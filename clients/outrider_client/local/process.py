"""Service processes: started, read line by line, waited for until healthy, and stopped."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider_client.connection import Connection, Tls
from outrider_client.failures import ServiceUnreachable


class ServiceDied(Exception):
    """A service process ended when it should not have."""

    def __init__(self, name: str, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        super().__init__(f"the {name} service {how}")


class ServiceSlow(Exception):
    """A service did not become healthy in time."""


@dataclass
class Child:
    """A child process in its own session, so that Ctrl-C does not reach it directly."""

    name: str
    _process: asyncio.subprocess.Process
    # Reads its output, to the end.
    _reading: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        on_line: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process. Raises `OSError` when that fails. `on_line` is called with every line of its output, without
        the line end; a very long one comes in parts. `environment` is added to this process's."""
        with _without_collection():
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        assert process.stdout is not None
        return cls(name, process, asyncio.create_task(_read_lines(process.stdout, on_line)))

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """The exit status, once its last line has been read."""
        status = await self._process.wait()
        await self._reading
        return status

    async def stop(self, grace: float) -> int:
        """Send SIGTERM, and SIGKILL after `grace` seconds. Returns the exit status."""
        self.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    # Not readline: a progress bar's line may be longer than the reader's limit.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    while piece := await stream.read(8192):
        # Only the new piece may have line ends.
        first, *others = re.split(r"[\r\n]+", decoder.decode(piece))
        *lines, rest = rest + first, *others
        for line in filter(None, lines):
            on_line(line)
        # Characters of a line without an end that are passed on as a line.
        if len(rest) >= 64 * 1024:
            on_line(rest)
            rest = ""
    rest += decoder.decode(b"", final=True)
    if rest:
        on_line(rest)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """While the block runs, Python's garbage collector does not, nor in a child between its fork and its program, where
    handlers of libraries make objects: a collection there may end what belongs to threads that only the parent has.
    gRPC's queue then waits for its thread for ever, and the parent for the child."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _end_with_parent() -> None:
    """Runs in the child: the kernel sends it SIGTERM when its parent dies, even by SIGKILL."""
    # Of prctl(2): the signal that a process gets when its parent ends.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


async def wait_serving(
    child: Child,
    address: str,
    timeout: float,
    token: str = "",
    tls: Tls | None = None,
    on_refused: Callable[[str], None] = lambda _: None,
) -> None:
    """Return once `address` reports SERVING. Raises `ServiceDied` or `ServiceSlow`. `on_refused` is called with the
    cause where no connection can be made for TLS, once for each cause: one that waiting does not change."""
    refused, last = set[str](), ""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    async with Connection(address, token=token, tls=tls) as connection:
        while loop.time() < deadline:
            if child.status is not None:
                raise ServiceDied(child.name, await child.wait())
            # Any other error means that it listens but is not ready, or does not accept the token yet.
            try:
                if await connection.serving(timeout=2.0):
                    return
                last = ""
            except ServiceUnreachable as error:
                last = error.cause
                if error.tls_problem is not None and last not in refused:
                    refused.add(last)
                    on_refused(last)
            except OutriderError as error:
                last = error.message
            await asyncio.sleep(0.1)
        because = f": {last}" if last else ""
        raise ServiceSlow(f"the {child.name} service was not healthy after {timeout:.0f} s{because}")
