"""The engine's step: schedule, gather drafts, lay out, launch, verify, commit, advance the draft, emit.

Plain decoding is the same step with one-row trees. Single-threaded: `engine.py` owns the thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from outrider.errors import OutriderError
from target_service.config import TargetConfig
from target_service.core.events import EngineObserver
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import (
    Sequence,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    StepVerdict,
)
from target_service.engine.commit import commit, publish_pages, trim_pages
from target_service.engine.counted import CountedOutcomes, count_outcomes
from target_service.engine.launching import StepLauncher, choose_steps
from target_service.engine.speculation import EngineSpeculation
from target_service.engine.step import LastStep, Step
from target_service.execution.host_executor import Steps
from target_service.grammars.compiling import Grammars
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost
from tree_models.in_pass import SequenceKeys

log = logging.getLogger(__name__)


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
    ) -> None:
        """`steps` of None takes the fastest for the runner, or the plain ones in lockstep. `step_cost` of None verifies
        every drafted row that is allowed, and always waits for drafts."""
        self._runner = runner
        self.steps = steps or choose_steps(runner, config)
        self._observer = observer
        self.scheduler = Scheduler(config, runner.cache, runner.pass_sizes, step_cost)
        self.live: dict[int, LiveSequence] = {}
        self.grammars = Grammars(runner.tokenizer, runner.vocabulary_size, runner.end_token_ids)
        self.speculation = EngineSpeculation(runner, config, self.scheduler, self.live, self.steps.tables, step_cost)
        self.features, self.drafting = self.speculation.features, self.speculation.drafting
        self.gathering = self.speculation.gathering
        self.launcher = StepLauncher(
            runner, self.steps, self.scheduler, self.speculation, self.live, self._update_drafting, self._fail_in_step
        )
        self._ahead: Step | None = None
        # Whether the last pass was seen to run until about its end.
        self._seen_running = True
        self._last = LastStep()
        self._failed: list[SequenceEvent] = []
        # No step may be launched behind the one under way.
        self.settling = False
        # Adds and removes what was asked for, while a step runs.
        self.take_arrivals: Callable[[], None] = lambda: None

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
        self.speculation.hold.observe_request()
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

    def keys_of(self, sequence_id: int) -> SequenceKeys | None:
        """Where the keys of a sequence's tokens lie, of all but the last; None unless all are there. Between steps,
        where none runs ahead."""
        live = self.live.get(sequence_id)
        if live is None or not live.sequence.pages:
            return None
        sequence, known = live.sequence, len(live.sequence.token_ids) - 1
        return SequenceKeys(sequence.pages, known) if sequence.kv_length == known else None

    @property
    def model_version(self) -> int:
        """Version of the weights."""
        return self.drafting.model_version

    @property
    def settled(self) -> bool:
        """Whether no step is under way."""
        return self._ahead is None

    def exchanged(self, *, version: int) -> None:
        """The weights were exchanged, while no step was under way. Drops the keys and values of the old ones and what
        was learnt of their drafts, and opens every sequence at the draft again."""
        self.scheduler.preempt_all()
        self.scheduler.pages.forget_prefixes()
        self.speculation.exchanged(version)

    def step(self) -> list[SequenceEvent] | None:
        """Run one step. Returns its events, or None when there was nothing to run."""
        step = self._ahead or self.launcher.launch_next()
        if step is None and self.launcher.slow_masks.wait_for_any():
            return self._take_failed()
        if step is None:
            self._last = LastStep()
            self.steps.use_pause()
            return self._take_failed() or None
        held_ns = self._launch_behind(step)
        self.launcher.expect_text(step, self._ahead)
        self.drafting.open_added()
        step.clock.waits_since = time.monotonic_ns() - held_ns
        self._feed(step)
        step.launched.wait()
        step.clock.forwarded = time.monotonic_ns()
        self.drafting.listen_to_openings()
        counted = self._counted(step)
        step.clock.verified = time.monotonic_ns()
        verdicts = self._commit(step, counted)
        self.launcher.slow_masks.update(self._ahead)
        self._complete_ahead(counted)
        trim_pages(step, self.scheduler.pages, {} if self._ahead is None else self._ahead.keys)
        self.drafting.collect(step.batch.items, step.features, counted.outcomes)
        publish_pages(step, counted.outcomes, self.live, self.scheduler.pages)
        self._begin_forms(counted.forms)
        # The draft works while the events go out.
        self.drafting.send_commits(
            [(self.live[one.sequence_id].sequence, len(one.token_ids)) for one in verdicts if one.finish is None]
        )
        self.speculation.updates.observe_outcomes(step, counted.outcomes)
        events = [*counted.scores, *self._finish(verdicts)]
        step.clock.committed = time.monotonic_ns()
        can_launch_before_results = step.launched.can_launch_before_results and not self.settling
        if self._ahead is None and can_launch_before_results and self.drafting.has_answered():
            # This step's events go out while the device runs the next.
            self._ahead = self.launcher.launch_next()
        self._observe(step, counted, verdicts)
        return self._take_failed() + events

    def _update_drafting(self) -> None:
        """Start or stop drafting by load, and open new sequences at the draft."""
        if self.speculation.update_use() and self._observer is not None:
            self._observer.on_speculation(self.drafting.active)
        if not self.steps.in_background:
            # Otherwise this happens while a step runs, so that a draft in this process does not delay the device.
            self.drafting.open_added()

    def _launch_behind(self, step: Step) -> int:
        """Launch the step behind one that runs, if it may be, with what has been asked for until shortly before its
        end. Returns the nanoseconds for which it was held."""
        runs_ahead, self._ahead = self._ahead is not None, None
        if self.settling:
            return 0
        begun_ns = time.monotonic_ns()
        held = runs_ahead and self.speculation.hold_launch(step, self._begun_ns(step))
        held_ns = time.monotonic_ns() - begun_ns if held else 0
        if held:
            self.take_arrivals()
        self._ahead = self.launcher.launch_behind(step)
        if self._ahead is not None:
            clock, late = self._ahead.clock, step.launched.ended() if held else None
            self.speculation.hold.observe_launch((clock.launched - clock.begun) * 1e-9, late=late)
        return held_ns

    def _begun_ns(self, step: Step) -> int:
        """When the device began a step."""
        return max(step.clock.launched, self._last.free_ns)

    def _feed(self, step: Step) -> None:
        """While a step runs, publish drafts for the one behind it, if the device chooses the rows of that."""
        feeds = self._ahead is not None and self._ahead.batch.device_rows is not None
        self._seen_running = not feeds or self.speculation.publish_until_end(step, self._begun_ns(step))

    def _complete_ahead(self, before: CountedOutcomes) -> None:
        """Move the step that was launched ahead by what the one `before` it accepted, and have its rows masked."""
        if self._ahead is not None:
            self._ahead = self.launcher.mask_ahead(self._ahead.shifted_by_accepted(before.outcomes))

    def _fail_in_step(self, sequence: Sequence, error: OutriderError) -> None:
        self._failed.append(self.fail(sequence, error))

    def _take_failed(self) -> list[SequenceEvent]:
        failed, self._failed = self._failed, []
        return failed

    def _observe(self, step: Step, counted: CountedOutcomes, verdicts: SequenceOf[StepVerdict]) -> None:
        """Report a step that is committed, and learn from its times."""
        last = self._last
        self._last = LastStep(step.clock.forwarded, step.clock.committed, step.launched.span)
        stats = step.stats(
            counted.outcomes,
            verdicts,
            last,
            features=self.features.pop_sent_counts(),
            round_trip_ns=self.drafting.latency.take_round_trip(),
            with_draft=self.drafting.has_open_sequences,
        )
        # Of all passes of the step: its tokens arrive together, and others wait for its end.
        seconds = (step.clock.committed - (last.ended_ns or step.clock.begun)) * 1e-9
        # A device's steps do not share their processors with other tenants' calls.
        own = step.own and not self.steps.in_background
        self.scheduler.times.observe_step(*step.work, seconds, own=own, drafted=step.drafted_rows)
        period = seconds if last.ended_ns else 0.0
        self.speculation.updates.observe_step(step, stats, verdicts, period, seen_running=self._seen_running)
        if self._observer is not None:
            self._observer.on_step(stats)

    def _counted(self, step: Step) -> CountedOutcomes:
        """The outcomes of a step that count. Sequences that cannot go on end with an error, or are read again without
        drafts."""
        counted = count_outcomes(step, self.live, self._runner.dtype)
        for sequence, error in counted.failed:
            self._fail_in_step(sequence, error)
        for sequence in counted.drafts_broken:
            log.warning(
                "request %d goes on without drafts: logits of a drafted pass are not finite", sequence.sequence_id
            )
            self.live[sequence.sequence_id].stop_drafting()
            self.drafting.remove(sequence.sequence_id)
            self._read_again(sequence)
        return counted

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

    def _commit(self, step: Step, counted: CountedOutcomes) -> list[StepVerdict]:
        """Commit the outcomes. Sequences that ended since the launch are skipped."""
        compute_ns, version = step.clock.verified - step.clock.begun, self.model_version
        verdicts: list[StepVerdict] = []
        for item, outcome in zip(step.batch.items, counted.outcomes, strict=True):
            live, tree = self.live.get(item.sequence.sequence_id), item.tree
            if live is None or tree is None or outcome is None:
                continue
            self.speculation.observe_tree(step, live, tree, outcome)
            verdict = commit(live, tree, outcome, compute_ns, model_version=version, kept=item.kept)
            verdicts.append(verdict)
            self.speculation.observe_verdict(live, outcome, verdict)
        return verdicts

    def _finish(self, verdicts: SequenceOf[StepVerdict]) -> list[SequenceEvent]:
        """The events of the step. Frees the sequences that ended."""
        events: list[SequenceEvent] = list(verdicts)
        for verdict in verdicts:
            if verdict.finish is not None:
                live = self.end(verdict.sequence_id, verdict.finish.reason.value)
                assert live is not None
                self.speculation.controller.observe_answer(live.sequence.totals.completion_tokens)
                events.append(SequenceFinished(verdict.sequence_id, verdict.finish, live.sequence.totals))
        return events
