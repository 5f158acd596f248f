"""A rank that follows: it loads its share of the model, and runs the passes that the leading rank sends."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from pathlib import Path

import torch

from outrider.processes.children import received
from outrider.processes.framing import FrameCutter
from outrider.runtime import configure_logging, settled
from target_service.model.loading.loader import load_runner
from target_service.model.ranks.collectives import DistributedRanks
from target_service.model.ranks.messages import Join, MoveRows, RankMessage, RunPass, unpack
from target_service.model.runner import ModelRunner

_RECEIVE_BYTES = 1 << 16


def follow(descriptor: int) -> None:
    """Run for the leading rank at the other end of an inherited socket, until that closes it. Raises what loading and
    passes do: then the leading rank ends too."""
    # The leading rank ends after its service has drained, and this one with it.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    messages: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_receive, args=(connection, messages), name="messages", daemon=True).start()
    join = messages.get()
    assert isinstance(join, Join), "the first message says what to load"
    # The leading rank reports what it does with the others.
    configure_logging("warning")
    ranks = DistributedRanks(join.rank, join.config.tensor_parallel, Path(join.store), join.config.heartbeat_seconds)
    runner = load_runner(join.config, ranks)
    ranks.begin_serving()
    with settled(), torch.inference_mode():
        while True:
            _run(runner, messages.get())


def _run(runner: ModelRunner, message: RankMessage) -> None:
    if isinstance(message, RunPass):
        chosen = message.logit_rows
        # Of a chunk within a prompt there are none.
        rows = 0 if chosen is None else torch.tensor(chosen, dtype=torch.int64, device=runner.device)
        runner.compute_logits(message.batch, torch.tensor(message.token_ids, device=runner.device), rows, None)
    elif isinstance(message, MoveRows):
        runner.move_rows(message.sources, message.targets)
    else:
        raise TypeError(f"no message of a rank that serves: {type(message).__name__}")


def _receive(connection: socket.socket, messages: queue.SimpleQueue[RankMessage]) -> None:
    frames = FrameCutter()
    while data := received(connection, _RECEIVE_BYTES):
        for body in frames.feed(data):
            messages.put(unpack(body))
    # The leading rank is gone, and a pass under way waits for it in vain.
    os._exit(0)
