"""One engine step, as a sentence: schedule, gather proposals, plan, forward, verify, commit, advance, emit.

Plain decoding is the same step with one-row trees. Single-threaded: `engine.py` owns the thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from outrider.errors import QuotaExceeded
from outrider.wire.frames import DraftInfo
from target_service.core.running_means import RunningTime
from target_service.core.schedule import Schedule
from target_service.core.scheduler import Scheduler, SchedulerConfig
from target_service.core.sequence import (
    Sequence,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    Verdict,
)
from target_service.core.weights import FIRST_VERSION
from target_service.engine.commit import commit
from target_service.engine.stats import EngineObserver, StepClock
from target_service.engine.step import Step
from target_service.execution.batch import DeviceRows, StepBatch, lay_out
from target_service.execution.device_executor import best_steps
from target_service.execution.device_time import DeviceTime
from target_service.execution.host_executor import HostSteps, Steps
from target_service.execution.multi_step import Stride
from target_service.execution.pass_ends import PassEnds
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import Verified
from target_service.speculation.config import DraftingConfig
from target_service.speculation.drafts import Drafting
from target_service.speculation.hidden_states.encoding import AHEAD_ROWS
from target_service.speculation.hidden_states.sending import Features
from target_service.speculation.policy.draft_switch import DraftSwitch
from target_service.speculation.policy.draft_times import Use
from target_service.speculation.policy.follow_switch import FollowSwitch
from target_service.speculation.policy.gathered import Gathered
from target_service.speculation.policy.gathering import Gathering
from target_service.speculation.policy.launch_modes import Launch, LaunchModes
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.predicted_nodes import graft_predictions, note_passes
from target_service.speculation.policy.row_budget import RowBudget
from target_service.speculation.policy.row_policy import Kind, RowPolicy
from target_service.speculation.policy.step_cost import StepCost
from target_service.speculation.policy.unaided import Unaided

log = logging.getLogger(__name__)
# A pass is held for its draft for so many times as long as answers take, and in seconds before the first.
_WAIT_IN_ANSWERS, _FIRST_WAIT_SECONDS = 1.5, 0.01
# A pass that may have ended is asked so often. A thread takes some 0.1 ms to wake, and nobody waits for what is lost
# but the draft.
_ASKED_NS = 100_000
# Launches are timed as the median of the first few, in which kernels are compiled, and then as a mean of some ten, in
# which one that something held up counts for three.
_FIRST_LAUNCHES, _LAUNCH_SHARE, _MOST_LAUNCH = 9, 0.1, 3.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of the engine; the defaults live in `TargetConfig`."""

    scheduler: SchedulerConfig
    drafting: DraftingConfig
    max_waiting: int
    max_draft_nodes: int
    # Verify one path of each tree, whose rows see what they would see one at a time.
    chains: bool = False
    # Run one step after the other, verified by the host.
    lockstep: bool = False


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
        """`steps` of None takes the runner's best, or the plain ones in lockstep. `step_cost` of None verifies every
        drafted row that is allowed, and waits for drafts whether they pay or not."""
        self._runner = runner
        bounds = config.scheduler
        if steps is None and config.lockstep:
            steps = HostSteps(runner)
        self._steps = steps or best_steps(runner, max_sequences=bounds.max_running, max_rows=bounds.max_step_rows)
        self._observer = observer
        self._budget = RowBudget(step_cost)
        self.features = Features(runner, config.drafting.feature_window if config.drafting.enabled else 0)
        self.drafting = Drafting(config.drafting, runner.vocabulary_size, self.features, self._steps.tables)
        self.scheduler = Scheduler(config.scheduler, runner.cache)
        self.live: dict[int, LiveSequence] = {}
        # Where no bit of an output may depend on its batch, drafts are chains, and those the host cuts.
        chosen = self._steps.tables is not None and not (config.chains and config.drafting.enabled)
        most = config.max_draft_nodes if chosen else 0
        self._policy = RowPolicy(most, step_cost, self.live, config.drafting.disable_above)
        self._follow = FollowSwitch()
        self._unaided = Unaided(runner.node_table.lookup_tokens if runner.node_table is not None else 0)
        # Steps whose turn it was to be compared.
        self._compared = 0
        self._gathering = Gathering(
            self.drafting,
            self.scheduler,
            self._budget,
            self.live,
            max_draft_nodes=config.max_draft_nodes,
            chains=config.chains,
            switch=None if step_cost is None else DraftSwitch(),
            policy=self._policy,
            follow=self._follow if step_cost is not None else None,
        )
        self._stride = stride or Stride()
        self._ahead: Step | None = None
        self._pass_ends = PassEnds()
        # Whether the pass that ended last was seen to run until then.
        self._seen_running = True
        # What it takes to launch a pass that is laid out, in seconds.
        self._launching = RunningTime(_LAUNCH_SHARE, first_few=_FIRST_LAUNCHES, most=_MOST_LAUNCH)
        self._modes = LaunchModes()
        # How the next pass is launched, and how many rows the last one had that the device chose.
        self._way, self._rows = Launch.AHEAD, 0
        self._draft: DraftInfo | None = None
        self._device_time = DeviceTime()
        self._failed: list[SequenceEvent] = []
        # Of the weights in force, and whether no step is to be launched behind the one under way.
        self.model_version, self.settling = FIRST_VERSION, False
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

    @property
    def settled(self) -> bool:
        """Whether no step is under way."""
        return self._ahead is None

    @property
    def measures(self) -> bool:
        """See `Gathering.measures`."""
        return self._gathering.measures

    def exchanged(self, *, version: int) -> None:
        """The weights are others now. Keys and values of the old ones are dropped, and nothing that was learnt of what
        they said is held on to; the draft opens every sequence anew. While no step is under way."""
        self.model_version = version
        self.scheduler.preempt_all()
        self.drafting.begin_anew(version)
        self._follow.forget()
        self._modes.forget()

    def step(self) -> list[SequenceEvent] | None:
        """Move every scheduled sequence on. The events of the step, or None when there was nothing to run."""
        step = self._ahead or self._launch()
        if step is None:
            self._ended_ns = 0
            return self._take_failed() or None
        self._ahead = None if self.settling else self._launch_after(step)
        self.drafting.open_newcomers()
        step.clock.begin_wait()
        self._feed(step)
        step.launched.wait()
        step.clock.end_forward()
        outcomes = step.launched.outcomes()
        step.clock.end_verify()
        verdicts = self._commit(step, outcomes)
        if self._ahead is not None:
            self._ahead = self._ahead.moved_on(outcomes)
        self.drafting.collect(step.batch.items, step.features, outcomes)
        self._advance(verdicts)
        self._learn(step, outcomes)
        events = self._finish(verdicts)
        step.clock.end_commit()
        followable = step.launched.followable and not self.settling
        if self._ahead is None and followable and self.drafting.has_answered():
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
        use = self._gathering.choose(running, alone=alone)
        self._way = self._choose_way(running) if alone and use is Use.PLAIN else Launch.AHEAD
        if use is Use.AFTER or not alone or self._way is Launch.HELD or self._gathering.awaits_tokens(running):
            return None
        step.await_tokens()
        try:
            schedule = self.scheduler.schedule()
            if not schedule.chunks or not self.scheduler.reserve_behind_trees(schedule, self._runner.max_context):
                return None
            return self._begin(schedule, self._gathering.plain(schedule), clock, behind=step)
        except torch.OutOfMemoryError:
            # Once this step has ended there may be room.
            return None
        finally:
            step.forget_tokens()

    def _passes(self, schedule: Schedule, gathered: Gathered, behind: Step | None) -> tuple[int, DeviceRows | None]:
        """Passes to launch at once, and the rows that the device chooses for them."""
        if gathered.has_trees:
            return 1, None
        fed = self.drafting.active and self.drafting.reads_features
        # States are taken pass by pass, and there is room for those of so many rows.
        most = min(self.scheduler.max_step_rows, AHEAD_ROWS) if fed else self.scheduler.max_step_rows
        waits = self.drafting.latency.answer_seconds if self._way is Launch.HELD else 0.0
        device_rows = self._policy.choose(schedule, most, self._kind(self._way), waits)
        # Only the device knows where what is behind drafts begins.
        several = behind is not None and (device_rows is not None or not behind.has_drafts)
        several = several and gathered.use is Use.PLAIN and not fed
        return self._stride.choose(schedule, self.scheduler, self._runner.max_context, device_rows, several=several)

    def _choose_way(self, running: SequenceOf[Sequence]) -> Launch:
        """Whether the next pass waits for what the draft says of the one under way."""
        if not (self._policy.on and self.drafting.follows and self.drafting.latency.waiting_pays):
            return Launch.AHEAD
        load, rows = len(running), self._rows
        takes = self._policy.seconds(load, rows, Kind.AHEAD) or self._policy.seconds(load, rows, Kind.HELD)
        return self._modes.choose(load, self.drafting.latency.answer_seconds, self._launching.value, takes)

    def _kind(self, way: Launch) -> Kind:
        """What passes launched so are, to those who learn from them."""
        if not self.drafting.follows:
            return Kind.ALONE
        return Kind.HELD if way is Launch.HELD else Kind.AHEAD

    def _hold(self, batch: StepBatch) -> int:
        """Wait for the draft's answer for a pass that is laid out: for half as long again as its answers take, so that
        a draft that has stopped costs one round trip. Nanoseconds that this took."""
        if batch.device_rows is None or self._way is Launch.AHEAD:
            return 0
        # Those that read have no rows for a draft.
        sequences = [item.sequence for item in batch.items[batch.input.reading :]]
        return self.drafting.wait_for(
            sequences, _WAIT_IN_ANSWERS * self.drafting.latency.answer_seconds or _FIRST_WAIT_SECONDS
        )

    def _feed(self, step: Step) -> None:
        """While a step runs, publish what the draft says: the device looks for it when it comes to the one behind."""
        drafting, tables, self._seen_running = self.drafting, self._steps.tables, True
        if self._ahead is None or self._ahead.batch.device_rows is None or tables is None or not drafting.follows:
            return
        takes = step.stride * self._pass_ends.earliest(*_size_of(step))
        ends = max(step.clock.launched, self._free_ns) + int(takes * 1e9)
        drafting.listen()
        tables.publish()
        self._seen_running = False
        # An answer may be followed by a larger tree. Towards its end a pass is asked often whether it has ended.
        while not step.launched.ended():
            now = time.monotonic_ns()
            self._seen_running = now >= ends
            drafting.wait_for_anything(max(ends, now + _ASKED_NS))
            drafting.listen()
            tables.publish()

    def _let_drafts_in(self, behind: Step | None, batch: StepBatch, clock: StepClock) -> int:
        """Hold a pass that is ready for its draft, if that was chosen. Nanoseconds that this took."""
        held_ns = self._hold(batch) if behind is None else 0
        if self._steps.tables is not None:
            self._steps.tables.trust = self._policy.trust
        clock.end_plan()
        return held_ns

    def _goes_on_alone(self, sequence: Sequence) -> bool:
        """Whether neither the host nor a client has to see the sequence's tokens before they are fed."""
        return not sequence.request.external and self.live[sequence.sequence_id].verifier.on_device

    def _begin(self, schedule: Schedule, gathered: Gathered, clock: StepClock, *, behind: Step | None = None) -> Step:
        stride, device_rows = self._passes(schedule, gathered, behind)
        batch = lay_out(schedule.chunks, gathered.trees, self._runner.cache, stride, device_rows)
        verifiers = [self.live[item.sequence.sequence_id].verifier for item in batch.items]
        if device_rows is not None and self._steps.tables is not None:
            graft_predictions((item.sequence for item in batch.items), self.live, self._steps.tables)
        held_ns = 0

        def ready() -> None:
            nonlocal held_ns
            held_ns = self._let_drafts_in(behind, batch, clock)

        launched = self._steps.launch(batch, verifiers, stride, ready)
        gathered = replace(gathered, wait_ns=gathered.wait_ns + held_ns)
        if behind is not None:
            # What comes now is the host's alone.
            self._launching.observe((time.monotonic_ns() - clock.planned) * 1e-9)
        # Under a load that is not drafted for, nothing is taken; when it falls, heads begin with what follows.
        rows = len(batch.input.token_ids) if device_rows is None else device_rows.rows
        features = self.features.after_launch(rows) if self.drafting.active else None
        if launched.span is not None:
            launched.span.close()
        clock.end_launch()
        self._rows = device_rows.rows if device_rows is not None else 0
        for item in batch.items:
            # Whatever runs after this step finds their keys and values.
            item.sequence.kv_length += item.known + stride - 1
        behind_tree = behind is not None and behind.batch.drafted
        return Step(batch, gathered, launched, clock, behind is not None, behind_tree, stride, schedule.own, features)

    def _make_room(self, schedule: Schedule) -> None:
        """Run smaller steps from now on; where the smallest did not fit, refuse the youngest of its sequences."""
        torch.cuda.empty_cache()
        if self.scheduler.shrink():
            log.warning("a step of %d rows did not fit the device's memory; steps are smaller now", schedule.rows)
            return
        youngest = max((chunk.sequence for chunk in schedule.chunks), key=lambda sequence: sequence.sequence_id)
        error = QuotaExceeded("the device has no memory for a step", rows=schedule.rows)
        self.end(youngest.sequence_id, error.reason)
        self._failed.append(SequenceFailed(youngest.sequence_id, error, youngest.totals.draft_refused))

    def _take_failed(self) -> list[SequenceEvent]:
        failed, self._failed = self._failed, []
        return failed

    def _observe(self, step: Step, outcomes: SequenceOf[Verified | None], verdicts: SequenceOf[Verdict]) -> None:
        """Let row budget and switch learn what steps cost, and the observer hear of the step."""
        device_ns = self._device_time.take(step.launched.span, follows=bool(self._ended_ns))
        stats = step.stats(
            outcomes,
            verdicts,
            self._free_ns,
            self.features.take_sent(),
            device_ns,
            self.drafting.latency.take_round_trip(),
            followed=self.drafting.follows,
        )
        # What is launched by now belongs to the next step.
        self._free_ns, ended_ns, self._ended_ns = step.clock.forwarded, self._ended_ns, step.clock.committed
        self.scheduler.times.observe(*step.work, step.seconds_since(ended_ns), own=step.own)
        if not stats.prefill_rows:
            self._budget.observe_step(stats.decode_rows, stats.forward_ns * 1e-9 / step.stride)
            took = stats.forward_ns * 1e-9 / step.stride
            self._pass_ends.observe(*_size_of(step), took, running=self._seen_running)
            seconds, gathered = (self._ended_ns - ended_ns) * 1e-9, step.gathered
            if ended_ns and (step.ahead or gathered.drafted or not step.launched.followable):
                took = seconds / step.stride
                self._gathering.observe(stats.sequences, took, gathered, behind_tree=step.behind_tree)
            way = Launch.AHEAD if step.ahead else Launch.HELD
            if ended_ns and self._policy.on and not step.batch.drafted:
                made = stats.committed_tokens / max(1, stats.sequences) / step.stride
                followed = self.drafting.follows
                if not followed or way is self._modes.preferred(stats.sequences):
                    self._follow.observe(stats.sequences, seconds / step.stride, followed=followed)
                    self._compare(step, verdicts, stats.chosen_rows, followed=followed)
                if followed and step.batch.device_rows is not None:
                    self._modes.observe(stats.sequences, way, made, seconds / step.stride)
            plain = gathered.use is Use.PLAIN and not gathered.has_trees
            if plain and not step.behind_tree and step.launched.followable:
                took = stats.forward_ns * 1e-9 / step.stride
                self._policy.observe_time(stats.sequences, step.batch.device_rows, took, self._kind(way))
            if ended_ns and step.ahead and gathered.use is Use.PLAIN and not step.behind_tree:
                self._stride.observe(step.stride, seconds, step.clock.waited_ns * 1e-9)
        if self._observer is not None:
            self._observer.on_step(stats)

    def _compare(self, step: Step, verdicts: SequenceOf[Verdict], drafted: int, *, followed: bool) -> None:
        """Let the switch learn what the draft brings, of one sequence of a step, with so many drafted rows, at a
        time."""
        found = self._unaided.take()
        if found is not None:
            self._follow.compare(found.load, found.made, found.unaided)
        if followed and verdicts:
            self._compared += 1
            verdict = verdicts[self._compared % len(verdicts)]
            live = self.live.get(verdict.sequence_id)
            if live is not None and self.drafting.is_followed(live.sequence) and live.verifier.on_device:
                # The first of the passes that were launched at once: what the others begin with hangs on it.
                accepted = verdict.drafts_by_step[0] if verdict.drafts_by_step else verdict.drafted_tokens
                begun = len(live.sequence.token_ids) - len(verdict.token_ids)
                made = min(len(verdict.token_ids), accepted + 1)
                # Rows that no draft fills are chains': as many as are each sequence's share, or were right.
                rows = max(accepted, -(-drafted // (step.stride * len(verdicts))))
                self._unaided.note(len(verdicts), live.sequence, begun, made, rows)

    def _follow_load(self) -> None:
        if self.drafting.info is not self._draft:
            # What another was worth says nothing of it.
            self._draft = self.drafting.info
            self._follow.forget()
            self._modes.forget()
        if self._gathering.follow_load() and self._observer is not None:
            self._observer.on_speculation(self.drafting.active)
        if not self._steps.in_background:
            # Else once a step runs, lest a draft in this process keep the device waiting.
            self.drafting.open_newcomers()

    def _commit(self, step: Step, outcomes: SequenceOf[Verified | None]) -> list[Verdict]:
        """Append what was said. Sequences that ended since the launch are passed over."""
        compute_ns = step.clock.verified - step.clock.begun
        verdicts: list[Verdict] = []
        for item, outcome in zip(step.batch.items, outcomes, strict=True):
            live = self.live.get(item.sequence.sequence_id)
            if live is None or item.tree is None or outcome is None:
                continue
            if step.gathered.answered or item.tree.drafted:
                self._gathering.learn(live, item.tree, outcome, step.gathered.row_cost)
            verdict = commit(live, item.tree, outcome, compute_ns, model_version=self.model_version, kept=item.kept)
            verdicts.append(verdict)
            if outcome.device_passes and self._steps.tables is not None:
                note_passes(live, outcome.device_passes, len(verdict.token_ids), self._steps.tables)
            # Not otherwise: what lies past the committed tokens may belong to passes that are under way.
            if item.tree.drafted:
                self.scheduler.trim(item.sequence)
        return verdicts

    def _learn(self, step: Step, outcomes: SequenceOf[Verified | None]) -> None:
        """Let the policy learn from a pass whose rows the device chose, once the draft knows what it said."""
        read_alone = step.batch.prefill_rows and step.batch.device_rows is None
        if self._policy.on and not read_alone and not step.batch.drafted:
            kind, tables = self._kind(Launch.AHEAD if step.ahead else Launch.HELD), self._steps.tables
            # Of a table that holds a prediction too, nobody knows what the draft promised.
            drafted = [tables is not None and tables.of_draft(one.sequence.sequence_id) for one in step.batch.items]
            self._policy.observe(outcomes, kind, drafted)

    def _advance(self, verdicts: SequenceOf[Verdict]) -> None:
        """Tell the draft what was committed, so that it works while the events go out."""
        going_on = [verdict for verdict in verdicts if verdict.finish is None]
        self.drafting.advance(
            [(self.live[verdict.sequence_id].sequence, len(verdict.token_ids)) for verdict in going_on]
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


def _size_of(step: Step) -> tuple[int, int]:
    """Sequences of a step, and the rows that the device chose for it."""
    rows = step.batch.device_rows
    return len(step.batch.items), rows.rows if rows is not None else 0
