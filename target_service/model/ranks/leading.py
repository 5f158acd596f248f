"""The leading rank: its runner has every other rank run each of its passes too."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.checkpoints.causal_lm import read_configuration
from outrider.processes.children import exit_status, received, start_child
from outrider.processes.outbox import Outbox
from outrider.processes.python import module_command
from target_service.config import TargetConfig
from target_service.model.forward import ForwardInput
from target_service.model.loading.loader import load_runner
from target_service.model.loading.store import resolve
from target_service.model.ranks.collectives import DistributedRanks
from target_service.model.ranks.messages import Join, MoveRows, RankMessage, RunPass, pack
from target_service.model.runner import ModelRunner
from target_service.model.support import ModelRefused, description_of, text_part
from tree_kernels.recurrence import RecurrentPass
from tree_models.ranks.share import rank_share
from tree_models.spec import FamilyRefused

log = logging.getLogger(__name__)
# For this rank to fail of the same cause as another, such as a model that is refused; it then says so itself. Chosen.
_GRACE_SECONDS = 10.0


class FollowingRanks:
    """The processes of all ranks but the first. They end with this one; if one of them ends before, this one does too,
    since no pass can run any more."""

    def __init__(self, config: TargetConfig, store: Path) -> None:
        self._closing = threading.Event()
        self._children: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._outboxes: list[Outbox] = []
        self._watches: list[threading.Thread] = []
        for rank in range(1, config.tensor_parallel):
            process, connection = start_child(module_command("target_service.model.ranks"))
            self._children.append((process, connection))
            self._outboxes.append(Outbox(connection))
            self._outboxes[-1].send(pack(Join(config, rank, str(store))))
            watched = rank, process, connection
            self._watches.append(threading.Thread(target=self._watch, args=watched, name=f"rank {rank}", daemon=True))
            self._watches[-1].start()

    def send(self, message: RankMessage) -> None:
        """Send a message to every follower. Does not wait for it to be read."""
        frame = pack(message)
        for outbox in self._outboxes:
            outbox.send(frame)

    def __len__(self) -> int:
        return len(self._children)

    def close(self) -> None:
        """End the processes."""
        self._closing.set()
        for outbox in self._outboxes:
            outbox.close()
        for (_, connection), watch in zip(self._children, self._watches, strict=True):
            # Its process ends by that, for which the watch waits.
            connection.shutdown(socket.SHUT_RDWR)
            watch.join()
            connection.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        """Wait for the end of a follower, which sends nothing."""
        received(connection, 1)
        status = exit_status(process)
        if not self._closing.wait(_GRACE_SECONDS if status else 0.0):
            log.critical("rank %d has ended with status %d: the model is not whole any more", rank, status)
            os._exit(1)


@dataclass(eq=False, repr=False)
class LeadingRunner(ModelRunner):
    """A runner whose passes run on all ranks."""

    followers: FollowingRanks
    group: DistributedRanks

    @classmethod
    def over(cls, runner: ModelRunner, followers: FollowingRanks, group: DistributedRanks) -> LeadingRunner:
        """The leading runner in place of one that was loaded."""
        own = runner.network, runner.tokenizer, runner.cache, runner.attention, runner.name
        leading = cls(*own, runner.max_context, runner.end_token_ids, runner.tokenizer_fingerprint, followers, group)
        leading.run_head(runner.draft_head)
        return leading

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return 1 + len(self.followers)

    def close(self) -> None:
        """End the other ranks. No pass can run any more."""
        self.followers.close()
        self.group.close()

    def compute_logits(
        self, batch: ForwardInput, token_ids: Tensor, rows: Tensor | int, recurrent: RecurrentPass | None
    ) -> Tensor:
        """See `ModelRunner.compute_logits`."""
        assert recurrent is None, "ranks share no layers with states"
        self.followers.send(RunPass.of(batch, token_ids, rows))
        return super().compute_logits(batch, token_ids, rows, None)

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `ModelRunner.move_rows`."""
        self.followers.send(MoveRows(list(sources), list(targets)))
        super().move_rows(sources, targets)


def load_ranks(config: TargetConfig) -> LeadingRunner:
    """Start a process for each further rank of `config.tensor_parallel`, and load the model with them. Raises what
    `load_runner` does."""
    _check_divisible(config)
    with tempfile.TemporaryDirectory(prefix="outrider-ranks-") as folder:
        store = Path(folder) / "store"
        with contextlib.ExitStack() as undo:
            followers = FollowingRanks(config, store)
            undo.callback(followers.close)
            group = DistributedRanks(0, config.tensor_parallel, store, config.heartbeat_seconds)
            undo.callback(group.close)
            runner = load_runner(config, group)
            group.begin_serving()
            undo.pop_all()
    log.info("the model is divided over %d ranks, a process each", config.tensor_parallel)
    return LeadingRunner.over(runner, followers, group)


def _check_divisible(config: TargetConfig) -> None:
    """Raise `ModelRefused` for what ranks cannot share, before any process is started."""
    if config.device != "cpu":
        raise ModelRefused(f"--tensor-parallel: ranks run on CPUs so far, and not on {config.device}")
    settings = text_part(read_configuration(resolve(config.model)))
    description = description_of(settings)
    if description is None:
        raise ModelRefused(
            f"--tensor-parallel: {settings.model_type} runs on transformers' layers, which are not divided"
        )
    try:
        rank_share(description.spec, config.tensor_parallel)
    except FamilyRefused as refused:
        raise ModelRefused(f"--tensor-parallel: {refused}") from None
