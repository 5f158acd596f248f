"""An event loop whose time is that of its timers: nobody waits for them, and nothing else takes time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select()
        self.now += max(0.0, timeout)
        return super().select(0)


class TimelessLoop(asyncio.SelectorEventLoop):
    """Sleeps end at once, in order, and `time` says what they would have taken."""

    def __init__(self) -> None:
        self._own = _Selector()
        super().__init__(self._own)

    def time(self) -> float:
        return self._own.now
