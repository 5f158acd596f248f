"""One engine step, as a sentence: schedule, gather proposals, plan, forward, verify, commit, advance, emit.

Plain decoding is the same step with one-row trees. Lockstep drafting waits a bounded moment for the draft; a draft
that runs ahead of verification needs the same step with a smaller wait. Single-threaded: `engine.py` owns the thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from target_service.batch import StepBatch, lay_out
from target_service.commit import LiveSequence, commit, kv_moves
from target_service.drafting import Drafting, DraftingConfig
from target_service.kv_cache import OutOfPages
from target_service.model.runner import ModelRunner
from target_service.observation import EngineObserver, Gathered, StepPhases, step_stats
from target_service.row_budget import IN_ORDER_NODES, Offer, RowBudget, SequenceRecord, StepCost
from target_service.scheduler import Chunk, Schedule, Scheduler, SchedulerConfig
from target_service.sequence import (
    Sequence,
    SequenceEvent,
    SequenceFinished,
    SequenceRequest,
    SequenceTotals,
    StepStats,
    Verdict,
)
from target_service.stopping import StopChecker
from target_service.verifier import SequenceVerifier, Verified
from tree_kernels.kv_move import move_kv


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of the engine; the defaults live in `TargetConfig`."""

    scheduler: SchedulerConfig
    drafting: DraftingConfig
    max_waiting: int
    max_draft_nodes: int


