"""Drafts on a simulated device: when their trees are there. What those hold is drawn by the device."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

from benchmarks.loads.shapes import LoadedShape
from benchmarks.shared.virtual_clock import VirtualClock
from outrider.drafting.events import Connected, DraftEvents, Grown
from outrider.wire.frames import DraftInfo, OpenSequence, SequenceAdvance, SequenceFeatures, SequenceGrowth, TreeLimits
from target_service.speculation.drafts import DraftTrees


class SimulatedDraft:
    """A `DraftLink` that answers every commit after a while, with trees of a node: what they hold is drawn by the
    device."""

    def __init__(self, events: DraftEvents, clock: VirtualClock, shape: LoadedShape) -> None:
        self._events, self._clock, self._shape = events, clock, shape
        self._ids = itertools.count(1)
        # By sequence: when answers come, and the steps that they are for.
        self._answers: dict[int, deque[tuple[float, int]]] = {}
        events.receive(Connected(DraftInfo("simulated", 0, "", TreeLimits(), 1 << 20, "0")))

    @property
    def is_followed(self) -> bool:
        return bool(self._answers)

    def answered(self, sequence_id: int, at: float) -> int | None:
        """The last step of a sequence that is answered at a time."""
        known = [step for due, step in self._answers.get(sequence_id, ()) if due <= at]
        return max(known, default=None)

    def open(self, sequence: OpenSequence) -> None:
        self._answers[sequence.sequence_id] = deque(maxlen=8)
        self._answer([(sequence.sequence_id, sequence.step)])

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        self._answer([(one.sequence_id, one.step) for one in advances])

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        raise AssertionError(f"{len(features)} features for a draft that reads none")

    def close(self, sequence_ids: Sequence[int]) -> None:
        for each in sequence_ids:
            self._answers.pop(each, None)

    def cut_off(self, reason: str) -> None:
        raise AssertionError(reason)

    def _answer(self, steps: Sequence[tuple[int, int]]) -> None:
        due = self._clock.now + self._shape.answer + self._shape.answer_each * len(steps)
        for sequence_id, step in steps:
            self._answers[sequence_id].append((due, step))
        self._clock.call_at(due, lambda: self._deliver(steps))

    def _deliver(self, steps: Sequence[tuple[int, int]]) -> None:
        growths = [
            SequenceGrowth(sequence_id, step, next(self._ids), (0,), (1,), (0.5,), replaces=True)
            for sequence_id, step in steps
            if sequence_id in self._answers
        ]
        if growths:
            self._events.receive(Grown(growths))


class BehindPasses:
    """A drafter that the target's own passes run: each leaves the trees of its new roots."""

    def __init__(self, drafting: DraftTrees, steps: Mapping[int, int]) -> None:
        """`steps` are those that the device made of each sequence."""
        self._drafting, self._steps = drafting, steps
        drafting.draft_in_passes(DraftInfo("simulated", 0, "", TreeLimits(), 1 << 20, "0"))

    @property
    def is_followed(self) -> bool:
        return self._drafting.active

    def answered(self, sequence_id: int, _at: float) -> int | None:
        """The last step of a sequence that is answered."""
        return self._steps[sequence_id] if self.is_followed else None
