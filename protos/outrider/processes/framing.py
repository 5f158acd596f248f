"""Frames on a stream of bytes between two processes of one service: four bytes of length, then the body.

A body may have several parts: a table of their sizes, then the parts. Large ones are sent from where they are.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

LENGTH_BYTES = 4
Buffer = bytes | bytearray | memoryview


def framed(body: bytes) -> bytes:
    """The frame of a body."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def first_body(connection: socket.socket) -> bytes:
    """The body of the next frame, of which all is waited for and nothing behind it read; empty where the other process
    has ended."""
    length = connection.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    return connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)


def framed_parts(first: bytes, others: Sequence[bytes] = ()) -> list[bytes]:
    """The frame of a body with several parts, as buffers to send one after the other. `first`, which should be small,
    is copied behind the table; the others are the buffers that follow."""
    sizes = (len(first), *map(len, others))
    table = struct.pack(f"!{1 + len(sizes)}I", len(sizes), *sizes)
    return [(len(table) + sum(sizes)).to_bytes(LENGTH_BYTES, "big") + table + first, *others]


def parts_of(body: Buffer) -> list[memoryview]:
    """The parts of a body, as views. Raises `ValueError` when its table and its length do not agree."""
    view = memoryview(body)
    (count,) = struct.unpack_from("!I", view) if len(view) >= LENGTH_BYTES else (0,)
    begin = (1 + count) * LENGTH_BYTES
    if not count or begin > len(view):
        raise ValueError(f"a body of {len(view)} bytes has no table of {count} parts")
    parts = []
    for size in struct.unpack_from(f"!{count}I", view, LENGTH_BYTES):
        parts.append(view[begin : begin + size])
        begin += size
    if begin != len(view):
        raise ValueError(f"the parts of a body of {len(view)} bytes end at {begin}")
    return parts


class FrameCutter:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        # The beginning of a frame.
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[memoryview]:
        """The bodies that are complete with `data`, in order, as views of the received bytes."""
        received: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            if _end(self._buffer, 0) > len(self._buffer):
                return []
            # Views of a buffer forbid to change its size, so the next frame gets another.
            received, self._buffer = self._buffer, bytearray()
        view, bodies, begin = memoryview(received), [], 0
        while (end := _end(view, begin)) <= len(view):
            bodies.append(view[begin + LENGTH_BYTES : end])
            begin = end
        if begin < len(view):
            self._buffer += view[begin:]
        return bodies


def _end(data: bytearray | memoryview, begin: int) -> int:
    """Where the frame that begins at `begin` ends, as far as `data` shows: past its end if the length is not whole."""
    start = begin + LENGTH_BYTES
    return start + int.from_bytes(data[begin:start], "big") if start <= len(data) else start
