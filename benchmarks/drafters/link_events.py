"""What the benchmarks of a draft link share: the receiver of its events, and a sequence to open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NoReturn

from outrider.drafting.events import Connected, Disconnected, DraftEvent, Grown, Lost, SequenceFailure
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import OpenSequence, SequenceGrowth, StoppableLink, TreeLimits

VOCABULARY_SIZE = 49_152


class LinkEvents:
    """Receives a link's events, except growth, on its thread. Waiting for them ends the script if the draft fails."""

    def __init__(self) -> None:
        self._connected = threading.Event()
        self._reason = "it does not answer"

    def wait_for_draft(self) -> None:
        """Wait for the connection. Raises `SystemExit` after a minute."""
        if not self._connected.wait(60.0):
            self.give_up()

    def give_up(self) -> NoReturn:
        """Raise `SystemExit` with what the link reported last of the draft."""
        raise SystemExit(f"no draft: {self._reason}")

    def receive(self, event: DraftEvent) -> None:
        match event:
            case Grown():
                self.grow(event.growths)
            case SequenceFailure():
                self._reason = event.message
            case Connected():
                self._connected.set()
            case Disconnected():
                self._reason = event.reason
                self._connected.clear()
            case Lost():
                self._reason = "it lost its sequences"

    def grow(self, growths: Sequence[SequenceGrowth]) -> None:
        """Receive growth."""
        raise NotImplementedError


def open_sequence(link: StoppableLink, sequence_id: int, prompt_tokens: int) -> None:
    """Open a greedy sequence with a prompt that repeats nothing."""
    link.open(
        OpenSequence(
            sequence_id=sequence_id,
            token_ids=tuple(i * 7919 % 997 for i in range(prompt_tokens)),
            prompt_length=prompt_tokens,
            step=0,
            seed=sequence_id,
            mode=VerificationMode.GREEDY,
            sampling=SamplingParams(),
            limits=TreeLimits(),
            vocabulary_size=VOCABULARY_SIZE,
        )
    )
