"""What a host waits for that copies to or from a device without waiting."""

from __future__ import annotations

import torch


class DeviceEvent:
    """An event on the current stream that the host can wait for. On a CPU there is nothing to wait for."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Record the event behind all work launched so far."""
        if self._event is not None:
            self._event.record()

    def reached(self) -> bool:
        """Whether the GPU has reached the last recording."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the GPU has reached the last recording."""
        if self._event is not None:
            self._event.synchronize()
