"""A non-blocking sender of frames to another process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque


class Outbox:
    """Writes at once what the socket takes; a thread writes the rest. Any thread may send.

    A usual frame is written by the sender's own thread, which costs one system call: passing it to another thread would
    make both wait for the interpreter's lock.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: deque[bytes] = deque()
        self._closed = False
        self._changed = threading.Condition()
        # Of frames that are not written yet.
        self.waiting_bytes = 0
        threading.Thread(target=self._write, name="outbox", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Send a frame after all earlier ones. Frames to a process that has ended are dropped."""
        with self._changed:
            sent = 0 if self._waiting else self._send_now(frame)
            if sent < len(frame) and not self._closed:
                self._waiting.append(frame[sent:])
                self.waiting_bytes += len(frame) - sent
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

    def _send_now(self, frame: bytes) -> int:
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                frame = self._waiting[0]
            with contextlib.suppress(OSError):
                self._connection.sendall(frame)
            with self._changed:
                self._waiting.popleft()
                self.waiting_bytes -= len(frame)
                self._changed.notify_all()
