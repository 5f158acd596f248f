"""The draft's part of a step: whether to wait for it, how many of its rows to verify, and pages for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from outrider.drafting.draft_tree import GrowingTree
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from target_service.core.kv_cache import OutOfPages
from target_service.core.schedule import Chunk, Schedule
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence
from target_service.sampling.verifier import Verified
from target_service.speculation.drafts import FOLLOWED_ANYWAY, Drafting
from target_service.speculation.merged_tree import MergedTree, PredictedTree
from target_service.speculation.policy.draft_switch import DraftSwitch
from target_service.speculation.policy.draft_times import Use
from target_service.speculation.policy.follow_switch import FollowSwitch
from target_service.speculation.policy.gathered import Gathered
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.row_budget import IN_ORDER_NODES, Offer, RowBudget
from target_service.speculation.policy.row_policy import RowPolicy

# Time to send a sequence to a draft, and the features that a head needs by then, in plain steps.
_SENDING, _SENDING_HEADS = 0.5, 12.0
# The tree of every plain step: the root that is fed is the sequence's own token, whatever this one holds.
_ROOT_ALONE = TokenTree.root_only(0)
# Plain steps for which a draft follows, after a drafted one and before the next. Fewer for heads and many sequences,
# where following costs more than opening the sequences again.
_FOLLOWED, _FOLLOWED_BY_HEADS, _FOLLOWED_BY_MANY = 32, 8, 6


class Gathering:
    """Cuts every sequence's growing tree to what pays."""

    def __init__(
        self,
        drafting: Drafting,
        scheduler: Scheduler,
        budget: RowBudget,
        live: Mapping[int, LiveSequence],
        *,
        max_draft_nodes: int,
        chains: bool,
        switch: DraftSwitch | None,
        policy: RowPolicy,
        follow: FollowSwitch | None,
    ) -> None:
        """`live` is the engine's own table. `chains` takes one path of each tree, except in rejection sampling. A
        `switch` of None always waits for drafts, and a `follow` of None always follows them."""
        self._drafting = drafting
        self._scheduler = scheduler
        self._budget = budget
        self._live = live
        self._max_draft_nodes = max_draft_nodes
        self._chains = chains
        self._switch = switch
        self._policy = policy
        self._follow = follow
        # How the next step uses drafts.
        self._use = Use.AFTER
        # Whether that step may be launched behind the one under way.
        self._ahead = False

    @property
    def drafts_useful(self) -> bool:
        """Whether drafts are in use, or were recently, or may be soon."""
        if self._policy.on:
            return self._follow is None or self._follow.follows(max(1, len(self._scheduler.running)))
        if self._switch is None:
            return True
        load, heads = self._scheduler.load, self._drafting.reads_features
        if load and heads and self._switch.needs_unfed(load, ahead=self._ahead):
            return False
        if load > FOLLOWED_ANYWAY:
            return self._switch.drafts_within(_FOLLOWED_BY_MANY)
        return self._switch.drafts_within(_FOLLOWED_BY_HEADS if heads else _FOLLOWED)

    def _pays_for_newcomers(self, switch: DraftSwitch) -> bool:
        """Whether a head's drafts are expected to pay now that sequences begin. It has to follow them from their
        prompts on: once their first step has shown it, it is too late."""
        load = self._scheduler.load
        places = load - len(self._scheduler.running)
        if not places or not self._drafting.reads_features:
            return False
        # Others that wait begin later.
        records = [
            live.record
            for live in self._live.values()
            if not (live.sequence.step or live.sequence.kv_length) and self._drafting.is_eligible(live.sequence)
        ][:places]
        if not records:
            return False
        expected = sum(map(self._budget.expected_tokens, records)) / self._policy.tokens_each + load - len(records)
        return switch.best(load, expected) is not Use.PLAIN

    @property
    def measures(self) -> bool:
        """Whether passes without a draft are still being timed at this load, so that none is followed."""
        load = max(1, len(self._scheduler.running))
        return self._policy.on and self._follow is not None and self._follow.measures(load)

    def follow_load(self) -> bool:
        """Read what has arrived from the draft, and start or stop drafting by load. Returns whether that changed."""
        was = self._drafting.active
        self._drafting.listen()
        if self._switch is not None and not (was or self._policy.on) and self._pays_for_newcomers(self._switch):
            self._switch.resume()
        self._drafting.follow_load(self._scheduler.load, self.drafts_useful)
        return self._drafting.active != was

    def choose(self, running: SequenceOf[Sequence], *, ahead: bool) -> Use:
        """How the next step uses drafts. `ahead`: the device verifies every sequence, and the step may be launched
        behind the one under way. Called once per step, before it is scheduled."""
        self._ahead = ahead
        use = self._best_use(running, ahead)
        self._use = use if self._drafting.active else Use.PLAIN
        return self._use

    def _best_use(self, running: SequenceOf[Sequence], ahead: bool) -> Use:
        """What pays in the next step. The switch counts steps while no draft is followed, too."""
        if not self._drafting.connected or self._drafting.too_many(self._scheduler.load):
            return Use.PLAIN
        if ahead and self._device_chooses(running):
            # Rows come from the device's tables then.
            return Use.PLAIN
        eligible = [one for one in running if self._may_be_drafted(one) and not self._is_led(one)]
        if not eligible:
            return Use.PLAIN
        if self._switch is None:
            return Use.AFTER
        if self._drafting.active and self._drafting.latency.beginning:
            # It is followed, and its first answers are slower than later ones.
            return Use.PLAIN
        records = [self._live[sequence.sequence_id].record for sequence in eligible]
        load, others = len(running), len(running) - len(eligible)
        # Per token of plain steps, which make more than one each where the device drafts for them.
        expected = sum(map(self._budget.expected_tokens, records)) / self._policy.tokens_each + others
        if self._reads_prompts(running):
            # The times of such steps are not observed.
            return self._switch.best(load, expected)
        return self._switch.choose(load, expected, ahead=ahead, sending=self._sending(load))

    def awaits_tokens(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the host needs the tokens of the step under way, to cut a prediction behind them."""
        lives = self._lives(running)
        offers = any([live.prediction is not None and live.prediction.has_offer for live in lives])
        return offers and not self._device_chooses(running)

    def _device_chooses(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the device chooses the rows of all sequences, predicted ones too."""
        return self._policy.on and all([live.verifier.device_rows for live in self._lives(sequences)])

    def _lives(self, sequences: SequenceOf[Sequence]) -> list[LiveSequence]:
        live = self._live
        return [live[sequence.sequence_id] for sequence in sequences]

    def _may_be_drafted(self, sequence: Sequence) -> bool:
        """Whether the draft follows the sequence, or may while drafting is off. A head does not follow those that began
        while it was not fed, and each of their steps would count as a late answer of it."""
        if self._drafting.active:
            return self._drafting.is_followed(sequence)
        return self._drafting.is_eligible(sequence)

    def _is_led(self, sequence: Sequence) -> bool:
        """Whether the sequence follows its prediction well enough not to wait for a draft."""
        prediction = self._live[sequence.sequence_id].prediction
        return prediction is not None and prediction.leads

    def _sending(self, load: int) -> float:
        """Time to send the draft the sequences that it does not follow, in plain steps."""
        if self._drafting.reads_features:
            return _SENDING * load + _SENDING_HEADS
        return _SENDING * load if load > FOLLOWED_ANYWAY else 0.0

    def _reads_prompts(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the next step has rows of prompts."""
        reading = (sequence.kv_length + 1 < len(sequence.token_ids) for sequence in running)
        return self._scheduler.admits or any(reading)

    def observe(self, load: int, seconds: float, gathered: Gathered, *, behind_tree: bool) -> None:
        """Observe the time of a step that only decoded, from the end of the step before it.

        `behind_tree`: that one had trees, and this one was launched while it ran.
        """
        if self._switch is None:
            return
        if gathered.use is Use.AFTER:
            if gathered.drafted:
                self._switch.observe_after(load, seconds, gathered.row_cost, answered=gathered.answered)
        elif not behind_tree and not gathered.has_trees:
            # Feeding a head takes time too.
            fed = self._drafting.active and self._drafting.reads_features
            self._switch.observe_plain(load, seconds, fed=fed, ahead=self._ahead)

    def gather(self, schedule: Schedule) -> Gathered:
        """Wait for the draft, if that was chosen, then cut every tree to the rows that pay."""
        taking = [chunk.sequence for chunk in schedule.chunks if chunk.takes_tree]
        drafted: list[Sequence] = []
        if self._use is Use.AFTER and self._drafting.active:
            drafted = [sequence for sequence in taking if self._drafting.is_followed(sequence)]
        max_wait = float("inf") if self._switch is None else self._switch.max_wait(len(self._scheduler.running))
        wait_ns = self._drafting.wait_for(drafted, max_wait)
        offers: dict[int, Offer] = {}
        fallbacks = 0
        for sequence in drafted:
            tree = self._drafting.tree_of(sequence)
            sequence.totals.draft_wait_ns += wait_ns
            if tree is None or not tree.answered:
                sequence.totals.fallback_steps += 1
                fallbacks += 1
            self._offer(sequence, tree, offers)
        if not self._device_chooses(taking):
            for sequence in taking:
                self._offer_prediction(sequence, offers)
        trees = self._cut(schedule, offers)
        chosen = [self._tree(chunk, trees) for chunk in schedule.chunks]
        return Gathered(chosen, tuple(drafted), wait_ns, fallbacks, self._use, self._budget.step_cost)

    def _offer(self, sequence: Sequence, tree: GrowingTree | None, offers: dict[int, Offer]) -> None:
        if tree is not None and tree.nodes:
            live, in_order = self._live[sequence.sequence_id], sequence.request.mode is VerificationMode.REJECTION
            offers[sequence.sequence_id] = Offer(
                tree, live.record, self._max_nodes(sequence), in_order, self._chains and not in_order
            )

    def _offer_prediction(self, sequence: Sequence, offers: dict[int, Offer]) -> None:
        """Merge the prediction into the drafted tree. In rejection sampling it replaces it, since sampled siblings do
        not mix with predicted ones."""
        live = self._live[sequence.sequence_id]
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
        tree = MergedTree(sequence.root, grown, chains)
        offers[sequence.sequence_id] = Offer(
            tree, live.record, most, chain=self._chains and not rejection, predicted_record=live.predicted_record
        )

    def _cut(self, schedule: Schedule, offers: Mapping[int, Offer]) -> dict[int, TokenTree]:
        spare = self._scheduler.max_step_rows - schedule.rows
        others = sum(chunk.takes_tree for chunk in schedule.chunks) - len(offers)
        cut = self._budget.cut(list(offers.values()), schedule.rows, spare, others)
        return dict(zip(offers, cut, strict=True))

    def learn(self, live: LiveSequence, tree: TokenTree, outcome: Verified, row_cost: float) -> None:
        """Learn from the tree of a step whose rows cost `row_cost` plain steps, before it is committed. A client's own
        trees are not learnt from."""
        if live.sequence.request.external:
            return
        accepted_rows = outcome.walk.accepted_rows
        self._budget.observe(tree, accepted_rows, live.record, row_cost)
        if isinstance(tree, PredictedTree) and tree.predicted_rows and live.prediction is not None:
            # Its rows and tokens are not the draft's.
            self._budget.observe_predicted(tree, accepted_rows, live.predicted_record)
            live.prediction.observe(tree.accepted_predicted(accepted_rows))
            return
        self._budget.observe_drafted(live.record, 1 + outcome.accepted, row_cost)

    def plain(self, schedule: Schedule) -> Gathered:
        """A step of roots alone."""
        return Gathered([self._tree(chunk, {}) for chunk in schedule.chunks], (), 0, 0, Use.PLAIN)

    def _max_nodes(self, sequence: Sequence) -> int:
        """Drafted rows that the sequence may have: none past its last token or its pages."""
        if sequence.remaining <= 1:
            return 0
        limit = min(sequence.request.max_draft_nodes, self._max_draft_nodes)
        return max(0, min(limit, self._scheduler.pages.spare_rows(sequence)))

    def _tree(self, chunk: Chunk, trees: Mapping[int, TokenTree]) -> TokenTree | None:
        """The tree to verify behind a chunk, with pages held for it. None while the root is not reached."""
        sequence = chunk.sequence
        if not sequence.totals.started_ns:
            sequence.totals.started_ns = time.monotonic_ns()
        if not chunk.reaches_root:
            return None
        tree = sequence.external_tree or trees.get(sequence.sequence_id)
        if tree is not None and chunk.takes_tree:
            rows = len(tree)
            if sequence.request.mode is VerificationMode.REJECTION:
                # Whether there is room must not depend on how many nodes were sampled.
                rows = max(rows, 1 + IN_ORDER_NODES)
            try:
                self._scheduler.pages.reserve(sequence, sequence.kv_length + rows)
                return tree
            except OutOfPages:
                # Others took the free pages; the sequence goes on without its draft.
                pass
        return _ROOT_ALONE
