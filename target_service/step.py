"""A step under way: what was laid out, what the device makes of it, and when."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from target_service.batch import StepBatch
from target_service.gathering import Gathered
from target_service.launch import Launched
from target_service.model.taps import Tapped
from target_service.observation import StepClock, step_stats
from target_service.sequence import StepStats, Verdict


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of the engine."""

    batch: StepBatch
    gathered: Gathered
    launched: Launched
    clock: StepClock
    # Launched while the step before it ran.
    ahead: bool
    # Passes launched at once.
    stride: int
    # Hidden states of its rows, where a drafter reads them.
    tapped: Tapped | None

    @property
    def followable(self) -> bool:
        """Whether it is known what every sequence will have committed, though not which token."""
        trees = (item.tree for item in self.batch.items)
        return self.launched.followable and not any(tree is not None and tree.drafted for tree in trees)

    def await_tokens(self) -> None:
        """Let its sequences be scheduled and laid out as if it had said its tokens, until `forget_tokens`."""
        for place, item in enumerate(self.batch.items):
            if item.tree is not None:
                item.sequence.awaited, item.sequence.awaited_tokens = place, self.stride

    def forget_tokens(self) -> None:
        """See `await_tokens`."""
        for item in self.batch.items:
            item.sequence.awaited, item.sequence.awaited_tokens = None, 0

    def stats(self, verdicts: SequenceOf[Verdict], free_ns: int, features: tuple[int, int]) -> StepStats:
        """Its figures; see `step_stats`."""
        on_device = self.launched.on_device
        return step_stats(
            self.batch,
            self.gathered,
            verdicts,
            self.clock,
            free_ns,
            on_device=on_device,
            passes=self.stride,
            features=features,
        )