class EngineLoop:
    """Every sequence under way, and the step that moves them on."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        step_cost: StepCost | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        """`step_cost` of None verifies every drafted row that is allowed."""
        self._runner = runner
        self._config = config
        self._observer = observer
        self._budget = RowBudget(step_cost)
        self.drafting = Drafting(config.drafting, runner.vocabulary_size)
        self.scheduler = Scheduler(config.scheduler, runner.cache)
        self.live: dict[int, LiveSequence] = {}

    def make(self, sequence_id: int, request: SequenceRequest) -> LiveSequence:
        """A sequence that has not begun. Touches nothing shared."""
        runner = self._runner
        return LiveSequence(
            Sequence(
                sequence_id,
                request,
                list(request.token_ids),
                SequenceTotals(prompt_tokens=len(request.token_ids)),
            ),
            SequenceVerifier(request, runner.end_token_ids, runner.vocabulary_size),
            StopChecker(request.sampling, runner.end_token_ids, request.max_tokens, runner.tokenizer),
            SequenceRecord(),
        )

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

    def step(self) -> list[SequenceEvent] | None:
        """Move every scheduled sequence on. The events of the step, or None when there was nothing to run."""
        phases = StepPhases()
        schedule = self.scheduler.schedule()
        if not schedule.chunks:
            return None
        gathered = self._gather(schedule)
        batch = lay_out(schedule.chunks, gathered.trees, self._runner.cache)
        phases.end()
        logits = self._runner.forward(batch.input)
        phases.end()
        verified = self._verify(batch, logits)
        phases.end()
        verdicts = self._commit(batch, verified, phases.total)
        self._advance(verdicts)
        events = self._finish(verdicts)
        phases.end()
        self._observe(step_stats(batch, gathered, verdicts, phases))
        return events

    def _observe(self, stats: StepStats) -> None:
        """Let the row budget learn what rows cost, and the observer hear of the step."""
        if not stats.prefill_rows:
            self._budget.observe_step(stats.decode_rows, stats.forward_ns * 1e-9)
        if self._observer is not None:
            self._observer.on_step(stats)

    def _gather(self, schedule: Schedule) -> Gathered:
        """Wait for the draft as long as it pays, then cut every tree to the rows that pay."""
        self._follow_load()
        drafted = [chunk.sequence for chunk in schedule.chunks if self._may_draft(chunk)]
        wait_ns = self.drafting.wait_for(drafted)
        offers: dict[int, Offer] = {}
        fallbacks = 0
        for sequence in drafted:
            tree = self.drafting.tree_of(sequence)
            sequence.totals.draft_wait_ns += wait_ns
            if tree is None or not tree.answered:
                fallbacks += 1
                sequence.totals.fallback_steps += 1
            if tree is not None and tree.nodes:
                live = self.live[sequence.sequence_id]
                in_order = sequence.request.mode is VerificationMode.REJECTION
                offers[sequence.sequence_id] = Offer(tree, live.record, self._max_nodes(sequence), in_order)
        spare = self._config.scheduler.max_step_rows - schedule.rows
        others = sum(chunk.takes_tree for chunk in schedule.chunks) - len(offers)
        cut = self._budget.cut(list(offers.values()), schedule.rows, spare, others)
        trees = dict(zip(offers, cut, strict=True))
        return Gathered([self._tree(chunk, trees) for chunk in schedule.chunks], wait_ns, fallbacks)

    def _follow_load(self) -> None:
        was = self.drafting.active
        self.drafting.follow_load(len(self.scheduler.running))
        if self._observer is not None and self.drafting.active != was:
            self._observer.on_speculation(self.drafting.active)

    def _may_draft(self, chunk: Chunk) -> bool:
        return chunk.takes_tree and self.drafting.wants(chunk.sequence)

    def _max_nodes(self, sequence: Sequence) -> int:
        """Drafted rows the sequence may have: none past its last token, nor past its pages."""
        if sequence.request.max_tokens - sequence.totals.completion_tokens <= 1:
            return 0
        limit = min(sequence.request.max_draft_nodes, self._config.max_draft_nodes)
        return max(0, min(limit, self.scheduler.spare_rows(sequence)))

    def _tree(self, chunk: Chunk, trees: dict[int, TokenTree]) -> TokenTree | None:
        """The tree to verify behind a chunk, with pages held for it. None while the root is not reached."""
        sequence = chunk.sequence
        sequence.totals.started_ns = sequence.totals.started_ns or time.monotonic_ns()
        if not chunk.reaches_root:
            return None
        tree = sequence.external_tree or trees.get(sequence.sequence_id)
        if tree is not None and chunk.takes_tree:
            rows = len(tree)
            if sequence.request.mode is VerificationMode.REJECTION:
                # Whether there is room must not hang on how many nodes were drawn.
                rows = max(rows, 1 + IN_ORDER_NODES)
            try:
                self.scheduler.reserve(sequence, sequence.kv_length + rows)
                return tree
            except OutOfPages:
                # Others took the free pages; the sequence goes on without its draft.
                pass
        return TokenTree.root_only(sequence.root)

    def _verify(self, batch: StepBatch, logits: Tensor) -> list[Verified | None]:
        """What the target says of each tree. None for prompts that are still being read."""
        verifiers = [self.live[item.sequence.sequence_id].verifier for item in batch.items]
        argmax: list[int] | None = None
        # On a CPU the walk asks for the few rows it comes to, which costs less than all of them at once.
        if logits.is_cuda and any(verifier.plain_greedy for verifier in verifiers):
            argmax = torch.argmax(logits, dim=-1).tolist()
        verified: list[Verified | None] = []
        for item, verifier in zip(batch.items, verifiers, strict=True):
            if item.tree is None:
                verified.append(None)
                continue
            rows = slice(item.first_logit, item.first_logit + len(item.tree))
            sequence = item.sequence
            verified.append(
                verifier.verify(
                    item.tree, logits[rows], argmax[rows] if argmax else None, sequence.output, sequence.step
                )
            )
        return verified

    def _commit(self, batch: StepBatch, verified: SequenceOf[Verified | None], compute_ns: int) -> list[Verdict]:
        """Move accepted keys and values into place, then append what was said."""
        cache = self._runner.cache
        sources, targets = kv_moves(batch.items, verified, cache)
        if sources:
            move_kv([*cache.keys, *cache.values], sources, targets)
        verdicts: list[Verdict] = []
        for item, outcome in zip(batch.items, verified, strict=True):
            if item.tree is None or outcome is None:
                item.sequence.kv_length += item.known
                continue
            live = self.live[item.sequence.sequence_id]
            self._budget.observe(item.tree, outcome.walk.accepted_rows, live.record)
            verdicts.append(commit(live, item, item.tree, outcome, compute_ns))
            self.scheduler.trim(item.sequence)
        return verdicts

    def _advance(self, verdicts: SequenceOf[Verdict]) -> None:
        """Tell the draft what was committed, so that it works while the events go out."""
        going_on = [verdict for verdict in verdicts if verdict.finish is None]
        self.drafting.advance(
            [(self.live[verdict.sequence_id].sequence, len(verdict.token_ids)) for verdict in going_on]
        )

    def _finish(self, verdicts: SequenceOf[Verdict]) -> list[SequenceEvent]:
        """The events of the step; sequences that ended are freed."""
        events: list[SequenceEvent] = []
        for verdict in verdicts:
            events.append(verdict)
            if verdict.finish is not None:
                live = self.end(verdict.sequence_id, verdict.finish.reason.value)
                assert live is not None
                events.append(SequenceFinished(verdict.sequence_id, verdict.finish, live.sequence.totals))
        return events
