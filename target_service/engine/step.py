"""A step under way: what was laid out, what the device makes of it, and when."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from target_service.core.sequence import StepStats, Verdict
from target_service.engine.stats import StepClock, step_stats
from target_service.execution.batch import StepBatch
from target_service.execution.host_executor import Launched
from target_service.sampling.verifier import Verified
from target_service.speculation.hidden_states.encoding import StepFeatures
from target_service.speculation.policy.gathered import Gathered
from tree_kernels.node_table import MAX_PATH


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of the engine."""

    batch: StepBatch
    gathered: Gathered
    launched: Launched
    clock: StepClock
    # Launched while the step before it ran, and that one had trees of more than their roots.
    ahead: bool
    behind_tree: bool
    # Passes launched at once.
    stride: int
    # One tenant's alone.
    own: bool
    # Of its rows, where a drafter reads them.
    features: StepFeatures | None

    @property
    def has_drafts(self) -> bool:
        """Whether it may accept drafted rows, and so ends nobody knows where."""
        return self.batch.drafted or self.batch.device_rows is not None

    @property
    def work(self) -> tuple[int, int]:
        """Sequences that decode in it, and rows of prompts beside them."""
        return sum(item.known == 1 for item in self.batch.items), self.batch.prefill_rows

    def seconds_since(self, ended_ns: int) -> float:
        """What one of its passes took of everybody's time, after a step that ended then; 0 is after a pause."""
        return (self.clock.committed - (ended_ns or self.clock.begun)) * 1e-9 / self.stride

    def await_tokens(self) -> None:
        """Let its sequences be scheduled and laid out as if it had said its tokens, and accepted no drafted one, until
        `forget_tokens`."""
        chosen = self.batch.device_rows.most if self.batch.device_rows is not None else None
        for place, item in enumerate(self.batch.items):
            if item.tree is not None:
                item.sequence.pending, item.sequence.pending_tokens = place, self.stride
                most = min(chosen[place], MAX_PATH) * self.stride if chosen is not None else 0
                item.sequence.pending_drafts = max(item.tree.depths) + most

    def forget_tokens(self) -> None:
        """See `await_tokens`."""
        for item in self.batch.items:
            item.sequence.pending, item.sequence.pending_tokens, item.sequence.pending_drafts = None, 0, 0

    def moved_on(self, before: SequenceOf[Verified | None]) -> Step:
        """The step, launched while another ran, now that it is known what that one accepted."""
        counts = [0 if outcome is None else outcome.accepted for outcome in before]
        return replace(self, batch=self.batch.moved_on(counts)) if any(counts) else self

    def stats(
        self,
        outcomes: SequenceOf[Verified | None],
        verdicts: SequenceOf[Verdict],
        free_ns: int,
        features: tuple[int, int],
        device_ns: tuple[int, int],
        round_trip_ns: int,
        *,
        followed: bool,
    ) -> StepStats:
        """Its figures; see `step_stats`."""
        on_device = self.launched.on_device
        return step_stats(
            self.batch,
            self.gathered,
            outcomes,
            verdicts,
            self.clock,
            free_ns,
            on_device=on_device,
            passes=self.stride,
            features=features,
            device_ns=device_ns,
            round_trip_ns=round_trip_ns,
            followed=followed,
        )
