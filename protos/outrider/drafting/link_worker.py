"""The process of a draft link: `python -m outrider.drafting.link_worker FD`, started by `link_process.LinkProcess`.

It holds the gRPC stream and does its encoding. Calls of the draft's user arrive over one socket, and events of the
draft are sent there. The process ends when the socket closes, which means that the user is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from outrider.runtime import configure_logging, prepare_grpc, switch_threads_often

# Before anything imports gRPC, as in the services.
prepare_grpc()

from outrider.busy_polling import allowed_seconds  # noqa: E402
from outrider.drafting import link_messages as messages  # noqa: E402
from outrider.drafting.events import DraftEvent, Grown  # noqa: E402
from outrider.drafting.link import GrpcDraftLink, prepare_draft  # noqa: E402
from outrider.processes.children import received  # noqa: E402
from outrider.processes.framing import FrameCutter  # noqa: E402
from outrider.processes.outbox import Outbox  # noqa: E402
from outrider.wire.frames import StoppableLink  # noqa: E402

# Seconds between heartbeats; `link_process.SILENT_SECONDS` is several of them.
ALIVE_SECONDS = 1.0


class _Events:
    """Sends the events of a draft over the socket."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def receive(self, event: DraftEvent) -> None:
        if isinstance(event, Grown):
            self.send(messages.GrownArrays([messages.GrowthArrays.of(growth) for growth in event.growths]))
        else:
            self.send(event)

    def send(self, message: messages.FromLink) -> None:
        self._outbox.send(*messages.pack(message))


class _Calls:
    """Receives calls of the link over the socket and makes them."""

    def __init__(self, connection: socket.socket, events: _Events) -> None:
        self._connection, self._events = connection, events
        self._cutter = FrameCutter()
        self._link: StoppableLink | None = None

    def receive(self, flags: int = 0) -> None:
        """Receive and make calls, without waiting if `flags` say so. Ends the process when the socket is closed."""
        try:
            # A frame with the features of a long piece of a prompt comes in a few reads. Chosen, not measured.
            data = received(self._connection, 1 << 18, flags)
        except BlockingIOError:
            return
        if not data:
            # The user is gone, and the stream ends with the process.
            os._exit(0)
        for body in self._cutter.feed(data):
            self._call(messages.unpack_to_link(body))

    def receive_for_ever(self) -> None:
        """Receive for ever: on the thread of a single link, or on this thread for several."""
        while self._link is None:
            self.receive()
        if isinstance(self._link, GrpcDraftLink):
            self._link.call_when_readable(self._connection, lambda: self.receive(socket.MSG_DONTWAIT))
            threading.Event().wait()
        while True:
            self.receive()

    def _call(self, message: messages.ToLink) -> None:
        if isinstance(message, messages.Connect):
            connect = prepare_draft(message.address, message.options)
            self._link = connect(self._events, message.vocabulary_size, message.fingerprint)
            if isinstance(self._link, GrpcDraftLink):
                self._link.busy_poll(allowed_seconds(message.options.busy_poll_seconds))
            return
        assert self._link is not None, "the first message connects"
        match message:
            case messages.Advance():
                self._link.advance(message.advances)
            case messages.Open():
                self._link.open(message.sequence)
            case messages.SendFeatures():
                self._link.send_features(message.features)
            case messages.Close():
                self._link.close(message.sequence_ids)
            case messages.CutOff():
                self._link.cut_off(message.reason)


def serve_link(descriptor: int) -> None:
    """Hold a link for the process at the other end of a socket, until that closes it."""
    configure_logging("info")
    switch_threads_often()
    # These signals are for the service, which ends this process by closing the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    events = _Events(Outbox(connection))
    threading.Thread(target=_send_heartbeats, args=(events,), name="alive", daemon=True).start()
    _Calls(connection, events).receive_for_ever()


def _send_heartbeats(events: _Events) -> None:
    pause = threading.Event()
    while not pause.wait(ALIVE_SECONDS):
        events.send(messages.Alive())


if __name__ == "__main__":
    serve_link(int(sys.argv[1]))
