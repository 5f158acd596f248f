"""Frames between two processes: cut wherever a read ends, and written whole and in order however little is taken."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from waits import HUNG_SECONDS

from outrider.processes import outbox as outboxes
from outrider.processes.framing import LENGTH_BYTES, FrameCutter, framed, framed_parts, parts_of
from outrider.processes.outbox import Outbox, behind

# One empty in between, one at the end.
BUFFERS = (b"abc", b"", b"d", b"efghi", b"")
WHOLE = b"".join(BUFFERS)


class Socket:
    """A socket that takes these numbers of bytes, one after the other, without waiting, and everything if it may wait.
    0 means that it is full."""

    def __init__(self, takes: Sequence[int]) -> None:
        self._takes = iter(takes)
        self.taken = bytearray()
        self.most_buffers = 0
        self.may_write = threading.Event()

    def sendmsg(self, buffers: Sequence[bytes | memoryview], _ancillary: Sequence[object], flags: int) -> int:
        data = b"".join(buffers)
        self.most_buffers = max(self.most_buffers, len(buffers))
        if flags & socket.MSG_DONTWAIT:
            data = data[: next(self._takes, 0)]
            if not data:
                raise BlockingIOError
        else:
            assert self.may_write.wait(HUNG_SECONDS)
        self.taken += data
        return len(data)


def outbox_of(fake: object) -> Outbox:
    return Outbox(fake)  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # As small as the kernel grants.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        yield ours, theirs


@pytest.mark.parametrize("count", range(len(WHOLE) + 1))
def test_what_is_left_is_the_same_bytes_uncopied(count: int) -> None:
    left = behind(BUFFERS, count)
    assert b"".join(left) == WHOLE[count:]
    for one in left:
        assert any(one is buffer or (isinstance(one, memoryview) and one.obj is buffer) for buffer in BUFFERS)


@pytest.mark.parametrize("taken", range(len(WHOLE) + 1))
@pytest.mark.parametrize("then", [0, 1, 3])
def test_a_frame_is_taken_up_at_every_byte(taken: int, then: int) -> None:
    fake = Socket([taken, then])
    outbox = outbox_of(fake)
    outbox.send(*BUFFERS)
    outbox.send(b"next")
    missing = max(0, len(WHOLE) - taken - (then if taken else 0))
    # The frame behind one that waits, waits too, even where the socket would take it.
    assert outbox.waiting_bytes == (missing + 4 if missing else 4 - (then if taken == len(WHOLE) else 0))
    fake.may_write.set()
    assert outbox.flush(10.0) and outbox.waiting_bytes == 0
    assert fake.taken == WHOLE + b"next"
    outbox.close()


def test_more_buffers_than_a_system_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "_MAX_BUFFERS", 3)
    fake = Socket([100, 2, 0])
    fake.may_write.set()
    outbox = outbox_of(fake)
    outbox.send(*(bytes([number]) for number in range(20)))
    assert outbox.flush(10.0)
    assert fake.taken == bytes(range(20)) and fake.most_buffers == 3
    outbox.close()


def test_the_kernel_takes_as_many_buffers_as_it_says(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    outbox, frame = Outbox(ours), [b"x"] * 3000
    outbox.send(*frame)
    received = b""
    while len(received) < len(frame):
        received += theirs.recv(1 << 16)
    assert received == b"x" * 3000 and outbox.flush(10.0)
    outbox.close()


def test_large_frames_arrive_whole_and_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    """From several threads, through a buffer far smaller than a frame, to a reader that is slow at times."""
    ours, theirs = pair
    outbox, dice = Outbox(ours), random.Random(5)
    sizes = [(0, 3, 70_000, 1), (1,), (300_000, 0), (5, 5), (1 << 20, 40_000)] * 4

    def send(sender: int) -> None:
        for number, each in enumerate(sizes):
            parts = [bytes([sender]) * size for size in each]
            outbox.send(*framed_parts(bytes([sender, number]), parts))

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(3)]
    for thread in senders:
        thread.start()
    cutter, numbers = FrameCutter(), [itertools.count() for _ in senders]
    left = len(senders) * len(sizes)
    while left:
        if dice.random() < 0.02:
            time.sleep(0.001)
        for body in cutter.feed(theirs.recv(dice.choice([100, 5000, 1 << 18]))):
            first, *parts = parts_of(body)
            sender, number = first
            assert number == next(numbers[sender])
            assert [bytes(part) for part in parts] == [bytes([sender]) * size for size in sizes[number]]
            left -= 1
    for thread in senders:
        thread.join()
    assert outbox.flush(10.0) and outbox.waiting_bytes == 0
    outbox.close()


def test_frames_to_a_closed_socket_are_dropped(pair: tuple[socket.socket, socket.socket]) -> None:
    """Those that wait when it closes, and those that come later; the sender never notices."""
    ours, theirs = pair
    outbox = Outbox(ours)
    outbox.send(bytes(1 << 20), bytes(1 << 20))
    assert outbox.waiting_bytes > 1 << 20
    theirs.close()
    assert outbox.flush(10.0) and outbox.waiting_bytes == 0
    outbox.send(b"more", b"of it")
    assert outbox.waiting_bytes == 0
    outbox.close()


@pytest.mark.parametrize("read", [1, 2, 5, 13, 10_000])
def test_frames_are_cut_into_what_was_framed(read: int) -> None:
    dice = random.Random(read)
    bodies = [dice.randbytes(dice.choice([0, 1, 3, 4, 5, 200, 3000])) for _ in range(40)]
    stream, cutter = b"".join(map(framed, bodies)), FrameCutter()
    found = [body for at in range(0, len(stream), read) for body in cutter.feed(stream[at : at + read])]
    # Bodies stay valid while later ones are cut.
    assert found == bodies


@pytest.mark.parametrize("parts", [[b""], [b"a"], [b"first", b"", b"x" * 300, b""]], ids=len)
def test_parts_come_as_they_were(parts: list[bytes]) -> None:
    frame = framed_parts(parts[0], parts[1:])
    assert all(sent is part for sent, part in zip(frame[1:], parts[1:], strict=True))
    (body,) = FrameCutter().feed(b"".join(frame))
    assert parts_of(body) == parts


def test_a_body_without_its_parts_is_refused() -> None:
    body = b"".join(framed_parts(b"first", [b"second"]))[LENGTH_BYTES:]
    for end in range(len(body)):
        with pytest.raises(ValueError, match="a body of"):
            parts_of(body[:end])
    with pytest.raises(ValueError, match="a body of"):
        parts_of(body + b"!")
    with pytest.raises(ValueError, match="no table of 0 parts"):
        parts_of(bytes(4))
    with pytest.raises(ValueError, match="no table"):
        parts_of(b"\xff" * 40)
