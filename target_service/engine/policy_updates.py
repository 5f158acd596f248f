"""What the engine learns from the steps that it ran: their times, and what drafts were worth in them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from target_service.core.sequence import StepStats, StepVerdict
from target_service.engine.step import Step
from target_service.execution.multi_step import MultiStep
from target_service.execution.node_tables import NodeTables
from target_service.execution.pass_ends import PassEnds
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.controller import most_have_forms
from target_service.speculation.policy.gathering import Gathering
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.lookup_baseline import LookupBaseline


@dataclass(eq=False, kw_only=True)
class PolicyUpdates:
    """Updates each policy of speculation from a step that has ended."""

    gathering: Gathering
    # Of the device; None where the host chooses rows.
    tables: NodeTables | None
    multi_step: MultiStep
    lookup_baseline: LookupBaseline
    pass_ends: PassEnds = field(default_factory=PassEnds)
    # Stretches of text that were compared with lookup.
    compared: int = field(default=0, init=False)

    def forget_draft(self) -> None:
        """Drop what was observed of a draft: another one has connected, or the weights have changed."""
        self.gathering.controller.forget_draft()

    def mode_with_draft(self, mode: LaunchMode) -> LaunchMode | None:
        """The mode of passes for the row policy; None while no draft is used."""
        return mode if self.gathering.drafting.has_open_sequences else None

    def choose_mode(self, load: int, launch_seconds: float) -> LaunchMode:
        """Whether the next pass of `load` sequences is held for the draft's answer to the one under way. A launch takes
        `launch_seconds`."""
        controller, drafting = self.gathering.controller, self.gathering.drafting
        if not (controller.on and drafting.has_open_sequences and drafting.latency.waiting_pays):
            return LaunchMode.RUN_AHEAD
        return controller.choose_mode(load, drafting.latency.answer_seconds, launch_seconds)

    def observe_outcomes(self, step: Step, outcomes: SequenceOf[Verified | None]) -> None:
        """Learn from what a pass accepted of the rows that the device chose, or of the drafts that it waited for."""
        made = step.gathered.made_of_drafts(step.batch.items, outcomes) if step.gathered.drafted else None
        if made is not None:
            self.gathering.controller.observe_cuts(len(step.batch.items), *made)
        prefills_alone = step.batch.prefill_rows and step.batch.device_rows is None
        if self.gathering.controller.on and not prefills_alone and not step.batch.drafted:
            mode, tables = self.mode_with_draft(step.mode), self.tables
            # In a table that holds a prediction too, the draft's expected tokens are unknown.
            drafted = [tables is not None and tables.of_draft(one.sequence.sequence_id) for one in step.batch.items]
            forms = most_have_forms([item.sequence for item in step.batch.items])
            self.gathering.controller.observe_passes(outcomes, mode, drafted, forms=forms)

    def observe_step(
        self, step: Step, stats: StepStats, verdicts: SequenceOf[StepVerdict], period: float, *, seen_running: bool
    ) -> None:
        """Learn from a step, `period` being from the end of the last one to its own, 0 behind a pause."""
        self.pass_ends.observe_end(*step.timed_as, stats.forward_ns * 1e-9 / step.passes, running=seen_running)
        if stats.prefill_rows:
            self._observe_with_prompts(step, stats, period)
        else:
            self._observe_forward(step, stats)
            if period:
                self._observe_period(step, stats, verdicts, period)
        if period:
            self._observe_launch(step, stats, period)

    def _observe_with_prompts(self, step: Step, stats: StepStats, period: float) -> None:
        """Learn from a step that read prompts: what such passes cost, and how a draft slows them."""
        controller, rows = self.gathering.controller, stats.decode_rows + stats.prefill_rows
        if not controller.on or step.batch.drafted:
            return
        self.gathering.cutter.observe_step(rows, stats.forward_ns * 1e-9)
        if period and step.work[0]:
            with_draft = self.gathering.drafting.has_open_sequences
            controller.draft_gate.observe_pass(stats.sequences, rows, period, with_draft=with_draft)

    def _observe_forward(self, step: Step, stats: StepStats) -> None:
        """Learn from the forward pass of a step that only decoded."""
        seconds = stats.forward_ns * 1e-9 / step.passes
        self.gathering.cutter.observe_step(stats.decode_rows, seconds)
        plain = step.gathered.use is LaunchMode.RUN_AHEAD and not step.gathered.has_trees
        if plain and not step.behind_tree and step.launched.can_launch_before_results:
            rows = step.batch.device_rows.rows if step.batch.device_rows is not None else 0
            mode, forms = self.mode_with_draft(step.mode), most_have_forms([each.sequence for each in step.batch.items])
            self.gathering.controller.observe_time(stats.sequences, rows, seconds, mode, forms=forms)

    def _observe_period(self, step: Step, stats: StepStats, verdicts: SequenceOf[StepVerdict], period: float) -> None:
        """Learn from the time of a step that only decoded, `period` being from the end of the last one to its own."""
        load, seconds = stats.sequences, period / step.passes
        self._observe_gap(step, load, seconds - stats.forward_ns * 1e-9 / step.passes)
        controller = self.gathering.controller
        if controller.on and not step.batch.drafted:
            with_draft = self.gathering.drafting.has_open_sequences
            preferred = not with_draft or controller.is_preferred(step.mode)
            if preferred:
                controller.draft_gate.observe_pass(load, stats.decode_rows, seconds, with_draft=with_draft)
                self._compare(verdicts, with_draft=with_draft)
        if step.ahead and step.gathered.use is LaunchMode.RUN_AHEAD and not step.behind_tree:
            self.multi_step.observe_launch(step.passes, period, (step.clock.forwarded - step.clock.waits_since) * 1e-9)

    def _observe_gap(self, step: Step, load: int, seconds: float) -> None:
        """Learn for how long the device had nothing to do before a step that only decoded."""
        controller = self.gathering.controller
        if controller.times is None:
            return
        if controller.on and not step.batch.drafted:
            controller.times.observe_gap(load, seconds, self.mode_with_draft(step.mode))
        elif step.ahead or step.gathered.drafted or not step.launched.can_launch_before_results:
            mode = self.gathering.gap_mode(step.gathered, behind_tree=step.behind_tree)
            if mode is not ...:
                controller.times.observe_gap(load, seconds, mode)

    def _observe_launch(self, step: Step, stats: StepStats, period: float) -> None:
        """Learn from the time and the tokens of any step, `period` being from the end of the last one to its own."""
        if not self.gathering.controller.on or self.gathering.controller.times is None:
            return
        waited = step.clock.forwarded - step.clock.waits_since + stats.draft_wait_ns
        self.gathering.controller.throughput_trial.observe_launch(
            stats.sequences, stats.committed_tokens, period, waited * 1e-9, drafted=step.batch.device_rows is not None
        )

    def _compare(self, verdicts: SequenceOf[StepVerdict], *, with_draft: bool) -> None:
        """Compare some sequences of a pass from here on with what they would have made by lookup."""
        baseline, gathering = self.lookup_baseline, self.gathering
        if not verdicts:
            return
        for found in baseline.follow(len(verdicts), with_draft=with_draft):
            gathering.controller.draft_gate.compare(*found[:3], with_draft=found.with_draft)
        if baseline.is_busy or not gathering.drafting.connected:
            return
        self.compared += 1
        # Four sequences of a pass. Chosen: with eight under way a worthless draft is dropped after some hundred passes,
        # for some 0.2 ms of the host once in eight.
        places = range(self.compared, self.compared + len(verdicts), -(-len(verdicts) // 4))
        live = [gathering.live.get(verdicts[place % len(verdicts)].sequence_id) for place in places]
        compared = [one.sequence for one in live if one is not None and self._is_compared(one, with_draft)]
        baseline.start_comparison(len(verdicts), compared, with_draft=with_draft)

    def _is_compared(self, live: LiveSequence, with_draft: bool) -> bool:
        """Whether a sequence can be compared, and is followed by the draft or not, as its pass is."""
        request, goes_on = live.sequence.request, not live.sequence.totals.finished_ns
        comparable = goes_on and not (request.external or request.has_form)
        return comparable and self.gathering.drafting.is_open(live.sequence) == with_draft
