"""The draft's part of a step: whether to wait for it, how many of its rows to verify, and pages for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from target_service.commit import LiveSequence
from target_service.draft_switch import DraftSwitch
from target_service.drafting import Drafting
from target_service.kv_cache import OutOfPages
from target_service.row_budget import IN_ORDER_NODES, Offer, RowBudget
from target_service.scheduler import Chunk, Schedule, Scheduler
from target_service.sequence import Sequence

# Of every plain step: what is fed as the root is the sequence's own token, whichever this says.
_ROOT_ALONE = TokenTree.root_only(0)
# Plain steps that a draft follows along, after a drafted one and before the next. A head works more for that than it
# loses by beginning anew, and the target works for it.
_FOLLOWED, _FOLLOWED_BY_HEADS = 32, 8


@dataclass(frozen=True, slots=True)
class Gathered:
    """A tree per chunk, and what waiting for drafts cost."""

    trees: list[TokenTree | None]
    # Sequences that the step waited for.
    drafted: tuple[Sequence, ...]
    wait_ns: int
    # Sequences that wanted a draft and went on without one.
    fallbacks: int


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
        # Whether the next step is to wait for drafts.
        self._drafts = True

    @property
    def drafts_are_near(self) -> bool:
        """Whether drafts are in use, or were lately, or may be soon."""
        followed = _FOLLOWED_BY_HEADS if self._drafting.reads_features else _FOLLOWED
        return self._switch is None or self._switch.drafts_are_near(followed)

    def choose(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the next step waits for drafts. Called once per step, before it is scheduled."""
        wanting = [sequence for sequence in running if self._drafting.asks(sequence)]
        pays = bool(wanting) and self._drafting.connected
        if pays and self._switch is not None:
            gains = sum(self._budget.promise(self._live[sequence.sequence_id].record) for sequence in wanting)
            # The time of a step that reads prompts says nothing of drafts.
            ask = self._switch.pays if self._reads_prompts(running) else self._switch.drafts
            pays = ask(len(running), gains + len(running) - len(wanting))
        self._drafts = pays and self._drafting.active
        return self._drafts

    def _reads_prompts(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the next step has rows of prompts."""
        reading = (sequence.kv_length + 1 < len(sequence.token_ids) for sequence in running)
        return self._scheduler.admits or any(reading)

    def observe(self, load: int, seconds: float, *, drafted: bool) -> None:
        """Take note of what a step that only decoded took, from the end of the step before it."""
        if self._switch is None:
            return
        if drafted:
            self._switch.observe_drafted(load, seconds, self._budget.step_cost)
        else:
            self._switch.observe_plain(load, seconds)

    def gather(self, schedule: Schedule) -> Gathered:
        """Wait for the draft, if that was chosen, then cut every tree to the rows that pay."""
        chunks = [chunk for chunk in schedule.chunks if chunk.takes_tree] if self._drafts else []
        drafted = [chunk.sequence for chunk in chunks if self._drafting.wants(chunk.sequence)]
        patience = float("inf") if self._switch is None else self._switch.patience(len(self._scheduler.running))
        wait_ns = self._drafting.wait_for(drafted, patience)
        offers: dict[int, Offer] = {}
        fallbacks = 0
        for sequence in drafted:
            tree = self._drafting.tree_of(sequence)
            sequence.totals.draft_wait_ns += wait_ns
            if tree is None or not tree.answered:
                fallbacks += 1
                sequence.totals.fallback_steps += 1
            if tree is not None and tree.nodes:
                live = self._live[sequence.sequence_id]
                in_order = sequence.request.mode is VerificationMode.REJECTION
                offers[sequence.sequence_id] = Offer(
                    tree, live.record, self._max_nodes(sequence), in_order, self._chains and not in_order
                )
        spare = self._scheduler.max_step_rows - schedule.rows
        others = sum(chunk.takes_tree for chunk in schedule.chunks) - len(offers)
        cut = self._budget.cut(list(offers.values()), schedule.rows, spare, others)
        trees = dict(zip(offers, cut, strict=True))
        return Gathered([self._tree(chunk, trees) for chunk in schedule.chunks], tuple(drafted), wait_ns, fallbacks)

    def plain(self, schedule: Schedule) -> Gathered:
        """No drafts."""
        return Gathered([self._tree(chunk, {}) for chunk in schedule.chunks], (), 0, 0)

    def _max_nodes(self, sequence: Sequence) -> int:
        """Drafted rows the sequence may have: none past its last token, nor past its pages."""
        if sequence.request.max_tokens - sequence.totals.completion_tokens <= 1:
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
