"""What an engine drafts with: drafts, the policies of their use, and what those learn from steps."""

from __future__ import annotations

import time
from collections.abc import Mapping

from outrider import __version__
from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo, TreeLimits
from target_service.config import TargetConfig
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence, StepVerdict
from target_service.engine.launch_hold import LaunchHold
from target_service.engine.policy_updates import PolicyUpdates
from target_service.engine.step import Step
from target_service.execution.multi_step import MultiStep
from target_service.execution.node_tables import NodeTables
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import Verified
from target_service.speculation.drafts import DraftTrees
from target_service.speculation.hidden_states.prefixes import SharedPrefixStates
from target_service.speculation.hidden_states.sending import Features
from target_service.speculation.policy.controller import SpeculationController
from target_service.speculation.policy.gathering import Gathering
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.lookup_baseline import LookupBaseline
from target_service.speculation.policy.predicted_nodes import note_passes
from target_service.speculation.policy.step_cost import StepCost
from target_service.speculation.policy.tree_cuts import TreeCutter
from tree_kernels.pass_trees import NODES as MOST_NODES


class EngineSpeculation:
    """Drafts of the sequences under way, and what decides on their use."""

    def __init__(
        self,
        runner: ModelRunner,
        config: TargetConfig,
        scheduler: Scheduler,
        live: Mapping[int, LiveSequence],
        tables: NodeTables | None,
        step_cost: StepCost | None,
    ) -> None:
        """`live` are the sequences under way by id, and `tables` those of the device, None where the host chooses rows.
        Without a `step_cost` drafts are never turned off."""
        self.tables = tables
        self.features = Features(runner, config.feature_window if config.speculates else 0)
        self.drafting = DraftTrees(config, runner.vocabulary_size, self.features, tables)
        # Batch-invariant drafts are chains, which the host cuts.
        device_chooses = tables is not None and not (config.batch_invariant and config.speculates)
        most = config.max_draft_nodes if device_chooses else 0
        self.controller = SpeculationController(most, step_cost, live, config.speculative_disable_queue_size)
        if self.controller.on and step_cost is not None:
            scheduler.prompt_rows.drafted_beside = self.controller.beside_prompts
        lookup_tokens = runner.node_table.lookup_tokens if runner.node_table is not None else 0
        self.gathering = Gathering(
            drafting=self.drafting,
            scheduler=scheduler,
            cutter=TreeCutter(step_cost),
            live=live,
            controller=self.controller,
        )
        self.updates = PolicyUpdates(
            gathering=self.gathering,
            tables=tables,
            multi_step=MultiStep(),
            lookup_baseline=LookupBaseline(min(lookup_tokens, most)),
        )
        self.hold = LaunchHold()
        self._draft: DraftInfo | None = None
        in_pass = runner.in_pass
        if in_pass is not None and tables is not None:
            known = runner.vocabulary_size, runner.tokenizer_fingerprint
            self.drafting.draft_in_passes(
                DraftInfo(in_pass.name, *known, TreeLimits(MOST_NODES), runner.max_context, __version__)
            )
            self.controller.tail = in_pass.tail
        if config.speculates:
            scheduler.pages.states = SharedPrefixStates(self.features, self._is_drafted, self._rows_worth_a_draft)

    def _is_drafted(self, sequence: Sequence) -> bool:
        return self.drafting.active and self.drafting.is_eligible(sequence)

    def _rows_worth_a_draft(self, sequence: Sequence) -> float:
        load = max(1, self.gathering.scheduler.load)
        return self.gathering.controller.rows_worth_a_draft(load, sequence.remaining)

    def update_use(self) -> bool:
        """Start or stop drafting by load, before a step is scheduled; returns whether that changed."""
        if self.drafting.info is not self._draft:
            # Another draft: what was observed does not apply to it.
            self._draft = self.drafting.info
            self.updates.forget_draft()
        return self.gathering.update_drafting()

    def exchanged(self, version: int) -> None:
        """Drop what was learnt of drafts for the old weights, and open every sequence at the draft again."""
        self.drafting.reopen_all(version)
        self.updates.forget_draft()

    def publish_until_end(self, step: Step, begun_ns: int) -> bool:
        """While a step runs, publish drafts as they arrive: the device reads them when it begins the next one, which is
        launched already. `begun_ns`: when the device began the step. Returns whether it was seen to run until about
        its end."""
        if self.tables is None or not self.drafting.awaits_growth:
            return True
        ends = self._earliest_end(step, begun_ns)
        self.drafting.listen()
        self.tables.publish()
        seen_running = False
        # An answer may be followed by a larger tree. The pass is polled once it should have ended.
        while not step.launched.ended():
            now = time.monotonic_ns()
            seen_running = now >= ends
            # A pass that may have ended is polled: a thread takes some 0.1 ms to wake.
            self.drafting.wait_until(max(ends, now + 100_000) * 1e-9)
            self.drafting.listen()
            self.tables.publish()
        return seen_running

    def hold_launch(self, step: Step, begun_ns: int) -> bool:
        """While a step runs, wait until shortly before its end with the launch of the one behind it, so that requests
        which arrive meanwhile are in that. Publishes drafts as they arrive. Returns whether it waited."""
        # Prompts that are left unread fill the next step, and forms have the host work beside this one.
        if step.unread or any([item.sequence.request.has_form for item in step.batch.items]):
            return False
        due, waited = self._earliest_end(step, begun_ns) * 1e-9 - self.hold.lead, False
        while (now := time.monotonic()) < due and not step.launched.ended():
            waited = True
            # It should still run, but its time may be that of a host which was away. Chosen: an eighth of a pass at 8B
            # size.
            self.drafting.wait_until(min(due, now + 1e-3))
            # Also what is of no sequence under way: what is not read ends every wait at once.
            self.drafting.listen()
            if self.tables is not None and self.drafting.awaits_growth:
                self.tables.publish()
        return waited

    def _earliest_end(self, step: Step, begun_ns: int) -> int:
        """When a step can end that the device began at a time, in monotonic nanoseconds; that time where no like step
        has ended yet."""
        return begun_ns + int(step.passes * self.updates.pass_ends.earliest(*step.timed_as) * 1e9)

    def observe_tree(self, step: Step, live: LiveSequence, tree: TokenTree, outcome: Verified) -> None:
        """Learn from a sequence's tree before its outcome is committed."""
        if step.batch.drafted and tree.drafted:
            self.gathering.observe_tree(live, tree, outcome)

    def observe_verdict(self, live: LiveSequence, outcome: Verified, verdict: StepVerdict) -> None:
        """Move a prediction on behind what was committed."""
        if live.prediction is not None and self.tables is not None:
            note_passes(live, outcome.device_passes, len(verdict.token_ids), self.tables)
