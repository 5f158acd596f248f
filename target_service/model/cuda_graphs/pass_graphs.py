"""Launches around captured passes, as CUDA graphs of their own: single launches cost the host more than their kernels
cost the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from tree_kernels.graph_capture import CAPTURING

Result = TypeVar("Result")


class PassGraphs:
    """Graphs by the owner of the buffers that they read, and by what is launched. All share memory for what lies
    between their kernels, so they are for one stream."""

    def __init__(self, device: torch.device) -> None:
        # By the owner of the buffers, for as long as that lives: each graph, and what its launch returned.
        self._graphs: WeakKeyDictionary[object, dict[Hashable, tuple[torch.cuda.CUDAGraph, object]]] = (
            WeakKeyDictionary()
        )
        self._device = device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool: Any = torch.cuda.graph_pool_handle()

    def replay_or_capture(self, graph_buffers: object | None, work: Hashable, launch: Callable[[], Result]) -> Result:
        """Replay what `launch` launches, captured now if it was not yet; tensors that it returns are overwritten by
        every replay.

        Args:
            graph_buffers: the owner of the tensors that it reads and writes, which keep their addresses, such as
                `ForwardPass.graph_buffers`; with None it is launched as it is.
            work: what is launched, of all that there is for these buffers.
        """
        if graph_buffers is None:
            return launch()
        graphs = self._graphs.setdefault(graph_buffers, {})
        if work in graphs:
            graph, result = graphs[work]
            graph.replay()
            return cast("Result", result)
        done = launch()
        self.capture(graph_buffers, work, launch)
        return done

    def capture(self, graph_buffers: object, work: Hashable, launch: Callable[[], object]) -> None:
        """Have `replay_or_capture` replay this work from now on. Captured once every kernel is compiled, by an earlier
        launch. Runs nothing."""
        self._graphs.setdefault(graph_buffers, {})[work] = self._capture(launch)

    def has(self, graph_buffers: object, work: Hashable) -> bool:
        """Whether this work is captured."""
        return work in self._graphs.get(graph_buffers, {})

    def _capture(self, launch: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with CAPTURING, torch.cuda.stream(self._stream):
            # Not `torch.cuda.graph`, which collects garbage first: this may happen while requests wait.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = launch()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph, result
