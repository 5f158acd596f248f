"""The draft's part of a step: whether to wait for it, how many of its rows to verify, and pages for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from target_service.batch import StepBatch
from target_service.commit import LiveSequence
from target_service.draft_switch import DraftSwitch
from target_service.draft_times import Promise, Use
from target_service.drafting import FOLLOWED_ANYWAY, Drafting
from target_service.gathered import Gathered
from target_service.kv_cache import OutOfPages
from target_service.lookup_budget import LookupBudget
from target_service.proposals import GrowingTree
from target_service.row_budget import IN_ORDER_NODES, Offer, RowBudget
from target_service.scheduler import Chunk, Schedule, Scheduler
from target_service.sequence import Sequence
from target_service.verifier import Verified

# Sequences whose trees are looked at in every step, whether drafts paid lately or not.
_IN_HAND = 1
# Sequences beyond which the host has too much to do with drafts for steps that follow each other.
_AHEAD = 16
# Plain steps' time that it takes to tell a draft of a sequence, and to give a head the features that it needs by then.
_TELLING, _TELLING_HEADS = 0.5, 12.0
# Of every plain step: what is fed as the root is the sequence's own token, whichever this says.
_ROOT_ALONE = TokenTree.root_only(0)
# Plain steps that a draft follows along, after a drafted one and before the next. A head works more for that than it
# loses by beginning anew, and the target works for it; so does any draft of many sequences.
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
        lookup_budget: LookupBudget,
    ) -> None:
        """`live` stays the engine's own table. `chains` keeps to one path of each tree, but for rejection sampling. A
        `switch` of None always waits for drafts."""
        self._drafting = drafting
        self._scheduler = scheduler
        self._budget = budget
        self._live = live
        self._max_draft_nodes = max_draft_nodes
        self._chains = chains
        self._switch = switch
        self._lookup_budget = lookup_budget
        # How the next step uses drafts.
        self._use = Use.AFTER
        self._promise = Promise(0.0, 0.0)
        # Whether the last step chosen for could be launched behind the one under way.
        self._goes_ahead = False
        # What the last step took, if it was launched ahead with drafts, else 0.
        self._drafted_seconds = 0.0

    @property
    def looks_up(self) -> bool:
        """Whether the device may draft by itself. Not while a head reads the states of every pass."""
        return self._lookup_budget.on and not (self._drafting.active and self._drafting.reads_features)

    @property
    def drafts_are_near(self) -> bool:
        """Whether drafts are in use, or were lately, or may be soon."""
        if self._switch is None:
            return True
        load, heads = self._scheduler.load, self._drafting.reads_features
        if load and heads and self._switch.to_be_unfed(load, ahead=self._goes_ahead):
            return False
        followed = _FOLLOWED_BY_HEADS if heads else _FOLLOWED
        return self._switch.drafts_are_near(_FOLLOWED_BY_MANY if load > FOLLOWED_ANYWAY else followed)

    def follow_load(self) -> bool:
        """Hear what the draft has said, and draft or not as the load allows. Whether that changed."""
        was = self._drafting.active
        self._drafting.listen()
        self._drafting.follow_load(self._scheduler.load, self.drafts_are_near)
        return self._drafting.active != was

    def choose(self, running: SequenceOf[Sequence], *, ahead: bool) -> Use:
        """How the next step uses drafts; `ahead`, it may be launched behind the one under way. Called once per step,
        before it is scheduled."""
        self._use = Use.PLAIN
        # Where a step that the device drafts for will end nobody can guess.
        ahead = ahead and not self.looks_up
        if not self._drafting.connected or self._drafting.config.too_many(len(running)):
            return self._use
        wanting = [sequence for sequence in running if self._drafting.asks(sequence)]
        if not wanting:
            return self._use
        if self._switch is None:
            use = Use.AHEAD if ahead else Use.AFTER
        else:
            records = [self._live[sequence.sequence_id].record for sequence in wanting]
            after, both = sum(map(self._budget.promise, records)), sum(map(self._budget.promise_ahead, records))
            others = len(running) - len(wanting)
            # Against what plain steps make: more than a token each where the device drafts for them.
            each = self._lookup_budget.tokens_each
            self._promise = promise = Promise(after / each + others, both / each + 2 * others)
            self._goes_ahead = ahead = ahead and len(running) <= _AHEAD
            if self._drafting.active and self._drafting.pace.beginning:
                # Followed meanwhile: what it makes is not to be judged by how it begins.
                return self._use
            # A head answers too late for a guess: its tree takes about as long as a pass.
            load, guesses = len(running), not self._drafting.reads_features
            if ahead and self._in_hand(load):
                use = self._switch.choose_in_hand(load, promise)
            elif self._reads_prompts(running):
                # Its time says nothing of drafts.
                use = self._switch.best(load, promise, ahead=ahead and guesses)
            else:
                telling = self._telling(load)
                use = self._switch.choose(load, promise, ahead=ahead, guesses=guesses, telling=telling)
        if self._drafting.active:
            self._use = use
        return self._use

    def _in_hand(self, load: int) -> bool:
        """Whether drafts are looked at one by one. A head works too much for that."""
        return load <= _IN_HAND and not self._drafting.reads_features

    def _telling(self, load: int) -> float:
        """Plain steps that it takes to tell the draft of sequences that it does not follow."""
        if self._drafting.reads_features:
            return _TELLING * load + _TELLING_HEADS
        return _TELLING * load if load > FOLLOWED_ANYWAY else 0.0

    def _reads_prompts(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the next step has rows of prompts."""
        reading = (sequence.kv_length + 1 < len(sequence.token_ids) for sequence in running)
        return self._scheduler.admits or any(reading)

    def observe(
        self, load: int, seconds: float, launching: float, gathered: Gathered, *, drafted: bool, behind_tree: bool
    ) -> None:
        """Take note of what a step that only decoded took, from the end of the step before it, and its launch.

        `drafted`, it has trees; `behind_tree`, the step before it had, and this one was launched while that ran.
        """
        if self._switch is None:
            return
        self._switch.observe_launching(launching)
        if gathered.use is Use.AFTER and gathered.drafted:
            self._switch.observe_after(load, seconds, gathered.row_cost, answered=gathered.answered)
        elif gathered.use is Use.PLAIN and not behind_tree:
            # Feeding a head takes time that no plain step needs.
            fed = self._drafting.active and self._drafting.reads_features
            self._switch.observe_plain(load, seconds, fed=fed, ahead=self._goes_ahead)
        elif gathered.use is Use.AHEAD and not drafted:
            self._switch.observe_missed(load)
        if behind_tree and self._drafted_seconds:
            self._switch.observe_ahead(load, self._drafted_seconds + seconds)
        self._drafted_seconds = seconds if gathered.use is Use.AHEAD else 0.0

    def forget_pair(self) -> None:
        """A step that reads prompts came between those that are timed together."""
        self._drafted_seconds = 0.0

    def gather(self, schedule: Schedule) -> Gathered:
        """Wait for the draft, if that was chosen, then cut every tree to the rows that pay."""
        drafted = self._drafted(schedule) if self._use is not Use.PLAIN else []
        patience = float("inf") if self._switch is None else self._switch.patience(len(self._scheduler.running))
        return self._gather(schedule, drafted, self._drafting.wait_for(drafted, patience))

    def gather_ahead(self, schedule: Schedule, passes: int, running_ns: int) -> Gathered:
        """Drafts past a guess of what the step under way will say, which has so many passes and has been running for so
        long; none where a plain step will make more. Texts repeat themselves seldom, and then at length."""
        drafted, load = self._drafted(schedule), len(self._scheduler.running)
        if self._switch is None:
            return self._gather(schedule, drafted, self._drafting.wait_for(drafted, late=False))
        left = passes * self._switch.plain_seconds(load) - running_ns * 1e-9
        patience = self._switch.patience_ahead(load, self._promise, left, self._drafting.pace.answers_in)
        wait_ns = self._drafting.wait_for(drafted, patience, late=False)
        least = load * self._switch.premium(load) if self._in_hand(load) else 0.0
        return self._gather(schedule, drafted, wait_ns, least)

    def _gather(self, schedule: Schedule, drafted: list[Sequence], wait_ns: int, least: float = 0.0) -> Gathered:
        """Trees cut to the rows that pay; plain ones where those promise fewer than `least` drafted tokens."""
        offers: dict[int, Offer] = {}
        unanswered: list[Sequence] = []
        for sequence in drafted:
            tree = self._drafting.tree_of(sequence)
            sequence.totals.draft_wait_ns += wait_ns
            if tree is None or not tree.answered:
                unanswered.append(sequence)
            self._offer(sequence, tree, offers)
        trees = self._cut(schedule, offers)
        if self._budget.promised < least:
            return self.plain(schedule, wait_ns)
        for sequence in unanswered:
            sequence.totals.fallback_steps += 1
        fallbacks = len(unanswered)
        if self._use is Use.AHEAD and fallbacks == len(drafted):
            # A plain pass more, while the draft goes on.
            drafted = []
        chosen = [self._tree(chunk, trees) for chunk in schedule.chunks]
        return Gathered(chosen, tuple(drafted), wait_ns, fallbacks, self._use, self._budget.step_cost)

    def _drafted(self, schedule: Schedule) -> list[Sequence]:
        chunks = (chunk for chunk in schedule.chunks if chunk.takes_tree)
        return [chunk.sequence for chunk in chunks if self._drafting.wants(chunk.sequence)]

    def _offer(self, sequence: Sequence, tree: GrowingTree | None, offers: dict[int, Offer]) -> None:
        if tree is not None and sequence.awaited_tokens:
            tree = tree.guess(sequence.awaited_tokens)
        if tree is not None and tree.nodes:
            live, in_order = self._live[sequence.sequence_id], sequence.request.mode is VerificationMode.REJECTION
            offers[sequence.sequence_id] = Offer(
                tree, live.record, self._max_nodes(sequence), in_order, self._chains and not in_order
            )

    def _cut(self, schedule: Schedule, offers: Mapping[int, Offer]) -> dict[int, TokenTree]:
        spare = self._scheduler.max_step_rows - schedule.rows
        others = sum(chunk.takes_tree for chunk in schedule.chunks) - len(offers)
        cut = self._budget.cut(list(offers.values()), schedule.rows, spare, others)
        return dict(zip(offers, cut, strict=True))

    def learn(self, live: LiveSequence, tree: TokenTree, outcome: Verified, row_cost: float) -> None:
        """Learn what a draft was worth in a step whose rows took so many plain ones, before it is committed. A client's
        own trees say nothing of it."""
        if live.sequence.request.external:
            return
        guessed, right = tree.scores[0] < 1.0, not tree.drafted or tree.token_ids[0] == live.sequence.root
        if guessed:
            self._budget.observe_guess(tree, right)
        if right:
            self._budget.observe(tree, outcome.walk.accepted_rows, live.record, row_cost)
        # From the token on that was guessed.
        self._budget.observe_drafted(live.record, 1 + guessed + outcome.accepted if right else 1, row_cost)

    def holding(self, ahead: StepBatch) -> set[int]:
        """Sequences whose draft hears of a plain pass together with the step `ahead` behind it: its answer would come
        too late for that, or one is on its way that will do."""
        if self._use is not Use.AHEAD:
            return set()
        return {
            item.sequence.sequence_id
            for item in ahead.items
            if (item.tree is not None and item.tree.drafted) or self._drafting.waits_for(item.sequence.sequence_id)
        }

    def plain(self, schedule: Schedule, wait_ns: int = 0) -> Gathered:
        """No drafts, though they may have been waited for."""
        return Gathered([self._tree(chunk, {}) for chunk in schedule.chunks], (), wait_ns, 0, Use.PLAIN)

    def _max_nodes(self, sequence: Sequence) -> int:
        """Drafted rows the sequence may have: none past its last token, nor past its pages."""
        if sequence.request.max_tokens - sequence.totals.completion_tokens - sequence.awaited_tokens <= 1:
            return 0
        limit = min(sequence.request.max_draft_nodes, self._max_draft_nodes)
        return max(0, min(limit, self._scheduler.spare_rows(sequence)))

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
                # Whether there is room must not hang on how many nodes were drawn.
                rows = max(rows, 1 + IN_ORDER_NODES)
            try:
                self._scheduler.reserve(sequence, sequence.kv_length + rows)
                return tree
            except OutOfPages:
                # Others took the free pages; the sequence goes on without its draft.
                pass
        return _ROOT_ALONE
