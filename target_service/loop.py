"""One engine step, as a sentence: schedule, gather proposals, plan, forward, verify, commit, advance, emit.

Plain decoding is the same step with one-row trees. Single-threaded: `engine.py` owns the thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from outrider.errors import QuotaExceeded
from target_service.batch import Lookup, lay_out
from target_service.commit import LiveSequence, commit
from target_service.device_steps import best_steps
from target_service.draft_switch import DraftSwitch
from target_service.draft_times import Use
from target_service.drafting import Drafting
from target_service.drafting_config import DraftingConfig
from target_service.features import Features
from target_service.gathered import Gathered
from target_service.gathering import Gathering
from target_service.launch import Steps
from target_service.lookup_budget import LookupBudget
from target_service.model.runner import ModelRunner
from target_service.observation import EngineObserver, StepClock
from target_service.row_budget import RowBudget
from target_service.scheduler import Schedule, Scheduler, SchedulerConfig
from target_service.sequence import (
    Sequence,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    Verdict,
)
from target_service.step import Step
from target_service.step_cost import StepCost
from target_service.stride import Stride
from target_service.verifier import Verified

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of the engine; the defaults live in `TargetConfig`."""

    scheduler: SchedulerConfig
    drafting: DraftingConfig
    max_waiting: int
    max_draft_nodes: int
    # Verify one path of each tree, whose rows see what they would see one at a time.
    chains: bool = False
    # Rows of a sequence that the device drafts by itself at most, where it can.
    lookup_tokens: int = 0


