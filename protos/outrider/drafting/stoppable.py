"""What every link to a draft can do, however it reaches it."""

from __future__ import annotations

from typing import Protocol

from outrider.wire.frames import DraftLink


class StoppableLink(DraftLink, Protocol):
    """A draft link that holds a thread, a connection or a drafter."""

    def stop(self) -> None:
        """Let go of everything. Nothing is delivered afterwards. Idempotent."""
