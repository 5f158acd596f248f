"""A draft link in its own process, for an engine whose thread computes all the time.

In one interpreter, link and engine wait for each other's lock at every system call. On a GPU the engine computes for 3
to 5 ms of a pass of 6, just when commits are sent and growth arrives: in a pass of 8 sequences at 8B size a commit took
1.4 ms to the draft and its growth 1.2 ms back. With 32 sequences a target made 3,821 tokens a second that way, and
6,587 with a process for its link (two H100, `benchmarks/results/2026-11-24-h100-widened-tenth.md`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Sequence

import msgspec

from outrider.drafting import link_messages as messages
from outrider.drafting.events import Connected, Disconnected, DraftEvent, DraftEvents, Grown
from outrider.drafting.link import USUAL, LinkOptions
from outrider.processes.children import exit_status, received, start_child
from outrider.processes.framing import FrameCutter
from outrider.processes.outbox import Outbox
from outrider.processes.python import module_command
from outrider.wire.frames import OpenSequence, SequenceAdvance, SequenceFeatures

log = logging.getLogger(__name__)
# A process without a heartbeat for this long is stuck, and is replaced: five heartbeats.
SILENT_SECONDS = 5.0
# Until its first heartbeat. It imports gRPC before: half a second, and many times as long on a busy machine.
START_SECONDS = 60.0
# Between two processes, doubled while they end before a draft is connected. Chosen, not measured.
_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.5, 10.0


class _Worker:
    """One process that holds a link, and the socket to it."""

    def __init__(self, command: Sequence[str], connect: messages.Connect) -> None:
        # A terminal's Ctrl-C is for the service, which then closes the socket.
        self.process, self.connection = start_child(command, own_group=True)
        _wait_at_most(self.connection, START_SECONDS)
        self.outbox = Outbox(self.connection)
        self.outbox.send(*messages.pack(connect))
        # Whether it has ever connected to a draft.
        self.had_draft = False

    def hang_up(self) -> None:
        """Make the process end, and a receive from it return. Any thread."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """End the process and close the socket. Returns the exit status."""
        self.hang_up()
        self.outbox.close()
        status = exit_status(self.process)
        self.connection.close()
        return status


class LinkProcess:
    """A `StoppableLink` whose stream is held by another process. Calls are thread-safe, return at once, and never
    raise. Calls while no draft is connected are dropped: at `Connected` the receiver opens every live sequence
    again. A process that ends or is stuck is replaced; until then the draft is reported as disconnected."""

    def __init__(
        self,
        address: str,
        events: DraftEvents,
        vocabulary_size: int,
        fingerprint: str,
        options: LinkOptions = USUAL,
        command: Sequence[str] = module_command("outrider.drafting.link_worker"),
    ) -> None:
        """Start connecting. `events` receives the outcome and every later change, on the link's thread."""
        self._events = events
        self._options = options
        self._command = command
        self._connect = messages.Connect(address, vocabulary_size, fingerprint, options)
        self._stopping = threading.Event()
        # Whether the process has reported a connected draft.
        self._connected = False
        self._worker = _Worker(self._command, self._connect)
        self._thread = threading.Thread(target=self._follow, name="draft-link", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process that currently holds the link."""
        return self._worker.process.pid

    def open(self, sequence: OpenSequence) -> None:
        self._send(messages.Open(sequence))

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        # Features are left out while too many wait for the process.
        if not self._has_room():
            advances = [one._replace(features=None) for one in advances]
        self._send(messages.Advance(list(advances)))

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        if self._has_room():
            self._send(messages.SendFeatures(list(features)))

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._send(messages.Close(list(sequence_ids)))

    def cut_off(self, reason: str) -> None:
        self._send(messages.CutOff(reason))

    def stop(self) -> None:
        """Disconnect and end process and thread. Nothing is delivered afterwards. Idempotent."""
        self._stopping.set()
        self._worker.hang_up()
        self._thread.join()

    def _has_room(self) -> bool:
        return self._worker.outbox.waiting_bytes <= self._options.max_waiting_feature_bytes

    def _send(self, message: messages.ToLink) -> None:
        if self._connected:
            self._worker.outbox.send(*messages.pack(message))

    # Everything below runs on the link's thread.

    def _follow(self) -> None:
        pause = _PAUSE_SECONDS
        while True:
            worker, reason = self._worker, "its link's process ended"
            try:
                self._read(worker)
            except BlockingIOError:
                reason = "its link's process is stuck"
                worker.process.kill()
            except msgspec.DecodeError as error:
                reason = f"its link's process sends what is no message: {error}"
            status = worker.end()
            if self._stopping.is_set():
                return
            self._connected = False
            log.error("%s, with status %d; another is started", reason, status)
            self._events.receive(Disconnected(reason))
            pause = _PAUSE_SECONDS if worker.had_draft else min(2 * pause, _MOST_PAUSE_SECONDS)
            while not self._stopping.wait(pause):
                try:
                    self._worker = _Worker(self._command, self._connect)
                except OSError as error:
                    # The machine may have descriptors, processes or memory again.
                    log.error("its link's process cannot be started: %s", error)
                    pause = min(2 * pause, _MOST_PAUSE_SECONDS)
                else:
                    break
            else:
                return
            if self._stopping.is_set():
                self._worker.end()
                return

    def _read(self, worker: _Worker) -> None:
        """Deliver what the process sends until it ends. Raises `BlockingIOError` if it sends nothing for too long."""
        cutter, started = FrameCutter(), False
        # A frame of growth for many sequences comes in one read. Chosen, not measured.
        while data := received(worker.connection, 1 << 17):
            if not started:
                started = True
                _wait_at_most(worker.connection, SILENT_SECONDS)
            for body in cutter.feed(data):
                message = messages.unpack_from_link(body)
                if self._stopping.is_set():
                    return
                worker.had_draft = worker.had_draft or isinstance(message, Connected)
                self._deliver(message)

    def _deliver(self, message: messages.FromLink) -> None:
        match message:
            case messages.Alive():
                return
            case messages.GrownArrays():
                event: DraftEvent = Grown([packed.growth() for packed in message.growths])
            case _:
                event = message
        if isinstance(event, Connected | Disconnected):
            self._connected = isinstance(event, Connected)
        self._events.receive(event)


def _wait_at_most(connection: socket.socket, seconds: float) -> None:
    """Set the receive timeout of the connection. `settimeout` would apply to sends too, and one more call before each
    receive costs 0.2 ms, as this thread must get the interpreter back from a computing engine."""
    whole, rest = divmod(round(seconds * 1e6), 1_000_000)
    # Some systems refuse it for a socket that is shut down; the next receive reports that.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, rest))