class EngineLoop:
    """Every sequence under way, and the step that moves them on.

    Where the device verifies, and no draft and no client has to see what a step said, the next one is launched while
    it runs: its tokens are read on the device, and the host's work on either hides behind the other.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        steps: Steps | None = None,
        step_cost: StepCost | None = None,
        observer: EngineObserver | None = None,
        stride: Stride | None = None,
    ) -> None:
        """`steps` of None takes the runner's best. `step_cost` of None verifies every drafted row that is allowed, and
        waits for drafts whether they pay or not."""
        self._runner = runner
        bounds = config.scheduler
        self._steps = steps or best_steps(runner, max_sequences=bounds.max_running, max_rows=bounds.max_step_rows)
        self._observer = observer
        self._budget = RowBudget(step_cost)
        self.features = Features(runner, config.drafting.feature_window if config.drafting.enabled else 0)
        self.drafting = Drafting(config.drafting, runner.vocabulary_size, self.features)
        self.scheduler = Scheduler(config.scheduler, runner.cache)
        self.live: dict[int, LiveSequence] = {}
        most = config.lookup_tokens if self._steps.looks_up else 0
        self._lookup_budget = LookupBudget(most, step_cost, self.live, config.drafting.disable_above)
        self._gathering = Gathering(
            self.drafting,
            self.scheduler,
            self._budget,
            self.live,
            max_draft_nodes=config.max_draft_nodes,
            chains=config.chains,
            switch=None if step_cost is None else DraftSwitch(),
            lookup_budget=self._lookup_budget,
        )
        self._stride = stride or Stride()
        self._ahead: Step | None = None
        self._failed: list[SequenceEvent] = []
        # When the device had ended the last step, and when its results had been dealt with; 0 after a pause.
        self._free_ns = self._ended_ns = 0

    def make(self, sequence_id: int, request: SequenceRequest) -> LiveSequence:
        """A sequence that has not begun. Touches nothing shared."""
        return LiveSequence.of(sequence_id, request, self._runner)

    def add(self, live: LiveSequence) -> None:
        """Let a sequence wait for its turn, and its draft read the prompt meanwhile."""
        self.live[live.sequence.sequence_id] = live
        self.scheduler.add(live.sequence)
        self.drafting.add(live.sequence)

    def end(self, sequence_id: int, outcome: str) -> LiveSequence | None:
        """Free all that a sequence holds. None when it is not under way."""
        live = self.live.pop(sequence_id, None)
        if live is None:
            return None
        sequence = live.sequence
        self.scheduler.remove(sequence)
        self.drafting.remove((sequence,))
        sequence.totals.finished_ns = sequence.totals.finished_ns or time.monotonic_ns()
        if self._observer is not None:
            self._observer.on_finished(sequence.request, sequence.totals, outcome)
        return live

    def step(self) -> list[SequenceEvent] | None:
        """Move every scheduled sequence on. The events of the step, or None when there was nothing to run."""
        step = self._ahead or self._launch()
        if step is None:
            self._ended_ns = 0
            return self._take_failed() or None
        self._ahead = self._launch_after(step)
        self.drafting.open_newcomers()
        step.clock.begin_wait()
        step.launched.wait()
        step.clock.end_forward()
        outcomes = step.launched.outcomes()
        step.clock.end_verify()
        verdicts = self._commit(step, outcomes)
        if self._ahead is not None:
            self._ahead = self._ahead.moved_on(outcomes)
        self.drafting.collect(step.batch.items, step.features, outcomes)
        self._advance(step, verdicts)
        events = self._finish(verdicts)
        step.clock.end_commit()
        if self._ahead is None and step.launched.followable and self.drafting.has_answered():
            # What is said of this step goes out while the device runs the next.
            self._ahead = self._launch()
        self._observe(step, outcomes, verdicts)
        return self._take_failed() + events

    def _launch(self) -> Step | None:
        """Schedule, gather what is drafted, and launch; again and smaller, while the device has no memory for it."""
        while True:
            clock = StepClock()
            self._follow_load()
            schedule = self.scheduler.schedule()
            if not schedule.chunks:
                return None
            try:
                return self._begin(schedule, self._gathering.gather(schedule), clock)
            except torch.OutOfMemoryError:
                self._make_room(schedule)

    def _launch_after(self, step: Step) -> Step | None:
        """Launch the step after `step` while that runs, if nobody's draft or client must see its tokens first."""
        clock, running = StepClock(), self.scheduler.running
        self._follow_load()
        alone = step.launched.followable and all(map(self._goes_on_alone, running))
        use = self._gathering.choose(running, ahead=alone)
        if use is Use.AFTER or not alone:
            return None
        step.await_tokens()
        try:
            schedule = self.scheduler.schedule()
            if not schedule.chunks or not self.scheduler.reserve_behind_trees(schedule, self._runner.max_context):
                return None
            if use is Use.AHEAD and not step.has_drafts:
                running_ns = time.monotonic_ns() - self._free_ns
                gathered = self._gathering.gather_ahead(schedule, step.stride, running_ns)
            else:
                gathered = self._gathering.plain(schedule)
            return self._begin(schedule, gathered, clock, behind=step)
        except torch.OutOfMemoryError:
            # Once this step has ended there may be room.
            return None
        finally:
            step.forget_tokens()

    def _passes(self, schedule: Schedule, gathered: Gathered, behind: Step | None) -> tuple[int, Lookup | None]:
        """Passes to launch at once, and what the device drafts for them."""
        if gathered.has_trees or (self.drafting.active and self.drafting.reads_features):
            # States are taken pass by pass.
            return 1, None
        lookup = self._lookup_budget.choose(schedule, self.scheduler.max_step_rows)
        # Only the device knows where what is behind drafts begins.
        several = behind is not None and (lookup is not None or not behind.has_drafts) and gathered.use is Use.PLAIN
        return self._stride.choose(schedule, self.scheduler, self._runner.max_context, lookup, several=several)

    def _goes_on_alone(self, sequence: Sequence) -> bool:
        """Whether neither the host nor a client has to see the sequence's tokens before they are fed."""
        return not sequence.request.external and self.live[sequence.sequence_id].verifier.on_device

    def _begin(self, schedule: Schedule, gathered: Gathered, clock: StepClock, *, behind: Step | None = None) -> Step:
        stride, lookup = self._passes(schedule, gathered, behind)
        batch = lay_out(schedule.chunks, gathered.trees, self._runner.cache, stride, lookup)
        clock.end_plan()
        verifiers = [self.live[item.sequence.sequence_id].verifier for item in batch.items]
        launched = self._steps.launch(batch, verifiers, stride)
        # Under a load that is not drafted for, nothing is taken; when it falls, heads begin with what follows.
        features = self.features.after_launch(len(batch.input.token_ids)) if self.drafting.active else None
        clock.end_launch()
        for item in batch.items:
            # Whatever runs after this step finds their keys and values.
            item.sequence.kv_length += item.known + stride - 1
        behind_tree = behind is not None and behind.batch.drafted
        return Step(batch, gathered, launched, clock, behind is not None, behind_tree, stride, features)

    def _make_room(self, schedule: Schedule) -> None:
        """Run smaller steps from now on; where the smallest did not fit, refuse the youngest of its sequences."""
        torch.cuda.empty_cache()
        if self.scheduler.shrink():
            log.warning("a step of %d rows did not fit the device's memory; steps are smaller now", schedule.rows)
            return
        youngest = max(chunk.sequence.sequence_id for chunk in schedule.chunks)
        error = QuotaExceeded("the device has no memory for a step", rows=schedule.rows)
        self.end(youngest, error.reason)
        self._failed.append(SequenceFailed(youngest, error))

    def _take_failed(self) -> list[SequenceEvent]:
        failed, self._failed = self._failed, []
        return failed

    def _observe(self, step: Step, outcomes: SequenceOf[Verified | None], verdicts: SequenceOf[Verdict]) -> None:
        """Let row budget and switch learn what steps cost, and the observer hear of the step."""
        stats = step.stats(outcomes, verdicts, self._free_ns, self.features.take_sent())
        # What is launched by now belongs to the next step.
        self._free_ns, ended_ns, self._ended_ns = step.clock.forwarded, self._ended_ns, step.clock.committed
        if not stats.prefill_rows:
            self._budget.observe_step(stats.decode_rows, stats.forward_ns * 1e-9 / step.stride)
            seconds, gathered = (self._ended_ns - ended_ns) * 1e-9, step.gathered
            if ended_ns and (step.ahead or gathered.drafted or not step.launched.followable):
                took, launching = seconds / step.stride, (stats.plan_ns + stats.launch_ns) * 1e-9
                drafted, behind = step.batch.drafted, step.behind_tree
                self._gathering.observe(stats.sequences, took, launching, gathered, drafted=drafted, behind_tree=behind)
            if ended_ns and step.ahead and gathered.use is Use.PLAIN and not step.behind_tree:
                self._stride.observe(step.stride, seconds, step.clock.waited_ns * 1e-9)
                self._lookup_budget.observe_time(stats.sequences, step.batch.lookup, seconds / step.stride)
        else:
            self._gathering.forget_pair()
        if self._observer is not None:
            self._observer.on_step(stats)

    def _follow_load(self) -> None:
        if self._gathering.follow_load() and self._observer is not None:
            self._observer.on_speculation(self.drafting.active)
        if not self._steps.in_background:
            # Else once a step runs, lest a draft in this process keep the device waiting.
            self.drafting.open_newcomers()

    def _commit(self, step: Step, outcomes: SequenceOf[Verified | None]) -> list[Verdict]:
        """Append what was said. Sequences that ended since the launch are passed over."""
        compute_ns = step.clock.verified - step.clock.begun
        verdicts: list[Verdict] = []
        self._lookup_budget.observe(step.batch.lookup, outcomes)
        for item, outcome in zip(step.batch.items, outcomes, strict=True):
            live = self.live.get(item.sequence.sequence_id)
            if live is None or item.tree is None or outcome is None:
                continue
            if step.gathered.answered or item.tree.drafted:
                self._gathering.learn(live, item.tree, outcome, step.gathered.row_cost)
            verdicts.append(commit(live, item.tree, outcome, compute_ns, kept=item.kept))
            # Not otherwise: what lies past the committed tokens may belong to passes that are under way.
            if item.tree.drafted:
                self.scheduler.trim(item.sequence)
        return verdicts

    def _advance(self, step: Step, verdicts: SequenceOf[Verdict]) -> None:
        """Tell the draft what was committed, so that it works while the events go out."""
        going_on = [verdict for verdict in verdicts if verdict.finish is None]
        self.drafting.advance(
            [(self.live[verdict.sequence_id].sequence, len(verdict.token_ids)) for verdict in going_on],
            self._gathering.holding(self._ahead.batch) if self._ahead and not step.batch.drafted else (),
        )

    def _finish(self, verdicts: SequenceOf[Verdict]) -> list[SequenceEvent]:
        """The events of the step; sequences that ended are freed."""
        events: list[SequenceEvent] = list(verdicts)
        for verdict in verdicts:
            if verdict.finish is not None:
                live = self.end(verdict.sequence_id, verdict.finish.reason.value)
                assert live is not None
                events.append(SequenceFinished(verdict.sequence_id, verdict.finish, live.sequence.totals))
        return events
