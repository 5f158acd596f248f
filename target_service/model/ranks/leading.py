"""The leading rank: it starts the others, and its runner has them run each of its passes too."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider.checkpoints.causal_lm import read_configuration
from outrider.devices import check_device, choose_device
from outrider.errors import NotSupported
from outrider.processes.children import exit_status, received, start_child
from outrider.processes.outbox import Outbox
from outrider.processes.python import module_command
from outrider.settings import SettingsError
from target_service.config import TargetConfig
from target_service.model.loading.loader import LoadRank, load_runner
from target_service.model.loading.store import resolve
from target_service.model.rank_link import PassMessage
from target_service.model.ranks.collectives import DistributedRanks
from target_service.model.ranks.messages import (
    ALIVE,
    WEIGHTS_READ,
    BeginServing,
    Join,
    Ping,
    RankMessage,
    ReadWeights,
    pack,
)
from target_service.model.runner import ModelRunner
from target_service.model.support import ModelRefused, description_of, text_part
from tree_models.ranks.share import share_of
from tree_models.spec import FamilyRefused

log = logging.getLogger(__name__)
# While ranks load, for this one to fail of the same cause as another, such as a model that is refused; it then says so
# itself. Chosen.
_GRACE_SECONDS = 10.0


class FollowingRanks:
    """The processes of all ranks but the first. They end with this one; if one of them ends or hangs before, this one
    ends too, since no pass can run any more."""

    def __init__(self, config: TargetConfig, store: Path, command: Sequence[str]) -> None:
        """`command` starts each process."""
        self._closing = threading.Event()
        self._serving = threading.Event()
        self._heartbeat_seconds = config.heartbeat_seconds
        # Whether each has read its part, after each `ReadWeights`.
        self.weights_read = queue.SimpleQueue[bool]()
        self._children: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._outboxes: list[Outbox] = []
        self._watches: list[threading.Thread] = []
        # Whatever ends this process, it reports which rank was lost, and leaves none that hangs.
        atexit.register(self.close)
        for rank in range(1, config.tensor_parallel):
            process, connection = start_child(command)
            self._children.append((process, connection))
            outbox = Outbox(connection)
            self._outboxes.append(outbox)
            outbox.send(pack(Join(replace(config, device=device_of(config, rank)), rank, str(store))))
            watched = rank, process, connection, outbox
            self._watches.append(threading.Thread(target=self._watch, args=watched, name=f"rank {rank}", daemon=True))
            self._watches[-1].start()

    def send(self, message: RankMessage) -> None:
        """Send a message to every follower. Does not wait for it to be read."""
        frame = pack(message)
        for outbox in self._outboxes:
            outbox.send(frame)

    def expect_answers(self) -> None:
        """End this process if a rank does not answer for a heartbeat from now on."""
        self._serving.set()

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        self._closing.set()
        for outbox in self._outboxes:
            outbox.close()
        for (_, connection), watch in zip(self._children, self._watches, strict=True):
            # Its process ends by that, for which the watch waits.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            watch.join()
            connection.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], connection: socket.socket, outbox: Outbox) -> None:
        """Wait for the end of a follower, and ask it again and again whether it still runs."""
        asked = 0.0
        while True:
            # How often a rank is asked whether it still runs, within the time in which it has to answer. Chosen.
            readable, _, _ = select.select([connection], [], [], self._heartbeat_seconds / 4)
            if readable:
                answer = received(connection, 1)
                if not answer:
                    break
                if answer == ALIVE:
                    asked = 0.0
                else:
                    self.weights_read.put(answer == WEIGHTS_READ)
            elif self._closing.is_set():
                # Its end is waited for.
                continue
            elif not asked and self._serving.is_set():
                asked = time.monotonic()
                outbox.send(pack(Ping()))
            elif asked and time.monotonic() - asked > self._heartbeat_seconds:
                # It would not see this one's end either.
                process.kill()
                _say_lost("rank %d has not answered for %.0f s", rank, self._heartbeat_seconds)
                os._exit(1)
        status = exit_status(process)
        serving = self._serving.is_set()
        lost = not self._closing.wait(_GRACE_SECONDS if status and not serving else 0.0)
        if lost or (serving and status):
            _say_lost("rank %d has ended with status %d", rank, status)
        if lost:
            os._exit(1)


def _say_lost(reason: str, *of: object) -> None:
    log.critical(f"{reason}: the model is not whole any more", *of)


class LeadingLink(DistributedRanks):
    """The link of the leading rank."""

    leads = True

    def __init__(self, config: TargetConfig, store: Path, command: Sequence[str]) -> None:
        """Start the other ranks' processes by `command`, which meet this one at a file that does not exist yet."""
        self.followers = FollowingRanks(config, store, command)
        try:
            super().__init__(config, 0, store)
        except BaseException:
            self.followers.close()
            raise

    def send(self, message: PassMessage) -> None:
        """See `RankLink.send`."""
        if not self._alone:
            self.followers.send(message)

    def read_weights(self, folder: str) -> None:
        """See `RankLink.read_weights`."""
        self.followers.send(ReadWeights(folder))
        read = [self.followers.weights_read.get() for _ in range(self.size - 1)]
        if not all(read):
            raise NotSupported("the weights cannot be read by every rank: see the target's log")

    def begin_serving(self) -> None:
        """See `DistributedRanks.begin_serving`."""
        self.followers.send(BeginServing())
        super().begin_serving()

    def expect_answers(self) -> None:
        """See `RankLink.expect_answers`."""
        self.followers.expect_answers()

    def close(self) -> None:
        """End the other ranks. No pass can run any more."""
        self.followers.close()
        super().close()


