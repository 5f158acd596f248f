"""How long the device was at work and how long it waited, by its own clock."""

from __future__ import annotations

from typing import Any

import torch

_NS_PER_MS = 1_000_000


class DeviceSpan:
    """From the first to the last of what one launch put in the device's queue."""

    def __init__(self) -> None:
        """It begins with what is launched next."""
        self._begun: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begun.record()

    def close(self) -> None:
        """It ends with what was launched last."""
        self._ended.record()

    def idle_before(self, before: DeviceSpan) -> int:
        """Nanoseconds between the end of the launch before and the begin of this one, which has begun."""
        return max(0, int(before._ended.elapsed_time(self._begun) * _NS_PER_MS))

    def busy(self) -> int:
        """Nanoseconds from begin to end, once it has ended."""
        return int(self._begun.elapsed_time(self._ended) * _NS_PER_MS)


class DeviceTime:
    """Adds up spans that follow each other."""

    def __init__(self) -> None:
        self._last: DeviceSpan | None = None

    def take(self, span: DeviceSpan | None, *, follows: bool) -> tuple[int, int]:
        """Nanoseconds at work and idle of the launch before `span`, which has begun and said what it had to say;
        zeros unless it `follows` that without a pause in between."""
        last, self._last = self._last, span
        if last is None or span is None or not follows:
            return 0, 0
        return last.busy(), span.idle_before(last)
