"""Receives the events of an engine that runs in this process."""

from __future__ import annotations

import queue
from collections.abc import Callable

from target_service.core.sequence import SequenceEvent, SequenceFinished, StepVerdict

_TIMEOUT_SECONDS = 600.0


class EngineEvents:
    """Passes verdicts on at once, and queues finished sequences. `deliver` is what an engine is started with."""

    def __init__(self, on_verdict: Callable[[StepVerdict], None]) -> None:
        """`on_verdict` is called in the engine's thread."""
        self._on_verdict = on_verdict
        self._finished: queue.Queue[SequenceFinished | Exception] = queue.Queue()

    def deliver(self, events: list[SequenceEvent]) -> None:
        """Called by the engine's thread, between its steps."""
        for event in events:
            if isinstance(event, StepVerdict):
                self._on_verdict(event)
            elif isinstance(event, SequenceFinished):
                self._finished.put(event)
            else:
                self._finished.put(RuntimeError(f"a sequence failed: {event}"))

    def wait(self) -> SequenceFinished:
        """Wait for the next sequence to finish.

        Raises:
            RuntimeError: it failed.
            queue.Empty: none finished for ten minutes.
        """
        finished = self._finished.get(timeout=_TIMEOUT_SECONDS)
        if isinstance(finished, Exception):
            raise finished
        return finished
