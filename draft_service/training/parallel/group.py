"""Processes that train the same weights on batches of their own: one leads, the others follow, all average gradients.

Orders travel between the hosts, so that no host waits for its device to know what comes next; gradients travel between
the devices.
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

# The longest that one waits for another that lives: followers while the leader validates and saves, all for one that
# compiles. Chosen, not measured: far above the minutes that these take. A death is noticed at once by other ways.
_TIMEOUT = timedelta(hours=2)
# Between looks at whether all are there. Chosen, not measured: far below the seconds that loading a teacher takes.
_POLL_SECONDS = 0.05
# For the libraries to close their connections. Chosen, not measured: it takes well below a second.
_LEAVE_SECONDS = 10.0
# Names of the interface that reaches this machine alone, on Linux and on macOS.
_LOOPBACKS = ("lo", "lo0")


class GroupLost(Exception):
    """The processes of the group do not reach each other any more: one has ended, or a device has failed."""


class Group:
    """The place of this process in its group. Rank 0 leads.

    Attributes:
        rank, size: this process among how many.
    """

    def __init__(self, store: Path, rank: int, size: int) -> None:
        """`store` is a file that is not there yet, of this group alone, in a folder that all of them reach."""
        self.rank, self.size = rank, size
        self._store = store
        self._connected = False

    def connect(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every process has come this far. `check` is called meanwhile, and may raise to give up.

        Raises:
            GroupLost: they do not reach each other.
        """
        store = dist.FileStore(str(self._store), self.size)  # type: ignore[attr-defined]
        store.set(f"ready {self.rank}", "1")
        while not store.check([f"ready {rank}" for rank in range(self.size)]):
            check()
            time.sleep(_POLL_SECONDS)
        _stay_on_this_machine()
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
        with _told_as_lost():
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=_TIMEOUT)
        self._connected = True

    def average(self, numbers: Tensor) -> None:
        """Put the mean over all processes in place of `numbers`, the same bits in each."""
        with _told_as_lost():
            dist.all_reduce(numbers)
        numbers.div_(self.size)

    def share(self, tensor: Tensor) -> None:
        """Put the leader's in place of `tensor`."""
        with _told_as_lost():
            dist.broadcast(tensor, src=0)

    def lead(self, rate: float) -> None:
        """As the leader: let everybody take a step with this learning rate."""
        self.share(torch.tensor([1.0, rate], dtype=torch.float64))

    def rates(self) -> Iterator[float]:
        """As a follower: the learning rate of each step to take, until the leader says that it was the last."""
        order = torch.empty(2, dtype=torch.float64)
        while True:
            self.share(order)
            more, rate = order.tolist()
            if not more:
                return
            yield rate

    def dismiss(self) -> None:
        """As the leader: no step follows. Those who are gone already need not know."""
        if self._connected:
            with contextlib.suppress(GroupLost):
                self.share(torch.zeros(2, dtype=torch.float64))

    def leave(self) -> None:
        """Close what `connect` opened. A device that waits for one that is gone is not waited for."""
        if self._connected:
            self._connected = False
            closing = threading.Thread(target=dist.destroy_process_group, name=LEFT_BEHIND, daemon=True)
            closing.start()
            closing.join(_LEAVE_SECONDS)


@contextlib.contextmanager
def _told_as_lost() -> Iterator[None]:
    # `DistError` is one, and Gloo raises bare ones.
    try:
        yield
    except RuntimeError as error:
        raise GroupLost(str(error).partition("\n")[0]) from error


def _stay_on_this_machine() -> None:
    """Let both libraries talk over the loopback, where nobody else listens, unless the operator chose an interface."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in names.intersection(_LOOPBACKS):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)
