"""The engine's step: schedule, gather drafts, lay out, launch, verify, commit, advance the draft, emit.

Plain decoding is the same step with one-row trees. Single-threaded: `engine.py` owns the thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf

import torch

from outrider.errors import OutriderError, QuotaExceeded
from outrider.wire.frames import DraftInfo
from target_service.config import TargetConfig
from target_service.core.events import EngineObserver
from target_service.core.running_means import RunningTime
from target_service.core.schedule import Schedule
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import (
    Sequence,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    StepVerdict,
)
from target_service.core.weights import FIRST_VERSION
from target_service.engine.broken import logits_not_finite
from target_service.engine.commit import commit, publish_pages, trim_pages
from target_service.engine.counted import count_outcomes
from target_service.engine.policy_updates import PolicyUpdates
from target_service.engine.prompt_events import prompt_events
from target_service.engine.step import Step, StepClock
from target_service.execution.batch import DeviceRows, StepBatch, lay_out
from target_service.execution.device_executor import best_steps
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import HostSteps, Launched, Steps
from target_service.execution.multi_step import MultiStep
from target_service.grammars.compiling import Grammars
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import Verified
from target_service.speculation.drafts import DraftTrees
from target_service.speculation.hidden_states.encoding import AHEAD_ROWS
from target_service.speculation.hidden_states.prefixes import SharedPrefixStates
from target_service.speculation.hidden_states.sending import Features
from target_service.speculation.policy.draft_switch import DraftSwitch
from target_service.speculation.policy.gathering import Gathered, Gathering
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.lookup_baseline import LookupBaseline
from target_service.speculation.policy.predicted_nodes import graft_expected, graft_predictions, note_passes
from target_service.speculation.policy.row_budget import RowBudget
from target_service.speculation.policy.row_policy import RowPolicy
from target_service.speculation.policy.step_cost import StepCost
from target_service.speculation.policy.throughput_trial import SpeculationLevel

log = logging.getLogger(__name__)
# Longest time that a pass is held for its draft: in times of an answer, and in seconds before the first answer.
_WAIT_IN_ANSWERS, _FIRST_WAIT_SECONDS = 1.5, 0.01
# Interval at which a pass that may have ended is polled. A thread takes some 0.1 ms to wake.
_POLL_NS = 100_000
_UNDRAFTED = "request %d goes on without drafts: logits of a drafted pass are not finite"
# Weight of one launch in the mean time of launches: some ten.
_LAUNCH_SHARE = 0.1


class EngineLoop:
    """Every sequence under way, and the step that they run in.

    Where the device verifies, and neither draft nor client needs a step's tokens first, the next step is launched while
    it runs: it reads those tokens on the device, and the host's work overlaps with the device's.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: TargetConfig,
        *,
        steps: Steps | None = None,
        step_cost: StepCost | None = None,
        observer: EngineObserver | None = None,
        multi_step: MultiStep | None = None,
    ) -> None:
        """`steps` of None takes the fastest for the runner, or the plain ones in lockstep. `step_cost` of None verifies
        every drafted row that is allowed, and always waits for drafts."""
        self._runner = runner
        if steps is None and not config.lockstep:
            # Kernels of typical acceptance are compiled at start where requests may ask for it.
            typical, most_rows = config.allow_lossy, config.step_rows
            steps = best_steps(runner, max_sequences=config.max_running, max_rows=most_rows, typical=typical)
        self.steps = steps or HostSteps(runner)
        self._observer = observer
        self.features = Features(runner, config.feature_window if config.speculates else 0)
        self.drafting = DraftTrees(config, runner.vocabulary_size, self.features, self.steps.tables)
        self.scheduler = Scheduler(config, runner.cache, runner.pass_sizes, step_cost)
        self.scheduler.pages.states = SharedPrefixStates(self.features, self._is_drafted) if config.speculates else None
        self.live: dict[int, LiveSequence] = {}
        self.grammars = Grammars(runner.tokenizer, runner.vocabulary_size, runner.end_token_ids)
        # Batch-invariant drafts are chains, which the host cuts.
        device_chooses = self.steps.tables is not None and not (config.batch_invariant and config.speculates)
        most = config.max_draft_nodes if device_chooses else 0
        self._policy = RowPolicy(most, step_cost, self.live, config.speculative_disable_queue_size)
        lookup_tokens = runner.node_table.lookup_tokens if runner.node_table is not None else 0
        # Without a cost of steps it never turns drafts off.
        self.gathering = Gathering(
            drafting=self.drafting,
            scheduler=self.scheduler,
            budget=RowBudget(step_cost),
            live=self.live,
            policy=self._policy,
            switch=None if step_cost is None else DraftSwitch(),
            looks_up=lookup_tokens > 0,
        )
        self._ahead: Step | None = None
        # Whether the last pass was seen to run until about its end.
        self._seen_running = True
        # Seconds to launch a pass that is laid out.
        self._launching = RunningTime(_LAUNCH_SHARE)
        self._policy_updates = PolicyUpdates(
            gathering=self.gathering,
            tables=self.steps.tables,
            multi_step=multi_step or MultiStep(),
            lookup_baseline=LookupBaseline(lookup_tokens),
        )
        # How the next pass is launched, and the rows that the device chose for the last one.
        self._mode, self._rows = LaunchMode.RUN_AHEAD, 0
        self._draft: DraftInfo | None = None
        self._last_span: DeviceSpan | None = None
        self._failed: list[SequenceEvent] = []
        # Version of the weights, and whether no step may be launched behind the one under way.
        self.model_version, self.settling = FIRST_VERSION, False
        # When the device had ended the last step, and when its results were committed; 0 after a pause.
        self._free_ns = self._ended_ns = 0

    def _is_drafted(self, sequence: Sequence) -> bool:
        return self.drafting.active and self.drafting.is_eligible(sequence)

    def make(self, sequence_id: int, request: SequenceRequest) -> LiveSequence:
        """A new sequence, not added yet. Any thread."""
        return LiveSequence.of(sequence_id, request, self._runner)

    def constrain(self, live: LiveSequence) -> None:
        """Compile the form of its output, or of its end, before it is added. Any thread but the engine's. Raises what
        `Grammars.followed` does."""
        request = live.sequence.request
        if request.triggered_form is not None:
            live.trigger = self.grammars.trigger(request.triggered_form, request.tenant)
        elif request.sampling.structured_output is not None:
            live.verifier.grammar = self.grammars.followed(request.sampling.structured_output, request.tenant)

    def add(self, live: LiveSequence) -> None:
        """Queue a sequence, and register it for drafting."""
        self.live[live.sequence.sequence_id] = live
        self.scheduler.add(live.sequence)
        self.drafting.add(live.sequence)

    def end(self, sequence_id: int, outcome: str) -> LiveSequence | None:
        """Remove a sequence and free what it holds. None when it is not under way."""
        live = self.live.pop(sequence_id, None)
        if live is None:
            return None
        sequence = live.sequence
        self.scheduler.remove(sequence)
        self.drafting.remove(sequence_id)
        sequence.totals.finished_ns = sequence.totals.finished_ns or time.monotonic_ns()
        if self._observer is not None:
            self._observer.on_finished(sequence_id, sequence.request, sequence.totals, outcome)
        return live

    def fail(self, sequence: Sequence, error: OutriderError) -> SequenceFailed:
        """End a sequence with an error. Returns its last event."""
        self.end(sequence.sequence_id, error.reason)
        return SequenceFailed(sequence.sequence_id, error, sequence.totals.draft_refused)

    @property
    def settled(self) -> bool:
        """Whether no step is under way."""
        return self._ahead is None

    def exchanged(self, *, version: int) -> None:
        """The weights were exchanged, while no step was under way. Drops the keys and values of the old ones and what
        was learnt of their drafts, and opens every sequence at the draft again."""
        self.model_version = version
        self.scheduler.preempt_all()
        self.scheduler.pages.forget_prefixes()
        self.drafting.reopen_all(version)
        self._policy_updates.forget_draft()

    def step(self) -> list[SequenceEvent] | None:
        """Run one step. Returns its events, or None when there was nothing to run."""
        step = self._ahead or self._launch()
        if step is None:
            self._ended_ns = 0
            self.steps.use_pause()
            return self._take_failed() or None
        self._ahead = None if self.settling else self._launch_after(step)
        self.drafting.open_added()
        step.clock.waits_since = time.monotonic_ns()
        self._feed(step)
        step.launched.wait()
        step.clock.forwarded = time.monotonic_ns()
        outcomes, forms = self._counted(step)
        scores, broken = prompt_events(step, self.live)
        self._failed += [self.fail(sequence, logits_not_finite(sequence, self._runner.dtype)) for sequence in broken]
        step.clock.verified = time.monotonic_ns()
        verdicts = self._commit(step, outcomes)
        if self._ahead is not None:
            self._ahead = self._ahead.shifted_by_accepted(outcomes)
        self._mask_ahead()
        trim_pages(step, self.scheduler.pages, {} if self._ahead is None else self._ahead.keys)
        self.drafting.collect(step.batch.items, step.features, outcomes)
        publish_pages(step, outcomes, self.live, self.scheduler.pages, alone=self._ahead is None)
        self._begin_forms(forms)
        # The draft works while the events go out.
        self.drafting.send_commits(
            [(self.live[one.sequence_id].sequence, len(one.token_ids)) for one in verdicts if one.finish is None]
        )
        self._policy_updates.observe_outcomes(step, outcomes)
        events = [*scores, *self._finish(verdicts)]
        step.clock.committed = time.monotonic_ns()
        can_launch_before_results = step.launched.can_launch_before_results and not self.settling
        if self._ahead is None and can_launch_before_results and self.drafting.has_answered():
            # This step's events go out while the device runs the next.
            self._ahead = self._launch()
        self._observe(step, outcomes, verdicts)
        return self._take_failed() + events

    def _launch(self) -> Step | None:
        """Schedule, gather drafts and launch; with fewer rows again, while the device has no memory for it."""
        while True:
            clock = StepClock()
            self._update_drafting()
            schedule = self.scheduler.schedule()
            if not schedule.chunks:
                return None
            try:
                return self._begin(schedule, self.gathering.gather(schedule), clock)
            except torch.OutOfMemoryError:
                self._make_room(schedule)

    def _launch_after(self, step: Step) -> Step | None:
        """Launch the step after `step` while that runs, unless a draft needs its tokens first. A sequence whose tokens
        have to be on the host first sits out, and takes part in the step after the next."""
        clock, running = StepClock(), self.scheduler.running
        self._update_drafting()
        ready = any([not self.gathering.awaits_results(one) for one in running])
        ahead = step.launched.can_launch_before_results and ready
        use = self.gathering.choose(running, ahead=ahead)
        self._mode = LaunchMode.RUN_AHEAD
        if ahead and use is LaunchMode.RUN_AHEAD:
            self._mode = self._policy_updates.choose_mode(len(running), self._rows, self._launching.value)
        if (
            use is LaunchMode.WAIT_FOR_DRAFT
            or not ahead
            or self._mode is LaunchMode.WAIT_FOR_DRAFT
            or self.gathering.awaits_tokens(running)
        ):
            return None
        step.await_tokens(self.gathering.sits_out)
        try:
            schedule = self.scheduler.schedule()
            if not schedule.chunks or not self.scheduler.pages.reserve_behind_trees(schedule, self._runner.max_context):
                return None
            return self._begin(schedule, self.gathering.without_waiting(schedule), clock, behind=step)
        except torch.OutOfMemoryError:
            # There may be memory once this step has ended.
            self.scheduler.restart_states()
            return None
        finally:
            step.forget_tokens()

    def _passes(self, schedule: Schedule, gathered: Gathered, behind: Step | None) -> tuple[int, DeviceRows | None]:
        """Passes to launch at once, and the rows that the device chooses for them."""
        if gathered.has_trees and not self._policy.on:
            return 1, None
        fed = self.drafting.active and self.drafting.reads_features
        # Hidden states are taken pass by pass, of at most this many rows.
        most = min(self.scheduler.max_step_rows, AHEAD_ROWS) if fed else self.scheduler.max_step_rows
        waits = self.drafting.latency.answer_seconds if self._mode is LaunchMode.WAIT_FOR_DRAFT else 0.0
        device_rows = None
        if self.gathering.throughput_trial.allowed(len(schedule.chunks)) is not SpeculationLevel.NONE:
            device_rows = self._policy.choose(
                schedule, most, self._policy_updates.mode_with_draft(self._mode), waits, gathered.drafted_rows
            )
        # Where a pass behind drafts begins, only the device can find out.
        several = behind is not None and (device_rows is not None or not behind.has_drafts)
        several = several and gathered.use is LaunchMode.RUN_AHEAD and not (fed or gathered.has_trees)
        if device_rows is not None or any([chunk.sequence.request.external for chunk in schedule.chunks]):
            # Rows that the host lays out are those of one pass.
            several = several and not schedule.laid_out
        # The host masks the rows of every pass.
        several = several and not any([chunk.sequence.request.has_form for chunk in schedule.chunks])
        return self._policy_updates.multi_step.choose(
            schedule, self.scheduler, self._runner.max_context, device_rows, several=several
        )

    def _feed(self, step: Step) -> None:
        """While a step runs, publish drafts as they arrive: the device reads them when it begins the next one."""
        drafting, tables, self._seen_running = self.drafting, self.steps.tables, True
        if (
            self._ahead is None
            or self._ahead.batch.device_rows is None
            or tables is None
            or not drafting.has_open_sequences
        ):
            return
        takes = step.passes * self._policy_updates.pass_ends.earliest(*step.size)
        ends = max(step.clock.launched, self._free_ns) + int(takes * 1e9)
        drafting.listen()
        tables.publish()
        self._seen_running = False
        # An answer may be followed by a larger tree. The pass is polled once it should have ended.
        while not step.launched.ended():
            now = time.monotonic_ns()
            self._seen_running = now >= ends
            drafting.wait_until(max(ends, now + _POLL_NS) * 1e-9)
            drafting.listen()
            tables.publish()

    def _before_launch(self, behind: Step | None, batch: StepBatch, clock: StepClock) -> None:
        """Wait for the draft's answer for a pass that is laid out, if it is to be held: for at most 1.5 times the usual
        latency, so that a draft that has stopped costs one round trip."""
        if behind is None and batch.device_rows is not None and self._mode is LaunchMode.WAIT_FOR_DRAFT:
            # The others have no rows for a draft.
            sequences = [item.sequence for item in batch.items[batch.input.laid_out :]]
            most = _WAIT_IN_ANSWERS * self.drafting.latency.answer_seconds or _FIRST_WAIT_SECONDS
            clock.draft_wait_ns = self.drafting.wait_for(sequences, most)
        if self.steps.tables is not None:
            self.steps.tables.trust = self._policy.trust
        clock.planned = time.monotonic_ns()

    def _begin(self, schedule: Schedule, gathered: Gathered, clock: StepClock, *, behind: Step | None = None) -> Step:
        passes, device_rows = self._passes(schedule, gathered, behind)
        batch = lay_out(schedule.chunks, gathered.trees, self._runner.cache, passes, device_rows)
        verifiers = [self.live[item.sequence.sequence_id].verifier for item in batch.items]
        if device_rows is not None and self.steps.tables is not None:
            graft_predictions((item.sequence for item in batch.items), self.live, self.steps.tables)
        launched = self.steps.launch(batch, verifiers, passes, lambda: self._before_launch(behind, batch, clock))
        self.scheduler.count_launched(schedule)
        if behind is not None:
            # Without the hold: the host's time alone.
            self._launching.observe((time.monotonic_ns() - clock.planned) * 1e-9)
        # While drafting is off by load, no states are taken; heads then begin with later tokens.
        rows = len(batch.input.token_ids) if device_rows is None else device_rows.rows
        features = self.features.after_launch(rows) if self.drafting.active else None
        if launched.awaits_masks and behind is None:
            self._mask(launched, batch)
        elif launched.span is not None and not launched.awaits_masks:
            launched.span.record_end()
        clock.launched = clock.forwarded = time.monotonic_ns()
        self._rows = device_rows.rows if device_rows is not None else 0
        self.scheduler.count_drafted(schedule, self._rows)
        for item in batch.items:
            # For what runs after this step, their keys and values are computed.
            item.sequence.kv_length += item.known + passes - 1
            item.sequence.scored_tokens += len(item.scores)
        return Step(
            batch,
            gathered,
            launched,
            clock,
            ahead=behind is not None,
            behind_tree=behind is not None and behind.batch.drafted,
            passes=passes,
            own=schedule.own,
            features=features,
        )

    def _mask(self, launched: Launched, batch: StepBatch) -> None:
        """Complete a launch whose rows grammars mask, now that all tokens before it are committed; and have what is
        expected behind them in the tables."""
        launched.mask([item.sequence.sequence_id in self.live and item.tree is not None for item in batch.items])
        if launched.span is not None:
            launched.span.record_end()
        if self.steps.tables is not None:
            graft_expected((item.sequence for item in batch.items), self.live, self.steps.tables)

    def _mask_ahead(self) -> None:
        """The same of the step that was launched while the last one ran. Where the device has no memory for it, its
        sequences are read again."""
        step = self._ahead
        if step is None or not step.launched.awaits_masks:
            return
        try:
            self._mask(step.launched, step.batch)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.scheduler.shrink()
            self._ahead = None
            for item in step.batch.items:
                if item.sequence.sequence_id in self.live and item.kept:
                    self.scheduler.preempt(item.sequence)

    def _make_room(self, schedule: Schedule) -> None:
        """Run smaller steps from now on; if the smallest did not fit, fail the youngest of its sequences."""
        torch.cuda.empty_cache()
        if self.scheduler.shrink():
            log.warning("a step of %d rows did not fit the device's memory; steps are smaller now", schedule.rows)
            return
        youngest = max((chunk.sequence for chunk in schedule.chunks), key=lambda sequence: sequence.sequence_id)
        self._failed.append(
            self.fail(youngest, QuotaExceeded("the device has no memory for a step", rows=schedule.rows))
        )

    def _take_failed(self) -> list[SequenceEvent]:
        failed, self._failed = self._failed, []
        return failed

    def _observe(self, step: Step, outcomes: SequenceOf[Verified | None], verdicts: SequenceOf[StepVerdict]) -> None:
        last, self._last_span = self._last_span, step.launched.span
        device_ns = 0, 0
        # Behind a pause they are of no use.
        if self._ended_ns and last is not None and self._last_span is not None:
            device_ns = last.until(self._last_span)
        stats = step.stats(
            outcomes,
            verdicts,
            free_ns=self._free_ns,
            features=self.features.copy_sent_tables(),
            device_ns=device_ns,
            round_trip_ns=self.drafting.latency.take_round_trip(),
            with_draft=self.drafting.has_open_sequences,
        )
        ended_ns = self._ended_ns
        self._free_ns, self._ended_ns = step.clock.forwarded, step.clock.committed
        # Of all passes of the step: its tokens arrive together, and others wait for its end.
        seconds = (step.clock.committed - (ended_ns or step.clock.begun)) * 1e-9
        # A device's steps do not share their processors with other tenants' calls.
        own = step.own and not self.steps.in_background
        self.scheduler.times.observe_step(*step.work, seconds, own=own)
        period = (self._ended_ns - ended_ns) * 1e-9 if ended_ns else 0.0
        self._policy_updates.observe_step(step, stats, verdicts, period, seen_running=self._seen_running)
        if self._observer is not None:
            self._observer.on_step(stats)

    def _update_drafting(self) -> None:
        """Start or stop drafting by load, and open new sequences at the draft."""
        if self.drafting.info is not self._draft:
            # Another draft: what was observed does not apply to it.
            self._draft = self.drafting.info
            self._policy_updates.forget_draft()
        if self.gathering.update_drafting() and self._observer is not None:
            self._observer.on_speculation(self.drafting.active)
        if not self.steps.in_background:
            # Otherwise this happens while a step runs, so that a draft in this process does not delay the device.
            self.drafting.open_added()

    def _counted(self, step: Step) -> tuple[list[Verified | None], list[LiveSequence]]:
        """The outcomes of a step, None for those that do not count, and the sequences whose form begins behind them.
        Sequences that cannot go on end with an error, or are read again without drafts."""
        counted = count_outcomes(step, step.launched.outcomes(), self.live, self._runner.dtype)
        self._failed += [self.fail(sequence, error) for sequence, error in counted.failed]
        for sequence in counted.drafts_broken:
            log.warning(_UNDRAFTED, sequence.sequence_id)
            self.live[sequence.sequence_id].stop_drafting()
            self.drafting.remove(sequence.sequence_id)
            self._read_again(sequence)
        return counted.outcomes, counted.forms

    def _begin_forms(self, lives: SequenceOf[LiveSequence]) -> None:
        """Hold outputs to their forms, behind the step that was committed."""
        for live in lives:
            if live.sequence.sequence_id in self.live:
                live.begin_form(self._runner.end_token_ids)
                self._read_again(live.sequence)

    def _read_again(self, sequence: Sequence) -> None:
        """Read a sequence again from its tokens. The step under way went on with others, and does not count."""
        self.scheduler.preempt(sequence)
        if self._ahead is not None:
            self._ahead = self._ahead.without(sequence)

    def _commit(self, step: Step, outcomes: SequenceOf[Verified | None]) -> list[StepVerdict]:
        """Commit the outcomes. Sequences that ended since the launch are skipped."""
        compute_ns, answered = step.clock.verified - step.clock.begun, step.gathered.answered
        version, tables, observes = self.model_version, self.steps.tables, answered or step.batch.drafted
        verdicts: list[StepVerdict] = []
        for item, outcome in zip(step.batch.items, outcomes, strict=True):
            live, tree = self.live.get(item.sequence.sequence_id), item.tree
            if live is None or tree is None or outcome is None:
                continue
            if observes and (answered or tree.drafted):
                self.gathering.observe_tree(live, tree, outcome, step.gathered.row_cost)
            verdict = commit(live, tree, outcome, compute_ns, model_version=version, kept=item.kept)
            verdicts.append(verdict)
            if live.prediction is not None and tables is not None:
                note_passes(live, outcome.device_passes, len(verdict.token_ids), tables)
        return verdicts

    def _finish(self, verdicts: SequenceOf[StepVerdict]) -> list[SequenceEvent]:
        """The events of the step. Frees the sequences that ended."""
        events: list[SequenceEvent] = list(verdicts)
        for verdict in verdicts:
            if verdict.finish is not None:
                live = self.end(verdict.sequence_id, verdict.finish.reason.value)
                assert live is not None
                events.append(SequenceFinished(verdict.sequence_id, verdict.finish, live.sequence.totals))
        return events
