"""Frames of a stream, read ahead of whoever handles them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import grpc

# Frames that wait at most; then the transport's flow control holds the target back. Chosen, not measured. Fewer than a
# target sends during one call of the drafter, a frame or two a step, would be drafted for in turn again.
_READ_AHEAD = 64
# Bytes of frames that wait, but for the last, which may be as large as a message may: features of a long prompt come at
# 2 MiB a frame. Chosen, not measured.
_READ_AHEAD_BYTES = 8 << 20
# Bytes of frames that are handled at a stretch, but for a single larger one. A frame of one step is far smaller.
_SLICE_BYTES = 64 << 10


class Inbox:
    """Reads a stream for as long as it is entered, so that all that has come by now can be taken at once.

    A drafter that is slower than its target would otherwise draft for each commit in turn, ever further behind.
    """

    def __init__(self, read: Callable[[], Awaitable[Any]], size_of: Callable[[Any], int]) -> None:
        """`read` gives the next frame, and gRPC's EOF behind the last; `size_of` a frame's bytes."""
        self._read = read
        self._size_of = size_of
        self._queue: asyncio.Queue[Any] = asyncio.Queue(_READ_AHEAD)
        # Of the frames that wait.
        self._bytes = 0
        self._taken = asyncio.Event()

    async def __aenter__(self) -> Inbox:
        self._reading = asyncio.create_task(self._read_ahead())
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    @property
    def waiting(self) -> bool:
        """Whether a frame has come that was not taken."""
        return not self._queue.empty()

    async def take(self) -> list[Any]:
        """Every frame that has come, one at least; none once the stream has ended.

        Raises what reading raised; frames before that are dropped, since their stream is over.
        """
        frames: list[Any] = []
        one = await self._queue.get()
        self._bytes = 0
        self._taken.set()
        while True:
            if isinstance(one, Exception):
                raise one
            if one is grpc.aio.EOF:
                if frames:
                    self._queue.put_nowait(one)
                return frames
            frames.append(one)
            if self._queue.empty():
                return frames
            one = self._queue.get_nowait()

    async def _read_ahead(self) -> None:
        try:
            while (frame := await self._read()) is not grpc.aio.EOF:
                self._bytes += self._size_of(frame)
                await self._queue.put(frame)
                while self._bytes > _READ_AHEAD_BYTES:
                    self._taken.clear()
                    await self._taken.wait()
            last: Any = grpc.aio.EOF
        # `take` raises it: in a task of its own it would be lost, and `take` would wait for ever.
        except Exception as error:
            last = error
        await self._queue.put(last)


def slices(frames: Iterable[Any]) -> Iterator[list[Any]]:
    """The frames in order, in lists that do not take long to handle: what one stream sends holds no other one up."""
    some: list[Any] = []
    size = 0
    for frame in frames:
        some.append(frame)
        size += frame.ByteSize()
        if size > _SLICE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
