"""Sums of few rows over GPUs that read each other's memory, by `tree_kernels.rank_sums`, for the sizes for which they
are faster than NCCL's.

On two H100 with NVLink a sum of 1 to 64 rows of 4,096 took 5 to 7 us in a graph with the residual and the norm behind
it, by NCCL 11 to 15 without (benchmarks/results/2026-11-28-h100-ranks.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as distributed
from torch import Tensor

from tree_kernels.rank_sums import PLACES, SharedParts

if TYPE_CHECKING:
    from tree_kernels.rank_sums.triton_backend import TritonRankSums

log = logging.getLogger(__name__)
# Rows of 8 KB for which both ways are timed, rising; parts of the most are the size of the shared memory.
_TIMED, _ROW_BYTES = (1, 8, 64, 256), 1 << 13
# Sums in a timed graph, and how often it is run. Chosen: some milliseconds in all.
_SUMS, _REPLAYS = 64, 20


def one_shot_sums(dtype: torch.dtype, device: torch.device) -> TritonRankSums:
    """Sums of this type on one GPU of each rank, for parts of any size that is timed. Raises `RuntimeError` where GPUs
    cannot read each other's memory, and `ImportError` where there is no Triton."""
    from tree_kernels.rank_sums.triton_backend import TritonRankSums

    parts = _shared((PLACES, _TIMED[-1] * _ROW_BYTES // dtype.itemsize), dtype, device)
    # Fewer than a device that serves models has processors: those of all ranks must run at the same time.
    signals = _shared((64, distributed.get_world_size()), torch.int32, device)
    return TritonRankSums(SharedParts(distributed.get_rank(), parts, signals))


def faster_sums(
    dtype: torch.dtype, device: torch.device, by_nccl: Callable[[Tensor], Tensor], least: Callable[[int], int]
) -> TritonRankSums | None:
    """One-shot sums for the sizes for which they are right, and faster than `by_nccl` in a graph; None where there are
    none. `least` gives the smallest of all ranks' numbers, so that all decide alike."""
    made = None
    try:
        made = one_shot_sums(dtype, device)
    except (ImportError, RuntimeError) as error:
        log.warning("ranks sum up by NCCL alone, for their GPUs cannot read each other's memory: %s", error)
    if not least(int(made is not None)) or made is None:
        return None
    most, width = 0, _ROW_BYTES // dtype.itemsize
    for rows in _TIMED:
        own = torch.arange(rows * width, device=device).remainder(7).to(dtype).view(rows, width)
        own += distributed.get_rank()
        right = torch.equal(made.summed(own), by_nccl(own.clone()))
        graphs = [_graph_of(partial(way, own)) for way in (partial(_added, made), by_nccl)]
        # By turns, since a device that was idle is slow at first.
        times = [min(each) for each in zip(*([_us(graph) for graph in graphs] for _ in range(_REPLAYS)), strict=True)]
        log.info("a sum of %d rows of %d: %.1f us in one shot, %.1f by NCCL", rows, width, *times)
        if not least(int(right and times[0] < times[1])):
            break
        most = own.nbytes
    made.most_bytes = most
    return made if most else None


def _added(sums: TritonRankSums, own: Tensor) -> Tensor:
    """As a layer sums up, whose part lies where others read it."""
    return sums.add(sums.place(*own.shape), own)[0]


def _shared(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Zeros of each rank, in their order, that all can read and write."""
    # Only here: a module of PyTorch that has no public name yet.
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(*shape, dtype=dtype, device=device).zero_()
    torch.cuda.synchronize(device)
    assert distributed.group.WORLD is not None, "ranks have met"
    # All have their zeros once it returns.
    memory = symmetric.rendezvous(own, group=distributed.group.WORLD.group_name)
    ranks = range(distributed.get_world_size())
    return tuple(own if rank == memory.rank else memory.get_buffer(rank, own.shape, dtype) for rank in ranks)


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
