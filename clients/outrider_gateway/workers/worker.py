"""A worker: the gateway over connections that its parent accepts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from outrider.admission.pacing import RefusalPace
from outrider.processes.framing import first_body
from outrider.runtime import configure_logging, end_tasks, settled
from outrider.settings import SettingsError
from outrider_gateway.server import GatewayServer
from outrider_gateway.shared_state import SharedState
from outrider_gateway.workers import messages
from outrider_gateway.workers.link import ParentLink
from outrider_gateway.workers.places import PlacesInMemory
from outrider_gateway.workers.shared_memory import SharedMemory


class Handed:
    """The socket on which the parent hands connections over, one with each byte, which is `MAKES_ROOM` where another
    worker is to have the next one."""

    def __init__(self, lane: socket.socket, server: GatewayServer, places: PlacesInMemory, place: int) -> None:
        self._lane, self._server, self._places, self._place = lane, server, places, place
        self._adopting: set[asyncio.Task[None]] = set()

    def take_all(self) -> None:
        """Answer on the connections that were handed over by now."""
        while True:
            try:
                mark, descriptors, _, _ = socket.recv_fds(self._lane, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                mark, descriptors = b"", []
            if not mark:
                # The parent has ended, which its other socket tells as well.
                asyncio.get_running_loop().remove_reader(self._lane)
                return
            self._places.adopted.integers[self._place] += 1
            for descriptor in descriptors:
                task = asyncio.create_task(self._adopt(socket.socket(fileno=descriptor), mark == messages.MAKES_ROOM))
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket, make_room: bool) -> None:
        connection.setblocking(False)
        try:
            await self._server.adopt(connection, make_room=make_room)
        except OSError:
            # It is gone, or its handshake failed.
            connection.close()


async def serve_worker(
    link_socket: socket.socket, lane: socket.socket, memory: int, own: messages.ConfigureWorker
) -> int:
    """Serve until the parent says so, or has ended. `memory` is the descriptor of shared memory. Returns the process's
    exit status."""
    loop, config = asyncio.get_running_loop(), own.config
    shared = SharedMemory(memory, own.memory_bytes)
    places = PlacesInMemory.of(config, own.workers, own.place, shared, own.secret)
    handed: Handed | None = None
    drained: list[bool] = []

    def drain(at_once: bool) -> None:
        drained.append(at_once)
        if handed is not None:
            handed.take_all()
            server.drain(at_once=at_once)

    link = ParentLink(drain)
    transport, _ = await loop.create_unix_connection(lambda: link, sock=link_socket)
    pace = RefusalPace(config.max_connections, places.refusals)
    server = GatewayServer(config, own.access, SharedState(places.places, pace, link, link.metrics_page))
    try:
        async with server:
            handed = Handed(lane, server, places, own.place)
            loop.add_reader(lane, handed.take_all)
            counting = asyncio.create_task(link.count(server.application.metrics.figures))
            link.send(messages.Serving())
            if drained:
                # While it started.
                server.drain(at_once=drained[-1])
            with settled():
                await server.ended()
            loop.remove_reader(lane)
            await end_tasks(counting)
            link.send(messages.Counted(server.application.metrics.figures()))
    except SettingsError as error:
        link.send(messages.WorkerRefused(str(error)))
        return 2
    finally:
        transport.close()
    return 0


def configured(link_socket: socket.socket) -> tuple[messages.ConfigureWorker, socket.socket, int]:
    """What the parent sends first: the settings, the socket of connections, and the descriptor of shared memory."""
    _, (memory, lane), _, _ = socket.recv_fds(link_socket, 1, 2)
    if not (body := first_body(link_socket)):
        raise EOFError("the parent has ended")
    own = messages.for_worker(body)
    assert isinstance(own, messages.ConfigureWorker), "the first message"
    connections = socket.socket(fileno=lane)
    for one in (link_socket, connections):
        one.setblocking(False)
    configure_logging(own.config.log_level)
    if own.place:
        # Of what every worker would say alike, the first says it.
        for name in ("outrider_gateway.targets", "uvicorn.error"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    return own, connections, memory


def main(descriptor: int) -> int:
    """Serve as a worker whose socket to its parent has this number."""
    from outrider.runtime import run

    with contextlib.suppress(EOFError), socket.socket(fileno=descriptor) as link_socket:
        own, lane, memory = configured(link_socket)
        return run(serve_worker(link_socket, lane, memory, own))
    return 0
