"""How long the device was busy and idle, by its own clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch


class DeviceSpan:
    """The time from the first to the last kernel of one launch."""

    def __init__(self) -> None:
        self._begun: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record_start(self) -> DeviceSpan:
        """Begin with what is launched next. Returns this span."""
        self._begun.record()
        return self

    def record_end(self) -> None:
        """End with what was launched last."""
        self._ended.record()

    def until(self, following: DeviceSpan) -> tuple[int, int]:
        """Nanoseconds from begin to end, and from there to the begin of the `following` span, once this one's results
        are there."""
        busy, idle = self._begun.elapsed_time(self._ended), self._ended.elapsed_time(following._begun)
        return int(busy * 1e6), max(0, int(idle * 1e6))


def device_spans() -> Iterator[DeviceSpan]:
    """Spans of launches, each used again for the fourth after it: to make two events takes the host longer than to
    record one."""
    # Spans that are used in turn: of the launch under way, the one behind it and the one before, of which times are
    # taken.
    return cycle([DeviceSpan() for _ in range(4)])
