"""Processes that train the same weights on batches of their own: one leads, the others follow, all average gradients.

Commands go between hosts, so that none waits for its device to learn what comes next; gradients between devices.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.runtime import LEFT_BEHIND

# Between checks whether all are ready. Chosen, not measured: far below the seconds that loading a teacher takes.
_POLL_SECONDS = 0.05


class GroupLost(Exception):
    """The processes of the group cannot reach each other: one has ended, or a device has failed."""


class Group:
    """This process's membership in its group, as number `rank` of `size`; 0 leads."""

    def __init__(self, store: Path, rank: int, size: int) -> None:
        """`store` is the path of a file for this group alone, which does not exist yet."""
        self.rank, self.size = rank, size
        self._store = store
        self._connected = False

    def connect(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every process has called this. `check` is called while waiting, and ends that if it raises. Raises
        `GroupLost` when the processes cannot reach each other."""
        store = dist.FileStore(str(self._store), self.size)  # type: ignore[attr-defined]
        store.set(f"ready {self.rank}", "1")
        while not store.check([f"ready {rank}" for rank in range(self.size)]):
            check()
            time.sleep(_POLL_SECONDS)
        # On the loopback interface, unless the operator chose another.
        # Names of the loopback interface on Linux and macOS.
        for loopback in {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex()):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, loopback)
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
        with _raising_group_lost():
            # For a process that is alive: followers wait while the leader validates and saves, all wait for one that
            # compiles. Chosen, not measured: far above the minutes that these take. The end of a process is noticed at
            # once in other ways.
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=timedelta(hours=2)
            )
        self._connected = True

    def average(self, numbers: Tensor) -> None:
        """Replace `numbers` by the mean over all processes, bitwise the same in each."""
        with _raising_group_lost():
            dist.all_reduce(numbers)
        numbers.div_(self.size)

    def share(self, tensor: Tensor) -> None:
        """Replace `tensor` by the leader's."""
        with _raising_group_lost():
            dist.broadcast(tensor, src=0)

    def start_step(self, rate: float) -> None:
        """As the leader: let every process take a step with this learning rate."""
        self.share(torch.tensor([1.0, rate], dtype=torch.float64))

    def rates(self) -> Iterator[float]:
        """As a follower: yield the learning rate of each step, until the leader dismisses."""
        order = torch.empty(2, dtype=torch.float64)
        while True:
            self.share(order)
            more, rate = order.tolist()
            if not more:
                return
            yield rate

    def dismiss(self) -> None:
        """As the leader: end the followers' `rates`. Processes that have ended are ignored."""
        if self._connected:
            with contextlib.suppress(GroupLost):
                self.share(torch.zeros(2, dtype=torch.float64))

    def leave(self) -> None:
        """Close what `connect` opened, without waiting for a device that waits for a lost one."""
        if self._connected:
            self._connected = False
            closing = threading.Thread(target=dist.destroy_process_group, name=LEFT_BEHIND, daemon=True)
            closing.start()
            # For the libraries to close their connections. Chosen, not measured: it takes well below a second.
            closing.join(10.0)


@contextlib.contextmanager
def _raising_group_lost() -> Iterator[None]:
    # `DistError` is a RuntimeError, and Gloo raises bare ones.
    try:
        yield
    except RuntimeError as error:
        raise GroupLost(str(error).partition("\n")[0]) from error
