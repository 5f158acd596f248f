"""Frames read ahead: all that came are taken at once, in order, and an end or an error is heard of behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from draft_service.frame_reader import Inbox


class Frame:
    """A message, by its name and size in bytes."""

    def __init__(self, name: object, size: int = 1) -> None:
        self.name, self.size = name, size

    def ByteSize(self) -> int:
        return self.size


def names(frames: list[Frame]) -> list[object]:
    return [frame.name for frame in frames]


def source(frames: asyncio.Queue[object]) -> Callable[[], Awaitable[object]]:
    async def read() -> object:
        frame = await frames.get()
        if isinstance(frame, Exception):
            raise frame
        return frame

    return read


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_that_came_is_taken_at_once() -> None:
    frames: asyncio.Queue[object] = asyncio.Queue()
    async with Inbox(source(frames)) as inbox:
        for number in range(3):
            frames.put_nowait(Frame(number))
        await settle()
        assert inbox.waiting
        assert names(await inbox.next_frames()) == [0, 1, 2]
        assert not inbox.waiting
        later = asyncio.create_task(inbox.next_frames())
        await settle()
        assert not later.done()
        frames.put_nowait(Frame(3))
        assert names(await later) == [3]


async def test_the_end_comes_behind_the_last_frame() -> None:
    frames: asyncio.Queue[object] = asyncio.Queue()
    async with Inbox(source(frames)) as inbox:
        frames.put_nowait(Frame("last"))
        frames.put_nowait(grpc.aio.EOF)
        await settle()
        assert names(await inbox.next_frames()) == ["last"]
        assert await inbox.next_frames() == []


async def test_what_reading_raises_is_raised() -> None:
    frames: asyncio.Queue[object] = asyncio.Queue()
    async with Inbox(source(frames)) as inbox:
        frames.put_nowait(ConnectionError("gone"))
        with pytest.raises(ConnectionError, match="gone"):
            await inbox.next_frames()


async def test_no_more_than_a_bounded_number_of_frames_is_read_ahead() -> None:
    frames: asyncio.Queue[object] = asyncio.Queue()
    for number in range(1000):
        frames.put_nowait(Frame(number))
    async with Inbox(source(frames)) as inbox:
        await settle()
        for _ in range(400):
            await asyncio.sleep(0)
        assert frames.qsize() > 900
        taken: list[object] = []
        while len(taken) < 1000:
            taken += names(await inbox.next_frames())
        assert taken == list(range(1000))


async def test_what_waits_is_bounded_by_its_bytes() -> None:
    """Whoever sends large frames waits until those that came are handled."""
    frames: asyncio.Queue[object] = asyncio.Queue()
    async with Inbox(source(frames)) as inbox:
        for number in range(10):
            frames.put_nowait(Frame(number, 3 << 20))
        await settle()
        assert names(await inbox.next_frames()) == [0, 1, 2]
        await settle()
        assert names(await inbox.next_frames()) == [3, 4, 5]
