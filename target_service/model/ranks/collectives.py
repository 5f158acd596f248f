"""Sums and joins over the ranks of one model, by PyTorch's process groups: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as distributed
from torch import Tensor

from target_service.config import TargetConfig
from target_service.model.ranks.one_shot import faster_sums
from tree_kernels.compiled_layers import uncompiled
from tree_models.rank_group import RowSums

if TYPE_CHECKING:
    from tree_kernels.rank_sums.triton_backend import TritonRankSums

# While ranks load, each waits for the slowest reader of weights. Chosen: longer than a disk takes for any model.
_LOADING = timedelta(hours=1)
# Its name from PyTorch 2.13 on, and before.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class DistributedRanks:
    """A `tree_models.rank_group.RankGroup` of processes of one host."""

    def __init__(self, config: TargetConfig, rank: int, store: Path) -> None:
        """Wait for all ranks at a file that does not exist yet. `config` has the device of this one. Once they serve on
        CPUs, a call that waits for another rank for several heartbeats raises `RuntimeError`; on a GPU it waits for as
        long as this process lives."""
        self.rank, self.size = rank, config.tensor_parallel
        device = torch.device(config.device)
        if sys.platform == "linux":
            # Ranks of one host need no other interface, and listen on none.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # Multicast between GPUs needs a fabric manager that containers often lack; where it fails, it hangs.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._on_gpu = device.type == "cuda"
        backends = "cpu:gloo,cuda:nccl" if self._on_gpu else "gloo"
        distributed.init_process_group(backends, f"file://{store}", _LOADING, self.size, rank)
        self._group = distributed.group.WORLD
        self._serving: distributed.ProcessGroup | None = None
        self._one_shot: TritonRankSums | None = None
        # Since graphs are run in any order, and one that shares does not wait for others, these may still read what was
        # summed before it; until all have met in a sum of `summed`.
        self._has_met = False
        self._alone = False
        if self._on_gpu:
            # The communicator is made by the first call, which no graph can hold.
            self.summed(torch.zeros(1, device=device))
            self._one_shot = faster_sums(getattr(torch, config.dtype), device, self.summed, self.least)
        else:
            # Of `heartbeat_seconds`, within which the leading rank finds the one that hangs, and reports it. Chosen.
            self._serving = distributed.new_group(timeout=timedelta(seconds=3 * config.heartbeat_seconds))

    def begin_serving(self) -> None:
        """Wait for others no longer than for a step from now on. Called by every rank once it has loaded."""
        self.least(0)
        if self._serving is not None:
            self._group = self._serving

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See `RankGroup.alone`."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def close(self) -> None:
        """Leave the other ranks."""
        if not self._on_gpu:
            # NCCL would wait for the graphs that hold its calls, and for ranks that are gone; it ends with the process.
            distributed.destroy_process_group()

    def sums_of(self, residual: Tensor) -> RowSums | None:
        """See `RankGroup.sums_of`."""
        fits = self._one_shot is not None and self._has_met and self._one_shot.can_sum(residual)
        return self._one_shot if fits else None

    # The compiler would look into the calls and take them apart.
    @uncompiled
    def summed(self, part: Tensor) -> Tensor:
        """See `RankGroup.summed`."""
        self._has_met, total = True, part.contiguous()
        if self._one_shot is not None and self._one_shot.can_sum(total):
            return self._one_shot.summed(total)
        if not self._alone:
            distributed.all_reduce(total, group=self._group)
        return total

    @uncompiled
    def joined(self, part: Tensor) -> Tensor:
        """See `RankGroup.joined`."""
        own = part.reshape(-1, part.shape[-1])
        if self._alone:
            return torch.cat([part] * self.size, dim=-1)
        parts = own.new_empty(self.size * len(own), own.shape[1])
        _gather(parts, own, group=self._group)
        beside = parts.view(self.size, *own.shape).transpose(0, 1)
        return beside.reshape(*part.shape[:-1], self.size * own.shape[1])

    def share(self, tensor: Tensor) -> None:
        """See `RankLink.share`."""
        self._has_met = False
        if not self._alone:
            distributed.broadcast(tensor, 0, group=self._group)

    def least(self, number: int) -> int:
        """See `RankGroup.least`."""
        if self._alone:
            return number
        found = torch.tensor(number)
        distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._group)
        return int(found)
