"""The time budget of a run, and its progress: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from outrider.consoles import error_console

log = logging.getLogger(__name__)


class Phase:
    """One part of a run, from 0 to 1."""

    def __init__(self, name: str, bars: Progress | None) -> None:
        self._name = name
        self._bars = bars
        self._task = bars.add_task(name, total=1.0, figures="", left="") if bars is not None else None
        self._began = self._last_line = time.monotonic()
        self._first: float | None = None

    def update(self, fraction: float, figures: str) -> None:
        """Report the fraction done, and `figures` with it. Cheap: log lines are limited in rate."""
        now = time.monotonic()
        if self._first is None:
            # A resumed run starts in the middle.
            self._first, self._began = fraction, now
        gone = fraction - self._first
        remaining = ""
        if gone > 0:
            seconds = (now - self._began) * max(0.0, 1 - fraction) / gone
            remaining = f"{timedelta(seconds=round(seconds))} left"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=min(1.0, fraction), figures=figures, left=remaining)
        elif now - self._last_line >= 10.0:
            # Chosen, not measured: a run of minutes should not seem to hang, nor one of hours flood its log.
            self._last_line = now
            log.info("%s: %3.0f %%, %s, %s", self._name, 100 * min(1.0, fraction), remaining or "beginning", figures)


@contextlib.contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Report the progress of a part of the run."""
    if not sys.stderr.isatty():
        yield Phase(name, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}  {task.fields[figures]}"),
    )
    with Progress(*columns, console=error_console()) as bars:
        yield Phase(name, bars)


@dataclass(frozen=True, slots=True)
class Budget:
    """Time since the run began; `seconds` of 0 is unbounded."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def part(self, share: float) -> float:
        """Seconds until this share of the whole is over, negative after it."""
        return self.seconds * share - self.elapsed if self.seconds else math.inf
