"""Sums and joins over the ranks of one model, by PyTorch's process groups."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed
from torch import Tensor

# While ranks load, each waits for the slowest reader of weights. Chosen: longer than a disk takes for any model.
_LOADING = timedelta(hours=1)


class DistributedRanks:
    """A `tree_models.layers.rank_group.RankGroup` of processes of one host."""

    def __init__(self, rank: int, size: int, store: Path, seconds: float) -> None:
        """Wait for all ranks at a file that does not exist yet. Once they serve, a call that waits for another rank for
        `seconds` raises `RuntimeError`."""
        self.rank, self.size = rank, size
        if sys.platform == "linux":
            # Ranks of one host need no other interface, and listen on none.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = f"file://{store}"
        distributed.init_process_group("gloo", where, _LOADING, size, rank)
        self._serving = distributed.new_group(timeout=timedelta(seconds=seconds))
        self._group = distributed.group.WORLD

    def begin_serving(self) -> None:
        """Wait for others no longer than for a step from now on. Called by every rank once it has loaded."""
        distributed.barrier(self._group)
        self._group = self._serving

    def close(self) -> None:
        """Leave the other ranks."""
        distributed.destroy_process_group()

    def summed(self, part: Tensor) -> Tensor:
        """See `RankGroup.summed`."""
        total = part.contiguous()
        distributed.all_reduce(total, group=self._group)
        return total

    def joined(self, part: Tensor) -> Tensor:
        """See `RankGroup.joined`."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        distributed.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        found = torch.tensor(number)
        distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._group)
        return int(found)
