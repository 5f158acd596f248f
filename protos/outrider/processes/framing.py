"""Frames on a stream of bytes between two processes of one service: four bytes of length, then the body."""

from __future__ import annotations

LENGTH_BYTES = 4


def framed(body: bytes) -> bytes:
    """The frame of a body."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameCutter:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytearray]:
        """The bodies that are complete with `data`, in order."""
        self._buffer += data
        bodies: list[bytearray] = []
        begin = 0
        while (start := begin + LENGTH_BYTES) <= len(self._buffer):
            end = start + int.from_bytes(self._buffer[begin:start], "big")
            if end > len(self._buffer):
                break
            bodies.append(self._buffer[start:end])
            begin = end
        del self._buffer[:begin]
        return bodies
