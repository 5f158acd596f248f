"""The draft's part of a step: whether to wait for it, how many of its rows to verify, and pages for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property
from types import EllipsisType
from typing import NamedTuple

from outrider.drafting.draft_tree import GrowingTree
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from target_service.core.schedule import Schedule, SequenceChunk
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence
from target_service.execution.batch import StepItem
from target_service.grammars.following import ConstrainedTree
from target_service.sampling.verifier import Verified
from target_service.speculation.drafts import DRAFTED_ANYWAY, DraftTrees
from target_service.speculation.merged_tree import MergedTree, PredictedTree
from target_service.speculation.policy.controller import SpeculationController
from target_service.speculation.policy.estimates import Mode
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.tree_cuts import IN_ORDER_NODES, Offer, TreeCutter
from tree_kernels.pages import OutOfPages

# Time to send a sequence to a draft, and the features that a head needs by then, in plain steps.
_SENDING, _SENDING_HEADS = 0.5, 12.0
# The tree of every plain step: the root that is fed is the sequence's own token, whatever this one holds.
_ROOT_ALONE = TokenTree.root_only(0)


def _drafted(tree: TokenTree | None) -> int:
    return 0 if tree is None else tree.drafted


class CutYield(NamedTuple):
    """Of the sequences whose drafts a step waited for: how many they are, their drafted rows, and those of them that
    were accepted."""

    sequences: int
    rows: int
    accepted: int


@dataclass(frozen=True)
class Gathered:
    """A tree per chunk, and what waiting for drafts cost."""

    trees: list[TokenTree | None]
    # Sequences that the step waited for.
    drafted: tuple[Sequence, ...]
    wait_ns: int
    # Sequences whose draft came too late.
    fallbacks: int
    use: LaunchMode
    # By sequence id, the trees that the host has cut.
    cuts: Mapping[int, TokenTree] = field(default_factory=dict)

    @cached_property
    def has_trees(self) -> bool:
        """Whether any tree has more rows than its root."""
        return any([tree is not None and tree.drafted for tree in self.trees])

    @cached_property
    def drafted_rows(self) -> int:
        """Rows of its trees beside their roots."""
        return sum([tree.drafted for tree in self.trees if tree is not None])

    def made_of_drafts(self, items: SequenceOf[StepItem], outcomes: SequenceOf[Verified | None]) -> CutYield | None:
        """What it made of the sequences that it waited for, but for those whose rows are not their draft's: a
        prediction has some, a grammar forces some, or there were no pages for them. None if there are no others."""
        waited = {sequence.sequence_id for sequence in self.drafted}
        found = list[tuple[int, int]]()
        for item, outcome in zip(items, outcomes, strict=True):
            sequence_id = item.sequence.sequence_id
            if sequence_id not in waited or outcome is None or item.tree is None:
                continue
            cut = self.cuts.get(sequence_id)
            if cut is None and not item.tree.drafted:
                found.append((0, 0))
            elif cut is not None and item.tree is cut and not isinstance(cut, PredictedTree):
                found.append((cut.drafted, outcome.accepted))
        return CutYield(len(found), *map(sum, zip(*found, strict=True))) if found else None


@dataclass(eq=False, kw_only=True)
class Gathering:
    """Cuts every sequence's growing tree to what pays."""

    drafting: DraftTrees
    scheduler: Scheduler
    cutter: TreeCutter
    # The engine's own table.
    live: Mapping[int, LiveSequence]
    controller: SpeculationController
    # How the next step uses drafts, and whether it may be launched behind the one under way.
    _use: LaunchMode = field(default=LaunchMode.WAIT_FOR_DRAFT, init=False)
    _ahead: bool = field(default=False, init=False)

    @property
    def drafts_useful(self) -> bool:
        """Whether drafts are in use, or were recently, or may be soon."""
        if self.controller.times is None:
            return True
        if self.controller.on:
            return self.controller.uses_draft(max(1, len(self.scheduler.running)))
        load = self.scheduler.load
        if load and self.drafting.reads_features and self.controller.needs_unfed(load):
            return False
        # Plain steps for which a draft follows, after a drafted one and before the next, where following costs
        # something: with heads, and with several sequences. Chosen: opening the sequences again takes as long as a few
        # plain steps.
        return self.controller.keeps_cuts(8)

    def _pays_for_beginning(self) -> bool:
        """Whether a head's drafts are expected to pay now that sequences begin. They have to be open there from their
        prompts on: once their first step has shown it, it is too late."""
        load = self.scheduler.load
        places = load - len(self.scheduler.running)
        if not places or not self.drafting.reads_features:
            return False
        beginning = sum(
            [
                not (live.sequence.step or live.sequence.kv_length) and self.drafting.is_eligible(live.sequence)
                for live in self.live.values()
            ]
        )
        # Others that wait begin later.
        drafted = min(places, beginning)
        if not drafted:
            return False
        mode = self.controller.choose_wait(load, drafted, ahead=self._ahead, timed=False)
        return mode is LaunchMode.WAIT_FOR_DRAFT

    @property
    def measures(self) -> bool:
        """Whether passes without a draft are still being timed at this load, so that none is used."""
        load = max(1, len(self.scheduler.running))
        return self.controller.on and self.controller.times is not None and self.controller.draft_gate.measures(load)

    def update_drafting(self) -> bool:
        """Read what has arrived from the draft, and start or stop drafting by load. Returns whether that changed."""
        was = self.drafting.active
        self.drafting.listen()
        if self.controller.times is not None and not (was or self.controller.on) and self._pays_for_beginning():
            self.controller.expect_cuts()
        self.drafting.update_load(self.scheduler.load, self.drafts_useful)
        return self.drafting.active != was

    def choose(self, running: SequenceOf[Sequence], *, ahead: bool) -> LaunchMode:
        """How the next step uses drafts. `ahead`: it may be launched behind the one under way. Called once per step,
        before it is scheduled."""
        self._ahead = ahead
        use = self._best_use(running, ahead)
        self._use = use if self.drafting.active else LaunchMode.RUN_AHEAD
        self.drafting.rests = self._use is LaunchMode.RUN_AHEAD
        return self._use

    def _best_use(self, running: SequenceOf[Sequence], ahead: bool) -> LaunchMode:
        """What pays in the next step. The controller counts steps while no draft is used, too."""
        if not self.drafting.connected or self.drafting.in_pass or self.drafting.too_many(self.scheduler.load):
            return LaunchMode.RUN_AHEAD
        if ahead and self.device_chooses(running):
            # Rows come from the device's tables then, or for some sequences from the drafts that are there.
            return LaunchMode.RUN_AHEAD
        eligible = [one for one in running if self._may_be_drafted(one) and not self._follows_prediction(one)]
        if not eligible:
            return LaunchMode.RUN_AHEAD
        if self.controller.times is not None and self.drafting.active and self.drafting.latency.beginning:
            # It is in use, and its first answers are slower than later ones.
            return LaunchMode.RUN_AHEAD
        load = len(running)
        # The times of steps that read prompts are not observed.
        timed = not (self.scheduler.admits or any([one.kv_length + 1 < len(one.token_ids) for one in running]))
        return self.controller.choose_wait(load, len(eligible), ahead=ahead, timed=timed, sending=self._sending(load))

    def awaits_tokens(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the host needs the tokens of the step under way, to cut a prediction behind them."""
        lives = self._lives(running)
        offers = any([live.prediction is not None and live.prediction.has_offer for live in lives])
        return offers and not self.device_chooses(running)

    def device_chooses(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the device chooses rows of some of the sequences, predicted ones too: then no step waits for the
        drafts of the others."""
        return self.controller.on and any([one.request.device_rows for one in sequences])

    def is_cut_for(self, sequence: Sequence) -> bool:
        """Whether the host has drafts to cut for the sequence, or may get some, while the device chooses the rows of
        others."""
        live = self.live.get(sequence.sequence_id)
        # It may have ended since its step was launched.
        if live is None or sequence.request.device_rows:
            return False
        prediction = live.prediction
        return self.drafting.is_open(sequence) or (prediction is not None and prediction.has_offer)

    def awaits_results(self, sequence: Sequence) -> bool:
        """Whether the sequence's next pass can be laid out only when the tokens of its last one are on the host: its
        client drafts, its masks come late, or the host adds rows that its grammar forces."""
        request = sequence.request
        if self._is_slow(sequence):
            return True
        if request.external or not request.has_form:
            return request.external
        chosen_by_device = self.controller.on and request.device_rows
        return request.speculate and self.drafting.config.speculation and not chosen_by_device

    def _is_slow(self, sequence: Sequence) -> bool:
        """Whether its grammar takes so long for a mask that it has no drafted rows, and sits out meanwhile."""
        live = self.live.get(sequence.sequence_id)
        return live is not None and live.verifier.grammar is not None and live.verifier.grammar.slow

    def sits_out(self, sequence: Sequence) -> bool:
        """Whether a sequence of the step under way takes no part in one that is launched behind it: its tokens have to
        be known first, for a client, a grammar, or drafts that the host cuts."""
        if self.awaits_results(sequence):
            return True
        # It may have failed since the launch. What looks at every sequence comes last.
        has_tree = sequence.sequence_id in self.live and self.is_cut_for(sequence)
        return has_tree and self.device_chooses(self.scheduler.running)

    def _lives(self, sequences: SequenceOf[Sequence]) -> list[LiveSequence]:
        live = self.live
        return [live[sequence.sequence_id] for sequence in sequences]

    def _may_be_drafted(self, sequence: Sequence) -> bool:
        """Whether the sequence is open at the draft, or may be while drafting is off. A head does not follow those that
        began while it was not fed, and each of their steps would count as a late answer of it."""
        if self.drafting.active:
            return self.drafting.is_open(sequence)
        return self.drafting.is_eligible(sequence)

    def _follows_prediction(self, sequence: Sequence) -> bool:
        """Whether the sequence follows its prediction well enough not to wait for a draft."""
        prediction = self.live[sequence.sequence_id].prediction
        return prediction is not None and prediction.holds

    def _sending(self, load: int) -> float:
        """Time to send the draft the sequences that are not open there, in plain steps."""
        if self.drafting.reads_features:
            return _SENDING * load + _SENDING_HEADS
        return _SENDING * load if load > DRAFTED_ANYWAY else 0.0

    def gap_mode(self, gathered: Gathered, *, behind_tree: bool) -> Mode | EllipsisType:
        """As which mode's the gap before a step counts whose trees the host cuts, or that has none; `...` where it does
        not count. `behind_tree`: the step before it had trees, and this one was launched while it ran."""
        if gathered.use is LaunchMode.WAIT_FOR_DRAFT:
            return LaunchMode.WAIT_FOR_DRAFT if gathered.drafted else ...
        if behind_tree or gathered.has_trees:
            return ...
        # Feeding a head takes time too.
        return LaunchMode.RUN_AHEAD if self.drafting.active and self.drafting.reads_features else None

    def gather(self, schedule: Schedule) -> Gathered:
        """Wait for the draft, if that was chosen, then cut every tree to the rows that pay."""
        taking = [chunk.sequence for chunk in schedule.chunks if chunk.takes_tree]
        if self.device_chooses(taking):
            return self.without_waiting(schedule)
        drafted: list[Sequence] = []
        if self._use is LaunchMode.WAIT_FOR_DRAFT and self.drafting.active:
            drafted = [sequence for sequence in taking if self.drafting.is_open(sequence)]
        wait_ns = self.drafting.wait_for(drafted, self.controller.longest_wait(len(self.scheduler.running)))
        offers: dict[int, Offer] = {}
        fallbacks = 0
        for sequence in drafted:
            tree = self.drafting.tree_of(sequence)
            sequence.totals.draft_wait_ns += wait_ns
            if tree is None or not tree.answered:
                sequence.totals.fallback_steps += 1
                fallbacks += 1
            self._offer(sequence, tree, offers)
        for sequence in taking:
            self._offer_prediction(sequence, offers)
        chosen, cuts = self._cut(schedule, offers, len(taking))
        return Gathered(chosen, tuple(drafted), wait_ns, fallbacks, self._use, cuts)

    def _cut(
        self, schedule: Schedule, offers: Mapping[int, Offer], taking: int
    ) -> tuple[list[TokenTree | None], dict[int, TokenTree]]:
        """The trees of a step, in which `taking` sequences could have one, and those that were cut."""
        spare, cuts = self.scheduler.max_step_rows - schedule.rows, dict[int, TokenTree]()
        if offers:
            rate = self.controller.cut_rate(taking, len(offers))
            cuts = dict(zip(offers, self.cutter.cut(list(offers.values()), schedule.rows, spare, rate), strict=True))
        spare -= sum([cut.drafted for cut in cuts.values()])
        chosen: list[TokenTree | None] = []
        for chunk in schedule.chunks:
            own = cuts.get(chunk.sequence.sequence_id)
            chosen.append(self._tree(chunk, own, spare))
            spare -= max(0, _drafted(chosen[-1]) - _drafted(own))
        return chosen, cuts

    def _offer(self, sequence: Sequence, tree: GrowingTree | None, offers: dict[int, Offer]) -> None:
        if tree is not None and tree.nodes:
            live, in_order = self.live[sequence.sequence_id], sequence.request.mode is VerificationMode.REJECTION
            most, one_path = self._max_nodes(sequence), self._takes_one_path(sequence)
            offers[sequence.sequence_id] = Offer(tree, live.record, most, in_order, one_path)

    def _offer_prediction(self, sequence: Sequence, offers: dict[int, Offer]) -> None:
        """Merge the prediction into the drafted tree. In rejection sampling it replaces it, since sampled siblings do
        not mix with predicted ones."""
        live = self.live[sequence.sequence_id]
        if live.prediction is None:
            return
        # The target samples the last token itself.
        most = min(sequence.remaining - 1, self._max_nodes(sequence))
        chains = live.prediction.chains(min(most, live.prediction.offer_limit))
        if not chains:
            return
        drafted = offers.get(sequence.sequence_id)
        rejection = sequence.request.mode is VerificationMode.REJECTION
        grown = drafted.tree if drafted is not None and not rejection else None
        assert not isinstance(grown, MergedTree)
        tree, one_path = MergedTree(sequence.root, grown, chains), self._takes_one_path(sequence)
        offers[sequence.sequence_id] = Offer(
            tree, live.record, most, chain=one_path, predicted_record=live.predicted_record
        )

    def observe_tree(self, live: LiveSequence, tree: TokenTree, outcome: Verified) -> None:
        """Learn from the tree of a step, before it is committed. A client's own trees are not learnt from, nor are
        those with rows that a grammar forces."""
        forced = isinstance(tree, ConstrainedTree) and tree.forced
        if live.sequence.request.external or forced:
            return
        accepted_rows = outcome.walk.accepted_rows
        self.cutter.calibration.observe_tree(tree, tree.scores, accepted_rows, live.record)
        if isinstance(tree, PredictedTree) and tree.predicted_rows and live.prediction is not None:
            self.cutter.of_predictions.observe_tree(tree, tree.predicted, accepted_rows, live.predicted_record)
            live.prediction.observe_offer(tree.accepted_predicted(accepted_rows))

    def without_waiting(self, schedule: Schedule) -> Gathered:
        """A step that waits for no draft: roots alone, but where the device chooses rows for some sequences, trees for
        the others of what drafts are there by now, if their tokens are known."""
        offers: dict[int, Offer] = {}
        taking = [chunk.sequence for chunk in schedule.chunks if chunk.takes_tree]
        if self.device_chooses(taking):
            for sequence in taking:
                if sequence.pending is None and self.is_cut_for(sequence):
                    self._offer(sequence, self.drafting.tree_of(sequence), offers)
                    self._offer_prediction(sequence, offers)
        chosen, cuts = self._cut(schedule, offers, len(taking))
        return Gathered(chosen, (), 0, 0, LaunchMode.RUN_AHEAD, cuts)

    def _takes_one_path(self, sequence: Sequence) -> bool:
        """Whether of its trees only one path is verified. Rejection sampling needs all siblings."""
        return self.drafting.config.batch_invariant and sequence.request.mode is not VerificationMode.REJECTION

    def _max_nodes(self, sequence: Sequence) -> int:
        """Drafted rows that the sequence may have: none past its last token or its pages."""
        if sequence.remaining <= 1 or self._is_slow(sequence):
            return 0
        limit = min(sequence.request.max_draft_nodes, self.drafting.config.max_draft_nodes)
        return max(0, min(limit, self.scheduler.pages.spare_rows(sequence)))

    def _constrained(self, sequence: Sequence, tree: TokenTree | None, spare: int) -> TokenTree | None:
        """A sequence's tree as its grammar, if it has one, lets it be, with up to `spare` rows more."""
        grammar = self.live[sequence.sequence_id].verifier.grammar
        rejects = tree is not None and bool(tree.distributions)
        if grammar is None or rejects or isinstance(tree, PredictedTree):
            return tree
        if grammar.slow or not (sequence.request.speculate and self.awaits_results(sequence)):
            return tree
        most = min(self._max_nodes(sequence), _drafted(tree) + spare)
        root = TokenTree.root_only(sequence.root) if tree is None else tree
        return grammar.constrained(root, sequence.output, max(most, root.drafted))

    def _tree(self, chunk: SequenceChunk, tree: TokenTree | None, spare: int) -> TokenTree | None:
        """The tree to verify behind a chunk, with pages held for it: the given one, to which a grammar may add up to
        `spare` rows. None while the root is not reached."""
        sequence = chunk.sequence
        if not sequence.totals.started_ns:
            sequence.totals.started_ns = time.monotonic_ns()
        if not chunk.reaches_root:
            return None
        if sequence.external_tree is not None:
            tree = sequence.external_tree
        elif chunk.takes_tree:
            tree = self._constrained(sequence, tree, spare)
        if tree is not None and chunk.takes_tree:
            rows = len(tree)
            if sequence.request.mode is VerificationMode.REJECTION:
                # Whether there is room must not depend on how many nodes were sampled.
                rows = max(rows, 1 + IN_ORDER_NODES)
            try:
                self.scheduler.pages.reserve(sequence, sequence.kv_length + rows)
                return tree
            except OutOfPages:
                # Others took the free pages; the sequence goes on without its draft.
                pass
        return _ROOT_ALONE
