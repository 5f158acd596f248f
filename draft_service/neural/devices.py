"""The device and the stream on which PyTorch launches kernels, and events to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class DeviceEvent:
    """An event on the current stream that the host can wait for. On a CPU there is nothing to wait for."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Record the event behind all work launched so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the GPU has reached the last recording."""
        if self._event is not None:
            self._event.synchronize()


def launching_on(device: str) -> AbstractContextManager[object]:
    """Launch kernels on this device in the block. It may differ from the process's default device: a draft may share
    the target's process and not its GPU."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


@contextmanager
def on_stream_of_its_own(device: str) -> Iterator[None]:
    """Launch this thread's kernels on a stream of its own in the block, so that they do not wait for other threads'.
    The stream has PyTorch's default priority, the lowest."""
    if not device.startswith("cuda"):
        yield
        return
    with launching_on(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
