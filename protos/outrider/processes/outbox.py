"""A non-blocking sender of frames to another process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence

from outrider.processes.framing import Buffer

# Buffers that one system call takes: `IOV_MAX` of POSIX, 1,024 on Linux.
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


class Outbox:
    """Writes at once what the socket takes; a thread writes the rest. Any thread may send. A usual frame is written by
    the sender's own thread, which costs one system call: passing it to another thread would make both wait for the
    interpreter's lock. Only the kernel copies a frame."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection` is a blocking socket."""
        self._connection = connection
        # What is not written yet, frame by frame.
        self._waiting: deque[Sequence[Buffer]] = deque()
        self._closed = False
        self._changed = threading.Condition()
        # Of frames that are not written yet.
        self.waiting_bytes = 0
        threading.Thread(target=self._write, name="outbox", daemon=True).start()

    def send(self, *buffers: Buffer) -> None:
        """Send a frame, given as the buffers that it consists of, after all earlier frames. Buffers must not change
        afterwards. Frames to a process that has ended are dropped."""
        with self._changed:
            # Larger frames, of the hidden states of prompts, are left to the thread. Of a prompt's 5.5 MB a sender
            # wrote what the socket took in 0.9 ms, and leaves them to the thread in 0.02 ms
            # (`benchmarks/results/2026-11-25-cpu-hidden-states.md`).
            at_once = not self._waiting and sum(map(len, buffers)) <= 1 << 20
            rest = self._send_now(buffers) if at_once else buffers
            if rest and not self._closed:
                self._waiting.append(rest)
                self.waiting_bytes += sum(map(len, rest))
                self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` until all frames are written; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """Send no more frames and end the thread. For a process that closes the connection and continues."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write what the socket takes. Returns what it did not take."""
        try:
            while buffers:
                buffers = self._send_some(buffers, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return buffers
        except OSError:
            return ()
        return ()

    def _send_some(self, buffers: Sequence[Buffer], flags: int = 0) -> Sequence[Buffer]:
        """Write with one system call. Returns what is left; raises `OSError` when nothing can be written."""
        return behind(buffers, self._connection.sendmsg(buffers[:_MAX_BUFFERS], (), flags))

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                frame = rest = self._waiting[0]
            with contextlib.suppress(OSError):
                while rest:
                    rest = self._send_some(rest)
            with self._changed:
                self._waiting.popleft()
                self.waiting_bytes -= sum(map(len, frame))
                self._changed.notify_all()


def behind(buffers: Sequence[Buffer], count: int) -> Sequence[Buffer]:
    """What is left of `buffers` behind their first `count` bytes, without a copy."""
    for place, buffer in enumerate(buffers):
        if count < len(buffer):
            return (memoryview(buffer)[count:], *buffers[place + 1 :])
        count -= len(buffer)
    return ()