def load_ranks(config: TargetConfig) -> tuple[ModelRunner, LeadingLink]:
    """Start a process for each further rank of `config.tensor_parallel`, and load the model with them. Raises what
    `load_runner` does."""
    _check_divisible(config)
    return start_ranks(config, load_runner, module_command("target_service.model.ranks"))


def start_ranks(config: TargetConfig, load: LoadRank, command: Sequence[str]) -> tuple[ModelRunner, LeadingLink]:
    """The runner that `load` makes of the leading rank, with its link to the others, whose processes `command` starts;
    each calls `following.follow` with the file descriptor that is its last argument."""
    config = replace(config, device=device_of(config, 0))
    choose_device(config.device)
    with tempfile.TemporaryDirectory(prefix="outrider-ranks-") as folder:
        link = LeadingLink(config, Path(folder) / "store", command)
        try:
            runner = load(config, link)
            link.begin_serving()
        except BaseException:
            link.close()
            raise
    log.info("the model is divided over %d ranks, a process each", config.tensor_parallel)
    return runner, link


def device_of(config: TargetConfig, rank: int) -> str:
    """The device of a rank: GPUs in their order, from the one that is named on."""
    device = torch.device(config.device)
    return config.device if device.type == "cpu" else f"{device.type}:{(device.index or 0) + rank}"


def _check_divisible(config: TargetConfig) -> None:
    """Raise `ModelRefused` for what ranks cannot share, before any process is started."""
    last = device_of(config, config.tensor_parallel - 1)
    try:
        check_device(last)
    except SettingsError as error:
        raise ModelRefused(f"--tensor-parallel {config.tensor_parallel}: {error}") from None
    if config.batch_invariant:
        raise ModelRefused("--tensor-parallel: what ranks sum up is not independent of the batch (--batch-invariant)")
    settings = text_part(read_configuration(resolve(config.model)))
    description = description_of(settings)
    if description is None:
        raise ModelRefused(
            f"--tensor-parallel: {settings.model_type} runs on transformers' layers, which are not divided"
        )
    try:
        share_of(description.spec, description.names, 0, config.tensor_parallel)
    except FamilyRefused as refused:
        raise ModelRefused(f"--tensor-parallel: {refused}") from None
