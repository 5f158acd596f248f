"""Launches steps: how many passes and rows each has, and what it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import torch

from outrider.errors import OutriderError, QuotaExceeded
from target_service.config import TargetConfig
from target_service.core.running_means import RunningTime
from target_service.core.schedule import Schedule
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence
from target_service.engine.common_pages import CommonPages
from target_service.engine.slow_masks import SlowMasks
from target_service.engine.speculation import EngineSpeculation
from target_service.engine.step import Step, StepClock
from target_service.execution.batch import DeviceRows, StepBatch, lay_out
from target_service.execution.device_executor import best_steps
from target_service.execution.host_executor import HostSteps, Launched, Steps
from target_service.model.runner import ModelRunner
from target_service.speculation.hidden_states.encoding import AHEAD_ROWS
from target_service.speculation.policy.gathering import Gathered
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.predicted_nodes import (
    assign_slots,
    graft_expected,
    graft_predictions,
)

log = logging.getLogger(__name__)
# No pass is launched behind one that is expected to leave no answer: one whose answers have at most the tokens of so
# many recent passes left. By simulation of one stream 1 to 3 make 0.6 to 1.2 % more tokens a second, 2 most, and first
# tokens come 2 ms sooner (`benchmarks/results/2026-11-30-cpu-last-passes.md`).
_LAST_PASSES = 2.0


def choose_steps(runner: ModelRunner, config: TargetConfig) -> Steps:
    """The fastest executor for the runner, or the plain one in lockstep."""
    if config.lockstep:
        return HostSteps(runner)
    # Kernels of typical acceptance are compiled at start where requests may ask for it.
    typical, most_rows = config.allow_lossy, config.step_rows
    return best_steps(runner, max_sequences=config.max_running, max_rows=most_rows, typical=typical)


class StepLauncher:
    """Schedules steps and launches them, alone or behind the one that runs."""

    def __init__(
        self,
        runner: ModelRunner,
        steps: Steps,
        scheduler: Scheduler,
        speculation: EngineSpeculation,
        live: Mapping[int, LiveSequence],
        update_use: Callable[[], None],
        fail: Callable[[Sequence, OutriderError], None],
    ) -> None:
        """`live` are the sequences under way by id. `update_use` starts or stops drafting before a step is scheduled,
        and `fail` ends a sequence that no step has memory for."""
        self._runner = runner
        self._steps = steps
        self._scheduler = scheduler
        self._drafting, self._features = speculation.drafting, speculation.features
        self._gathering, self._updates = speculation.gathering, speculation.updates
        self._controller = speculation.controller
        self._live, self.slow_masks = live, SlowMasks(live)
        self._update_use = update_use
        self._fail = fail
        reads_once = runner.attention.reads_common_pages and scheduler.pages.prefixes is not None
        self._common = CommonPages(runner.cache.page_size) if reads_once else None
        self._mode = LaunchMode.RUN_AHEAD  # of the next pass
        # Seconds to launch a pass that is laid out, the mean of some ten.
        self._launching = RunningTime(0.1)

    def launch_next(self) -> Step | None:
        """Schedule, gather drafts and launch; with fewer rows again, while the device has no memory for it."""
        while True:
            clock = StepClock()
            self.slow_masks.update(None)
            self._update_use()
            schedule = self._scheduler.schedule()
            if not schedule.chunks:
                return None
            try:
                return self._launch(schedule, self._gathering.gather(schedule), clock)
            except torch.OutOfMemoryError:
                self._make_room(schedule)

    def launch_behind(self, step: Step) -> Step | None:
        """Launch the step after `step` while that runs, unless a draft needs its tokens first. A sequence whose tokens
        have to be on the host first sits out, and takes part in the step after the next."""
        clock, running = StepClock(), self._scheduler.running
        self.slow_masks.update(step)
        self._update_use()
        ready = any([not self._gathering.awaits_results(one) for one in running])
        ahead = step.launched.can_launch_before_results and ready
        use = self._gathering.choose(running, ahead=ahead)
        self._mode = LaunchMode.RUN_AHEAD
        if ahead and use is LaunchMode.RUN_AHEAD:
            self._mode = self._updates.choose_mode(len(running), self._launching.value)
        if (
            use is LaunchMode.WAIT_FOR_DRAFT
            or not ahead
            or self._mode is LaunchMode.WAIT_FOR_DRAFT
            or self._gathering.awaits_tokens(running)
            or self._ends_all(step)
        ):
            return None
        step.await_tokens(self._gathering.sits_out)
        try:
            schedule = self._scheduler.schedule()
            if not schedule.chunks or not self._scheduler.pages.reserve_behind_trees(
                schedule, self._runner.max_context
            ):
                return None
            return self._launch(schedule, self._gathering.without_waiting(schedule), clock, behind=step)
        except torch.OutOfMemoryError:
            # There may be memory once this step has ended.
            self._scheduler.restart_states()
            return None
        finally:
            step.forget_tokens()

    def _ends_all(self, step: Step) -> bool:
        """Whether the step under way probably ends every answer, by its drafts. A pass behind it would be for nothing
        then, and the next request would wait for its end."""
        scheduler, most = self._scheduler, _LAST_PASSES * self._controller.tokens_each.value
        return (
            step.has_drafts
            and not scheduler.waiting
            and all([one.kv_length >= len(one.token_ids) and one.remaining <= most for one in scheduler.running])
        )

    def _passes(self, schedule: Schedule, gathered: Gathered, behind: Step | None) -> tuple[int, DeviceRows | None]:
        """Passes to launch at once, and the rows that the device chooses for them."""
        if gathered.has_trees and not self._controller.on:
            return 1, None
        fed = self._drafting.active and self._drafting.reads_features
        # Hidden states are taken pass by pass, of at most this many rows.
        most = min(self._scheduler.max_step_rows, AHEAD_ROWS) if fed else self._scheduler.max_step_rows
        waits = self._drafting.latency.answer_seconds if self._mode is LaunchMode.WAIT_FOR_DRAFT else 0.0
        mode = self._updates.mode_with_draft(self._mode)
        device_rows = self._controller.choose(schedule, most, mode, waits, gathered.drafted_rows)
        # Where a pass behind drafts begins, only the device can find out.
        several = behind is not None and (device_rows is not None or not behind.has_drafts)
        several = several and gathered.use is LaunchMode.RUN_AHEAD and not (fed or gathered.has_trees)
        if device_rows is not None or any([chunk.sequence.request.external for chunk in schedule.chunks]):
            # Rows that the host lays out are those of one pass.
            several = several and not schedule.laid_out
        # The host masks the rows of every pass.
        several = several and not any([chunk.sequence.request.has_form for chunk in schedule.chunks])
        return self._updates.multi_step.choose(
            schedule, self._scheduler, self._runner.max_context, device_rows, several=several
        )

    def _hold(self, behind: Step | None, batch: StepBatch, clock: StepClock) -> None:
        """Wait for the draft's answer for a pass that is laid out, if it is to be held: for at most 1.5 times the usual
        latency, so that a draft that has stopped costs one round trip."""
        if behind is None and batch.device_rows is not None and self._mode is LaunchMode.WAIT_FOR_DRAFT:
            # The others have no rows for a draft.
            sequences = [item.sequence for item in batch.items[batch.input.laid_out :]]
            # Longest time that a pass is held for its draft: in times of an answer, and in seconds before the first
            # answer.
            most = 1.5 * self._drafting.latency.answer_seconds or 0.01
            clock.draft_wait_ns = self._drafting.wait_for(sequences, most)
        if self._steps.tables is not None:
            self._steps.tables.trust = self._controller.trust
            if self._steps.tables.drafting is not None:
                self._steps.tables.drafting.grows = self._drafting.active
        clock.planned = time.monotonic_ns()

    def _launch(self, schedule: Schedule, gathered: Gathered, clock: StepClock, *, behind: Step | None = None) -> Step:
        """Lay a step out and launch it, `behind` the one that runs if there is one."""
        passes, device_rows = self._passes(schedule, gathered, behind)
        common = self._common.of([chunk.sequence for chunk in schedule.chunks]) if self._common is not None else ()
        batch = lay_out(schedule.chunks, gathered.trees, self._runner.cache, passes, device_rows, common)
        verifiers = [self._live[item.sequence.sequence_id].verifier for item in batch.items]
        if device_rows is not None and self._steps.tables is not None:
            sequences = [item.sequence for item in batch.items]
            graft_predictions(sequences, self._live, self._steps.tables)
            assign_slots(sequences, self._live, self._steps.tables)
        launched = self._steps.launch(batch, verifiers, passes, lambda: self._hold(behind, batch, clock))
        self._scheduler.count_launched(schedule)
        if behind is not None:
            # Without the hold: the host's time alone.
            self._launching.observe((time.monotonic_ns() - clock.planned) * 1e-9)
        # While drafting is off by load, no states are taken; heads then begin with later tokens.
        rows = len(batch.input.token_ids) if device_rows is None else device_rows.rows
        features = self._features.after_launch(rows) if self._drafting.active else None
        late = list[Sequence]()
        if launched.awaits_masks and behind is None:
            late = self._mask(launched, batch)
        elif launched.span is not None and not launched.awaits_masks:
            launched.span.record_end()
        clock.launched = clock.forwarded = time.monotonic_ns()
        self._scheduler.prompt_rows.observe_drafted(schedule, device_rows.rows if device_rows is not None else 0)
        for item in batch.items:
            # For what runs after this step, their keys and values are computed.
            item.sequence.kv_length += item.known + passes - 1
            item.sequence.scored_tokens += len(item.scores)
        step = Step(
            batch,
            gathered,
            launched,
            clock,
            ahead=behind is not None,
            behind_tree=behind is not None and behind.batch.drafted,
            passes=passes,
            own=schedule.own,
            features=features,
            unread=schedule.unread,
        )
        return self._without(step, late)

    def _without(self, step: Step, late: SequenceOf[Sequence]) -> Step:
        """A step without the outcomes of sequences whose masks were late. They are read again, and sit out until their
        next mask is there."""
        for sequence in late:
            self._scheduler.preempt(sequence)
            step = step.without(sequence)
        return step

    def _mask(self, launched: Launched, batch: StepBatch) -> list[Sequence]:
        """Complete a launch whose rows grammars mask, now that all tokens before it are committed. Returns the
        sequences whose masks were late."""
        launched.mask([item.sequence.sequence_id in self._live and item.tree is not None for item in batch.items])
        if launched.span is not None:
            launched.span.record_end()
        return [item.sequence for item in batch.items if item.tree is not None and self._is_late(item.sequence)]

    def _is_late(self, sequence: Sequence) -> bool:
        live = self._live.get(sequence.sequence_id)
        return live is not None and live.verifier.grammar is not None and live.verifier.grammar.late

    def expect_text(self, step: Step, behind: Step | None) -> None:
        """While a step runs that is masked, have what its forms let expect in the tables, for the one `behind` it: the
        device reads them when it comes to that, which is launched already if it is not None."""
        tables = self._steps.tables
        if tables is not None and any([item.sequence.request.has_form for item in step.batch.items]):
            graft_expected([item.sequence for item in step.batch.items], self._live, tables)
            if behind is not None:
                tables.publish()

    def mask_ahead(self, step: Step) -> Step | None:
        """The same of a step that was launched while the last one ran, if it waits for it. None where the device has no
        memory for it: its sequences are read again."""
        if not step.launched.awaits_masks:
            return step
        try:
            return self._without(step, self._mask(step.launched, step.batch))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._scheduler.shrink()
            for item in step.batch.items:
                if item.sequence.sequence_id in self._live and item.kept:
                    self._scheduler.preempt(item.sequence)
            return None

    def _make_room(self, schedule: Schedule) -> None:
        """Run smaller steps from now on; if the smallest did not fit, fail the youngest of its sequences."""
        torch.cuda.empty_cache()
        if self._scheduler.shrink():
            log.warning("a step of %d rows did not fit the device's memory; steps are smaller now", schedule.rows)
            return
        youngest = max((chunk.sequence for chunk in schedule.chunks), key=lambda sequence: sequence.sequence_id)
        self._fail(youngest, QuotaExceeded("the device has no memory for a step", rows=schedule.rows))
