"""What a draft link delivers to its receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from outrider.processes.messages import ProcessMessage
from outrider.wire.frames import DraftInfo, SequenceGrowth


class Grown(msgspec.Struct, frozen=True):
    """Nodes arrived, in one frame."""

    growths: Sequence[SequenceGrowth]


class SequenceFailure(ProcessMessage, frozen=True):
    """The draft closed one sequence; the target continues it without drafts."""

    sequence_id: int
    reason: str
    message: str


class Opened(ProcessMessage, frozen=True):
    """The draft follows a sequence from now on, and needs no hidden states of tokens before `features_from`."""

    sequence_id: int
    features_from: int


class Connected(ProcessMessage, frozen=True):
    """A draft with the target's vocabulary is connected. The receiver opens its live sequences (again)."""

    info: DraftInfo


class Disconnected(ProcessMessage, frozen=True):
    """The draft is disconnected, or could not be reached. It has lost its state of every sequence."""

    reason: str


class Lost(ProcessMessage, frozen=True):
    """The one of several drafts that followed these sequences is disconnected. The receiver opens them again, at the
    others."""

    sequence_ids: list[int]


DraftEvent = Grown | Opened | SequenceFailure | Connected | Disconnected | Lost


class DraftEvents(Protocol):
    """Where a draft link delivers what it receives."""

    def receive(self, event: DraftEvent) -> None:
        """Called from the link's own thread; must not block."""
