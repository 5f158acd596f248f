"""Sums of few rows over GPUs that read each other's memory: each rank copies its rows to where all can read them, and
adds up everybody's in one launch. NCCL is faster where there are many rows.

On two H100 with NVLink a sum of 1 to 64 rows of 4,096 took 10 to 13 us in a graph, by NCCL 13 to 17
(`benchmarks/ranks/all_reduce.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as distributed
from torch import Tensor

log = logging.getLogger(__name__)
# Of which PyTorch's kernel reads all ranks' numbers in one order, so that all get the same sum.
_RANKS = (2, 4, 8)
# Bytes for which both ways are timed, rising; the last one is the size of the shared memory.
_TIMED = (1 << 13, 1 << 16, 1 << 19, 1 << 21)
# Sums in a timed graph, and how often it is run. Chosen: some milliseconds in all.
_SUMS, _REPLAYS = 64, 20
# Loads of 16 bytes.
_ALIGNMENT = 16


class OneShotSums:
    """Sums of tensors of one type on one GPU of each rank. Every rank makes and uses them alike."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `RuntimeError` where GPUs cannot read each other's memory."""
        # Only here: a module of PyTorch that has no public name yet.
        from torch.distributed import _symmetric_memory as symmetric

        group = distributed.group.WORLD
        assert group is not None, "ranks have met"
        self._group_name: str = group.group_name
        self._shared = symmetric.empty(_TIMED[-1] // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(self._shared, group=self._group_name)
        self.most_bytes = _TIMED[-1]

    def can_sum(self, part: Tensor) -> bool:
        """Whether a part of this size and type is summed here."""
        size = part.nbytes
        return part.dtype == self._shared.dtype and 0 < size <= self.most_bytes and size % _ALIGNMENT == 0

    def summed(self, part: Tensor) -> Tensor:
        """[..] a new tensor: the sum of all ranks' parts [..]."""
        shared = self._shared[: part.numel()].view(part.shape)
        shared.copy_(part)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._group_name)
        return total


def faster_sums(
    dtype: torch.dtype, device: torch.device, by_nccl: Callable[[Tensor], Tensor], least: Callable[[int], int]
) -> OneShotSums | None:
    """One-shot sums for the sizes for which they are right, and faster than `by_nccl` in a graph; None where there are
    none. `least` gives the smallest of all ranks' numbers, so that all decide alike."""
    made, size = None, distributed.get_world_size()
    if size in _RANKS:
        try:
            made = OneShotSums(dtype, device)
        except RuntimeError as error:
            log.warning("ranks sum up by NCCL alone, for their GPUs cannot read each other's memory: %s", error)
    if not least(int(made is not None)) or made is None:
        return None
    most = 0
    for count in _TIMED:
        own = torch.arange(count // dtype.itemsize, device=device).remainder(7).to(dtype) + distributed.get_rank()
        right = torch.equal(made.summed(own), by_nccl(own.clone()))
        graphs = [_graph_of(partial(way, own)) for way in (made.summed, by_nccl)]
        # By turns, since a device that was idle is slow at first.
        times = [min(each) for each in zip(*([_us(graph) for graph in graphs] for _ in range(_REPLAYS)), strict=True)]
        log.info("a sum of %d bytes: %.1f us in one shot, %.1f by NCCL", count, *times)
        if not least(int(right and times[0] < times[1])):
            break
        most = count
    made.most_bytes = most
    return made if most else None


def _graph_of(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of several sums, one after the other."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_SUMS):
            launch()
    return graph


def _us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one of a graph's sums."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / _SUMS
