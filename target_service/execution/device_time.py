"""How long the device was busy and idle, by its own clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch

_NS_PER_MS = 1_000_000
# Spans that are used in turn: of the launch under way, the one behind it and the one before, of which times are taken.
_SPANS = 4


class DeviceSpan:
    """The time from the first to the last kernel of one launch."""

    def __init__(self) -> None:
        self.begun: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> DeviceSpan:
        """Begin with what is launched next. Returns this span."""
        self.begun.record()
        return self

    def close(self) -> None:
        """End with what was launched last."""
        self.ended.record()


def device_spans() -> Iterator[DeviceSpan]:
    """Spans of launches, each used again for the fourth after it: to make two events takes the host longer than to
    record one."""
    return cycle([DeviceSpan() for _ in range(_SPANS)])


class DeviceTime:
    """Measures launches that follow each other."""

    def __init__(self) -> None:
        self._last: DeviceSpan | None = None

    def take(self, span: DeviceSpan | None, *, follows: bool) -> tuple[int, int]:
        """Nanoseconds that the launch before `span` was busy, and idle until `span` began, once the results of the
        former are there; zeros unless `span` `follows` it without a pause in between."""
        last, self._last = self._last, span
        if last is None or span is None or not follows:
            return 0, 0
        busy, idle = last.begun.elapsed_time(last.ended), last.ended.elapsed_time(span.begun)
        return int(busy * _NS_PER_MS), max(0, int(idle * _NS_PER_MS))
