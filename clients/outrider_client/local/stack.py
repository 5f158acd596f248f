"""Services on private sockets, for as long as a demo or a benchmark needs them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from outrider.processes.python import module_command
from outrider_client.client import Client
from outrider_client.connection import AsyncClosing
from outrider_client.failures import ServiceUnreachable
from outrider_client.local.process import Child, ServiceDied, ServiceSlow, wait_serving

# Chosen.
_STOP_SECONDS = 5.0


class ServiceFailed(Exception):
    """A service did not start, or is of no use; `tail` is the end of its log."""

    def __init__(self, cause: Exception, tail: Sequence[str] = ()) -> None:
        super().__init__(str(cause))
        self.tail = tuple(tail)


def given(**flags: str) -> tuple[str, ...]:
    """Flags with a value; empty ones are left to the service's own settings."""
    return tuple(word for name, value in flags.items() if value for word in (f"--{name}", value))


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A directory that only this user can enter, for sockets and settings; gone afterwards."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory(
        prefix="outrider-", dir=base if base and os.path.isdir(base) else None, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


class Stack(AsyncClosing):
    """Draft and target processes, by name. Leaving the `async with` block stops them all.

    Example:
        async with Stack(directory) as stack:
            draft = await stack.start("draft", "draft_service", "--drafter", "trie")
            target = await stack.start("target", "target_service", "--draft", draft)
            async with Client.connect(target) as client: ...
    """

    def __init__(self, directory: Path) -> None:
        """`directory` holds sockets, and settings that services are started with; see `private_directory`."""
        self.directory = directory
        # By name, each with the end of its log.
        self._children: dict[str, tuple[Child, deque[str]]] = {}

    async def close(self) -> None:
        # Targets were started last, and stop first: they would report a lost draft otherwise.
        for child, _tail in reversed(self._children.values()):
            if child.status is None:
                await child.stop(_STOP_SECONDS)

    @contextlib.asynccontextmanager
    async def explaining(self) -> AsyncIterator[None]:
        """Raise `ServiceFailed`, with the log, for a connection that was lost because a service died."""
        try:
            yield
        except ServiceUnreachable as error:
            # A socket closes a moment before its process has ended.
            await asyncio.sleep(0.5)
            for child, tail in self._children.values():
                if child.status is not None:
                    raise ServiceFailed(ServiceDied(child.name, child.status), tail) from error
            raise

    def address(self, name: str) -> str:
        """Where a service of this name listens, once it is started."""
        return f"unix:{self.directory / name}.sock"

    async def stop(self, name: str) -> None:
        """Stop the service of this name; another may then be started under it."""
        if name in self._children:
            child, _tail = self._children.pop(name)
            await child.stop(_STOP_SECONDS)

    async def start(self, name: str, service: str, *flags: str) -> str:
        """Start a service and return its address once it is healthy. Raises `ServiceFailed`."""
        address = self.address(name)
        # What is shown of a service that failed.
        tail: deque[str] = deque(maxlen=30)
        child = await Child.start(name, module_command(service, "--listen", address, *flags), tail.append)
        self._children[name] = child, tail
        try:
            # Chosen: a large model may load for minutes.
            await wait_serving(child, address, 600.0)
        except (ServiceDied, ServiceSlow) as error:
            raise ServiceFailed(error, tail) from error
        return address


@contextlib.asynccontextmanager
async def private_stack() -> AsyncIterator[Stack]:
    """A stack in a private directory, which raises `ServiceFailed` for a connection that a dead service lost."""
    with private_directory() as directory:
        async with Stack(directory) as stack, stack.explaining():
            yield stack


async def wait_for_drafter(client: Client, wanted: str = "") -> str:
    """The name of the target's drafter, once it is reached: any, or the one `wanted`; empty if not within half a
    minute. A target is healthy without its draft, so one that was just started may not have found it yet."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 30.0
    while loop.time() < deadline:
        drafter = (await client.info()).drafter
        if drafter and wanted in ("", drafter):
            return drafter
        await asyncio.sleep(0.1)
    return ""
