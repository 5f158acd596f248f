"""A proxy between two services on one machine that adds latency, and keeps all bytes in order."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

# Bytes read at once. Chosen.
_PIECE = 1 << 18
# An empty piece is the end of a direction.
_Pieces = queue.SimpleQueue[tuple[float, bytes]]


class DelayProxy:
    """Forwards from one Unix socket to another. `seconds` are added to a round trip, half each way.

    It is like a line with that delay and unlimited bandwidth. The forwarding threads add some time.
    """

    def __init__(self, listen: Path, connect: Path, seconds: float) -> None:
        self._connect = connect
        self._delay = seconds / 2
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(listen))
        self._listener.listen()
        self._open: list[socket.socket] = []

    def __enter__(self) -> DelayProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                far.connect(str(self._connect))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                pieces: _Pieces = queue.SimpleQueue()
                threading.Thread(target=self._receive, args=(source, pieces), daemon=True).start()
                threading.Thread(target=_deliver, args=(pieces, sink), daemon=True).start()

    def _receive(self, source: socket.socket, pieces: _Pieces) -> None:
        piece = b"."
        while piece:
            try:
                piece = source.recv(_PIECE)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + self._delay, piece))


def _deliver(pieces: _Pieces, sink: socket.socket) -> None:
    while True:
        due, piece = pieces.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not piece:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(piece)
        except OSError:
            return
