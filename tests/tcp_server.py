"""A TCP server of a test, of which nothing is left when the test ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable


@contextlib.asynccontextmanager
async def answering(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The address, HOST:PORT, at which each connection is answered and then closed.

    A client that connects again at the test's end has nobody read what it sends; its connection is closed with the
    server, as asyncio's own server does from Python 3.12.1 only when it is asked to.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answer(reader, writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(answered(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        # A task that is cancelled before its first step closes nothing.
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        # What the system has accepted already becomes a connection in the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
