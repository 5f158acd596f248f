"""A step under way: its batch, its launch, and its times."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from target_service.core.sequence import Sequence, StepStats, StepVerdict
from target_service.execution.batch import StepBatch
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import Launched
from target_service.sampling.verifier import Verified
from target_service.speculation.hidden_states.encoding import StepFeatures
from target_service.speculation.policy.gathering import Gathered
from target_service.speculation.policy.launch_mode import LaunchMode
from tree_kernels.node_table.layout import MAX_PATH


class StepClock:
    """When a step's phases ended, in monotonic nanoseconds, in the order of the attributes.

    Attributes:
        planned: the step is laid out.
        launched: the host is free again. If it computed the step itself, the forward pass has ended too: `forwarded`
            is set with it.
        waits_since: the host began to wait for the device, apart from the time in which it held the next launch.
        forwarded: the device's results have arrived.
        verified: every tree's outcome is known.
        committed: tokens are committed, and sent to the draft.
        draft_wait_ns: how long the launch was held for the draft's answer.
    """

    def __init__(self) -> None:
        self.begun = self.planned = self.launched = self.waits_since = time.monotonic_ns()
        self.forwarded = self.verified = self.committed = self.begun
        self.draft_wait_ns = 0


@dataclass(frozen=True, slots=True)
class LastStep:
    """What the times of a step are counted from: the one before it.

    Attributes:
        free_ns: when the device had ended it; 0 without one, behind a pause.
        ended_ns: when its results were committed, likewise.
        span: when the device was busy with it.
    """

    free_ns: int = 0
    ended_ns: int = 0
    span: DeviceSpan | None = None

    def device_ns(self, following: DeviceSpan | None) -> tuple[int, int]:
        """How long the device was busy with it, and idle until the `following` launch; 0 where that is unknown."""
        return (0, 0) if self.span is None or following is None else self.span.until(following)


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of the engine."""

    batch: StepBatch
    gathered: Gathered
    launched: Launched
    clock: StepClock
    # Launched while the step before it ran, and whether that one had drafted rows.
    ahead: bool
    behind_tree: bool
    # Passes launched at once.
    passes: int
    # See `Schedule.own`.
    own: bool
    # Hidden states of its rows, where a drafter reads them.
    features: StepFeatures | None
    # See `Schedule.unread`.
    unread: int = 0

    @property
    def mode(self) -> LaunchMode:
        """How it was launched; without a predecessor under way it counts as held."""
        return LaunchMode.RUN_AHEAD if self.ahead else LaunchMode.WAIT_FOR_DRAFT

    @property
    def has_drafts(self) -> bool:
        """Whether it may accept drafted rows, so that its length is unknown until it has ended."""
        return self.batch.drafted or self.batch.device_rows is not None

    @property
    def size(self) -> tuple[int, int]:
        """Its sequences, and the rows that the device chose for it (0 if the host did)."""
        return len(self.batch.items), self.batch.device_rows.rows if self.batch.device_rows is not None else 0

    @property
    def timed_as(self) -> tuple[int, int]:
        """Steps of about the same time: its size, or with prompts no sequences, and its rows by powers of two."""
        if not self.batch.prefill_rows:
            return self.size
        return 0, max(self.size[1], len(self.batch.input.token_ids)).bit_length()

    @property
    def keys(self) -> dict[int, int]:
        """Most keys that each sequence has when its passes have ended, by sequence id."""
        return {item.sequence.sequence_id: keys for item, keys in self.batch.keys(self.passes) if item.kept}

    @property
    def work(self) -> tuple[int, int]:
        """Sequences that decode in it, and rows of prompts."""
        return sum([item.known == 1 for item in self.batch.items]), self.batch.prefill_rows

    @property
    def drafted_rows(self) -> int:
        """Rows in which the device may have drafted ones."""
        rows = self.batch.device_rows
        return 0 if rows is None else rows.rows - rows.laid_out_rows - len(self.batch.items) + rows.laid_out

    def await_tokens(self, sits_out: Callable[[Sequence], bool]) -> None:
        """Lay out its sequences as if it had sampled their tokens and accepted no drafts, until `forget_tokens`; those
        that sit out are not laid out at all."""
        items, passes = self.batch.items, self.passes
        chosen = self.batch.device_rows.most if self.batch.device_rows is not None else (0,) * len(items)
        for place, (item, most) in enumerate(zip(items, chosen, strict=True)):
            if item.tree is not None:
                sequence = item.sequence
                sequence.pending, sequence.pending_tokens = place, passes
                sequence.sits_out = sits_out(sequence)
                sequence.pending_drafts = max(item.tree.depths) + min(most, MAX_PATH) * passes

    def forget_tokens(self) -> None:
        """Undo `await_tokens`."""
        for item in self.batch.items:
            sequence = item.sequence
            sequence.pending, sequence.pending_tokens, sequence.pending_drafts = None, 0, 0
            sequence.sits_out = False

    def shifted_by_accepted(self, before: SequenceOf[Verified | None]) -> Step:
        """This step, which was launched while another ran, moved by what that one accepted. Its rows are not: the
        executor has moved them."""
        counts = [0 if outcome is None else outcome.accepted for outcome in before]
        return replace(self, batch=self.batch.items_shifted(counts)) if any(counts) else self

    def without(self, sequence: Sequence) -> Step:
        """This step, of which the outcome for a sequence does not count."""
        return replace(self, batch=self.batch.without(sequence))

    def stats(
        self,
        outcomes: SequenceOf[Verified | None],
        verdicts: SequenceOf[StepVerdict],
        last: LastStep,
        *,
        features: tuple[int, int],
        round_trip_ns: int,
        with_draft: bool,
    ) -> StepStats:
        """Its figures, once it is committed.

        Args:
            last: the step before, behind which the device could begin one launched ahead.
            features: vectors sent to the draft since the step before, and their bytes.
            round_trip_ns: time of the draft's last answer, 0 without one.
            with_draft: whether any sequence is open at a draft.
        """
        batch, clock, wait_ns = self.batch, self.clock, self.gathered.wait_ns + self.clock.draft_wait_ns
        chosen = [one for outcome in outcomes if outcome is not None for one in outcome.device_passes]
        from_table, drafted = [one.drafted_from_table for one in chosen], [one.drafted for one in chosen]
        busy_ns, idle_ns = last.device_ns(self.launched.span)
        laid_out = len(batch.items) if batch.device_rows is None else batch.device_rows.laid_out
        drafted += [item.tree.drafted for item in batch.items[:laid_out] if item.tree is not None]
        return StepStats(
            sequences=len(batch.items),
            committed_sequences=sum([verdict.passes for verdict in verdicts]),
            drafted_sequences=len(drafted) - drafted.count(0),
            decode_rows=batch.decode_rows,
            prefill_rows=batch.prefill_rows,
            drafted_tokens=sum(drafted),
            accepted_tokens=sum([verdict.drafted_tokens for verdict in verdicts]),
            committed_tokens=sum([len(verdict.token_ids) for verdict in verdicts]),
            fallback_sequences=self.gathered.fallbacks,
            draft_wait_ns=wait_ns,
            plan_ns=clock.planned - clock.begun - wait_ns,
            # Elsewhere the launch is the forward pass itself.
            launch_ns=clock.launched - clock.planned if self.launched.on_device else 0,
            forward_ns=clock.forwarded - max(clock.planned, last.free_ns),
            verify_ns=clock.verified - clock.forwarded,
            commit_ns=clock.committed - clock.verified,
            total_ns=clock.committed - max(clock.begun, last.free_ns),
            feature_vectors=features[0],
            feature_bytes=features[1],
            hits=len(from_table) - from_table.count(0),
            misses=from_table.count(0) if with_draft else 0,
            chosen_rows=sum([one.drafted for one in chosen]),
            chosen_accepted=sum([one.accepted for one in chosen]),
            table_rows=sum(from_table),
            table_accepted=sum([one.accepted_from_table for one in chosen]),
            expected_tokens=sum([one.expected for one in chosen]),
            round_trip_ns=round_trip_ns,
            busy_ns=busy_ns,
            idle_ns=idle_ns,
            passes=self.passes,
            common_page_passes=self.passes if batch.input.attention.common_pages else 0,
        )
