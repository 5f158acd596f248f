"""A TCP proxy on loopback that a test can make as bad as a network: cut, reset, stall, delay, throttle, half-open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

_CHUNK = 1 << 16


@dataclass(eq=False)
class _Connection:
    """Two pairs of streams; `lost`, what is sent arrives nowhere, and nobody hears of it."""

    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    lost: bool = False

    def close(self, *, reset: bool) -> None:
        for writer in self.writers:
            if reset:
                sock = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    # What is left is thrown away, and the peer gets RST instead of FIN.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()


class Proxy:
    """From a loopback port to a Unix socket. Everything runs on the event loop that `start` was called on."""

    def __init__(self, upstream: str) -> None:
        """`upstream` is the path of a Unix socket. It may be changed: new connections go to the new one."""
        self.upstream = upstream
        self.port = 0
        # Seconds that each piece takes longer, and bytes a second, 0 for any.
        self.delay = 0.0
        self.rate = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        # One for each connection.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What may befall it.

    def cut(self) -> None:
        """Close every connection."""
        self._close_all(reset=False)

    def reset(self) -> None:
        """Reset every connection."""
        self._close_all(reset=True)

    def lose(self) -> None:
        """Leave every connection half open: what either end sends from now on is lost, and new ones are sound."""
        for connection in self._connections:
            connection.lost = True

    def stall(self) -> None:
        """Hold everything back until `heal`."""
        self._flowing.clear()

    def heal(self) -> None:
        """Let everything through again, but for what is lost."""
        self._flowing.set()
        self.delay = self.rate = 0.0

    def _close_all(self, *, reset: bool) -> None:
        connections, self._connections = self._connections, set()
        for connection in connections:
            connection.close(reset=reset)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Known at once: what is cut or stopped before its task has begun is closed as well.
        connection = _Connection([writer])
        self._connections.add(connection)
        task = asyncio.ensure_future(self._pass_on(connection, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            try:
                theirs, ours = await asyncio.open_unix_connection(self.upstream)
            except OSError:
                return
            connection.writers.append(ours)
            if connection not in self._connections:
                # Cut while it was being made.
                ours.close()
                return
            await asyncio.gather(self._pump(connection, reader, ours), self._pump(connection, theirs, writer))
        finally:
            self._connections.discard(connection)
            connection.close(reset=False)

    async def _pump(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            while data := await reader.read(_CHUNK):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
                await self._flowing.wait()
                if connection.lost:
                    continue
                writer.write(data)
                await writer.drain()
        if not connection.lost:
            with contextlib.suppress(ConnectionError, OSError):
                writer.close()

    def every(self) -> dict[str, Callable[[], None]]:
        """The faults of a moment, by name."""
        return {"cut": self.cut, "reset": self.reset, "half-open": self.lose}
