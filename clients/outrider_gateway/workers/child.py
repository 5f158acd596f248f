"""A worker as its parent sees it: its process, its socket for messages, and its socket for connections."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from typing import cast

from outrider.processes.children import exit_status, start_child
from outrider.processes.framing import FrameCutter
from outrider.processes.python import module_command
from outrider_gateway.workers import messages


class WorkerChild(asyncio.Protocol):
    """One worker, from its start to its end."""

    def __init__(self, place: int, on_message: Callable[[WorkerChild, messages.FromWorker], None]) -> None:
        """`on_message` is called with each message of its."""
        self.place = place
        # Whether it takes connections, how many it was handed, and whether it was asked for figures.
        self.serving = False
        self.handed = 0
        self.counting = False
        self.refused = ""
        self._on_message = on_message
        self._frames = FrameCutter()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lane: socket.socket | None = None
        self._closed = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    async def start(self, configure: messages.ConfigureWorker, memory: int) -> None:
        """Start the process, with the descriptor of the shared memory."""
        # Its parent ends it in order, not a terminal's Ctrl-C.
        self._process, own_end = start_child(module_command("outrider_gateway.workers"), own_group=True)
        self._lane, theirs = socket.socketpair()
        self._lane.setblocking(False)
        with theirs:
            socket.send_fds(own_end, [b"\0"], [memory, theirs.fileno()])
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=own_end)
        self.send(configure)

    def send(self, message: messages.ToWorker) -> None:
        """Send a message; nothing to one that has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.pack_for_worker(message))

    def hand_over(self, connection: socket.socket, *, make_room: bool) -> bool:
        """Hand a connection to the worker, which has a descriptor of its own then, and closes an idle one with
        `make_room` if its peer could have no further one. False where it does not take it."""
        if self._lane is None or not self.serving:
            return False
        try:
            mark = messages.MAKES_ROOM if make_room else messages.HANDED
            socket.send_fds(self._lane, [mark], [connection.fileno()])
        except OSError:
            # Its socket is full, or it has ended.
            return False
        self.handed += 1
        return True

    async def ended(self) -> None:
        """Wait until its socket is closed, as it is when the process ends in any way."""
        await self._closed.wait()

    async def status(self) -> int:
        """The exit status of one whose socket is closed."""
        assert self._process is not None, "it was started"
        return await asyncio.to_thread(exit_status, self._process)

    def close(self) -> None:
        """Close the sockets, which ends the process."""
        for one in (self._transport, self._lane):
            if one is not None:
                one.close()

    # `asyncio.Protocol`.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in map(messages.for_parent, self._frames.feed(data)):
            if isinstance(message, messages.Serving):
                self.serving = True
            elif isinstance(message, messages.WorkerRefused):
                self.refused = message.reason
            self._on_message(self, message)

    def connection_lost(self, _exc: Exception | None) -> None:
        self.serving = False
        if self._lane is not None:
            self._lane.close()
        self._closed.set()
