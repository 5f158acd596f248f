"""How long the device was busy and idle, by its own clock."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch

_NS_PER_MS = 1_000_000
# Spans that are used in turn: of the launch under way, the one behind it and the one before, of which times are taken.
_SPANS = 4


class DeviceSpan:
    """The time from the first to the last kernel of one launch."""

    def __init__(self) -> None:
        self._begun: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin with what is launched next."""
        self._begun.record()

    def close(self) -> None:
        """End with what was launched last."""
        self._ended.record()

    def idle_before(self, before: DeviceSpan) -> int:
        """Nanoseconds from the end of the launch before to the begin of this one, which has begun."""
        return max(0, int(before._ended.elapsed_time(self._begun) * _NS_PER_MS))

    def busy(self) -> int:
        """Nanoseconds from begin to end, once it has ended."""
        return int(self._begun.elapsed_time(self._ended) * _NS_PER_MS)


class DeviceSpans:
    """Spans of launches, used in turn: to make two events takes the host longer than to record one."""

    def __init__(self) -> None:
        self._spans = cycle([DeviceSpan() for _ in range(_SPANS)])

    def begin(self) -> DeviceSpan:
        """The span of what is launched next. It is used again for the fourth launch after it."""
        span = next(self._spans)
        span.begin()
        return span


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
        return last.busy(), span.idle_before(last)
