"""What an engine in this process tells between its steps."""

from __future__ import annotations

import queue
from collections.abc import Callable

from target_service.core.sequence import SequenceEvent, SequenceFinished, Verdict

_TIMEOUT_SECONDS = 600.0


class EngineEvents:
    """Hands verdicts on, and keeps ends until somebody waits for them. `note` is what an engine is started with."""

    def __init__(self, say: Callable[[Verdict], None]) -> None:
        """`say` is called in the engine's thread."""
        self._say = say
        self._ended: queue.Queue[SequenceFinished | Exception] = queue.Queue()

    def note(self, events: list[SequenceEvent]) -> None:
        """Called by the engine's thread, between its steps."""
        for event in events:
            if isinstance(event, Verdict):
                self._say(event)
            elif isinstance(event, SequenceFinished):
                self._ended.put(event)
            else:
                self._ended.put(RuntimeError(f"a sequence failed: {event}"))

    def wait(self) -> SequenceFinished:
        """The next sequence that has ended.

        Raises:
            RuntimeError: it failed.
            queue.Empty: none ended for ten minutes.
        """
        ended = self._ended.get(timeout=_TIMEOUT_SECONDS)
        if isinstance(ended, Exception):
            raise ended
        return ended
