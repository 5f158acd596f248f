"""Where PyTorch launches kernels: on which of several GPUs, and on which stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Milestone:
    """A place in what a GPU was asked to do, which the host can wait for. On a CPU there is nothing to wait for."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """It is behind all that was asked for so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the GPU has come to where it was recorded last."""
        if self._event is not None:
            self._event.synchronize()


def launching_on(device: str) -> AbstractContextManager[object]:
    """Kernels that are launched meanwhile run where the drafter's tensors are, which need not be where the rest of the
    process has its own: a draft may share the target's process and not its GPU."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


@contextmanager
def on_stream_of_its_own(device: str) -> Iterator[None]:
    """What this thread launches on a GPU meanwhile waits for nothing that other threads launched. Streams of PyTorch's
    have the lowest priority unless another is asked for."""
    if not device.startswith("cuda"):
        yield
        return
    with launching_on(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
