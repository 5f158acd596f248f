"""Frames of a stream, read ahead of their handler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc


class Inbox:
    """Reads a stream while it is entered, so that all frames that have arrived can be taken at once. A drafter that is
    slower than its target would otherwise draft for each commit in turn, ever further behind."""

    def __init__(self, read: Callable[[], Awaitable[Any]]) -> None:
        """`read` returns the next message, and gRPC's EOF after the last."""
        self._read = read
        # Most waiting frames; then the transport's flow control holds the target back. Chosen, not measured: more than
        # a target sends during one call of the drafter, a frame or two per step.
        self._queue: asyncio.Queue[Any] = asyncio.Queue(64)
        # Of the waiting frames.
        self._bytes = 0
        self._taken = asyncio.Event()

    async def __aenter__(self) -> Inbox:
        self._reading = asyncio.create_task(self._read_ahead())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    @property
    def waiting(self) -> bool:
        """Whether a frame has arrived that was not taken."""
        return not self._queue.empty()

    def end(self, error: Exception) -> None:
        """Read no more: waiting frames are dropped, and the next `next_frames` raises `error`."""
        self._reading.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    async def next_frames(self) -> list[Any]:
        """Every frame that has arrived, at least one; none once the stream has ended. Raises what reading raised;
        earlier frames are then dropped, since their stream is over."""
        frames = [await self._queue.get()]
        while not self._queue.empty():
            frames.append(self._queue.get_nowait())
        self._bytes = 0
        self._taken.set()
        # What ends a stream is the last in the queue.
        if isinstance(frames[-1], Exception):
            raise frames[-1]
        if frames[-1] is grpc.aio.EOF:
            last = frames.pop()
            if frames:
                self._queue.put_nowait(last)
        return frames

    async def _read_ahead(self) -> None:
        try:
            while (frame := await self._read()) is not grpc.aio.EOF:
                self._bytes += frame.ByteSize()
                await self._queue.put(frame)
                # Bytes of waiting frames, without the last: features of a long prompt come at 2 MiB a frame. Chosen,
                # not measured.
                while self._bytes > 8 << 20:
                    self._taken.clear()
                    await self._taken.wait()
            last: Any = grpc.aio.EOF
        # Raised by `next_frames`: in this task it would be lost, and `next_frames` would wait for ever.
        except Exception as error:
            last = error
        await self._queue.put(last)


def slices(frames: Iterable[Any]) -> Iterator[list[Any]]:
    """The frames in order, in chunks that are handled quickly, so that one stream does not hold up the others."""
    chunk: list[Any] = []
    size = 0
    for frame in frames:
        chunk.append(frame)
        size += frame.ByteSize()
        # Bytes of frames that are handled without a pause, or a single larger frame. A frame of one step is far
        # smaller.
        if size > 64 << 10:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
