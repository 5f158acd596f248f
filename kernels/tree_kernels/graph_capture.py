"""Work of a GPU as CUDA graphs: what launches many kernels costs the host one launch from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from tree_kernels.attention.triton_planning import TritonPlan

Output = TypeVar("Output")
# Held while a thread captures: one that begins waits for the whole device, which CUDA forbids while another captures.
CAPTURING = threading.Lock()


class GraphCapture:
    """Captures graphs that share the memory of what they compute, so that one of them runs at a time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """`stream` of the capture, whose priority the graphs' kernels keep."""
        self._stream = stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Output], plan: TritonPlan | None = None) -> tuple[torch.cuda.CUDAGraph, Output]:
        """The graph of `run`, and its output there, which every replay overwrites. It must be repeatable with the same
        inputs, since it runs several times. `plan` is that of its attention, if there is some."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Layers are compiled, and libraries allocate what they keep.
            for _ in range(2):
                run()
        self._stream.synchronize()
        # The first layer makes the schedule, which has to become part of the graph.
        if plan is not None:
            plan.clear_schedules()
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads meanwhile, such as allocations of pinned memory, do no harm.
        mode = "thread_local"
        with CAPTURING, torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            output = run()
        current.wait_stream(self._stream)
        return graph, output
