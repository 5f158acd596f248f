"""A rank that follows: it loads its share of the model, and runs the passes that the leading rank sends."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from outrider.busy_polling import BUSY_POLL_SECONDS, allowed_seconds
from outrider.devices import choose_device
from outrider.processes.children import received
from outrider.processes.framing import FrameCutter
from outrider.runtime import configure_logging, settled
from target_service.model.loading.loader import LoadRank, load_runner
from target_service.model.rank_link import PassMessage
from target_service.model.ranks.collectives import DistributedRanks
from target_service.model.ranks.followed_passes import FollowedPasses
from target_service.model.ranks.messages import ALIVE, BeginServing, Join, Ping, RankMessage, ReadWeights, unpack


class FollowingLink(DistributedRanks):
    """The link of a rank that follows."""

    leads = False

    def send(self, message: PassMessage) -> None:
        """See `RankLink.send`."""

    def expect_answers(self) -> None:
        """See `RankLink.expect_answers`."""

    def read_weights(self, folder: str) -> None:
        """See `RankLink.read_weights`."""


def follow(descriptor: int, load: LoadRank = load_runner) -> None:
    """Run for the leading rank at the other end of an inherited socket, until that closes it. Raises what `load` and
    passes do: then the leading rank ends too."""
    # The leading rank ends after its service has drained, and this one with it.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(connection,), name="leading rank", daemon=True).start()
    inbox = _Inbox(connection)
    join = next(inbox)
    assert isinstance(join, Join), "the first message has what to load"
    # The leading rank reports what it does with the others.
    configure_logging("warning")
    config = join.config
    device = torch.device(config.device)
    choose_device(config.device)
    link = FollowingLink(config, join.rank, Path(join.store))
    passes = FollowedPasses(load(config, link))
    if device.type == "cuda":
        # A rank that wakes late holds up all others.
        inbox.poll(allowed_seconds(BUSY_POLL_SECONDS))
    with settled(), torch.inference_mode():
        for message in inbox:
            if isinstance(message, BeginServing):
                link.begin_serving()
            elif isinstance(message, Ping):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                connection.sendall(ALIVE)
            elif isinstance(message, ReadWeights):
                passes.read_weights(Path(message.folder), connection.sendall)
            else:
                assert not isinstance(message, Join), "a rank joins once"
                passes.follow(message)


class _Inbox(Iterator[RankMessage]):
    """Messages of the leading rank, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._frames = connection, FrameCutter()
        self._messages: list[RankMessage] = []
        self._polling_seconds = 0.0

    def poll(self, seconds: float) -> None:
        """Poll for so long after each message from now on."""
        self._polling_seconds = seconds

    def __next__(self) -> RankMessage:
        while not self._messages:
            data = self._received()
            if not data:
                os._exit(0)
            self._messages = [unpack(body) for body in self._frames.feed(data)]
        return self._messages.pop(0)

    def _received(self) -> bytes:
        until = time.monotonic() + self._polling_seconds
        while time.monotonic() < until:
            try:
                return received(self._connection, flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                # So that the thread which waits for the end of the leading rank can run.
                time.sleep(0)
        return received(self._connection)


def _end_with(connection: socket.socket) -> None:
    """End once the leading rank is gone: a pass under way would wait for it in vain."""
    hung_up = select.poll()
    hung_up.register(connection, 0)
    hung_up.poll()
    os._exit(0)
