"""The engine's side of its draft: trees by sequence, bounded waiting, and when not to draft at all."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from outrider.drafting.draft_tree import GrowingTree
from outrider.drafting.events import Connected, Disconnected, Lost, Opened, SequenceFailure
from outrider.drafting.inbox import DraftInbox, QueuedEvent
from outrider.drafting.latency import DraftLatency
from outrider.errors import InvalidField, NotSupported, OutriderError
from outrider.log_limit import LogLimit
from outrider.sampling import VerificationMode
from outrider.wire.frames import (
    MAX_SEQUENCES_PER_FRAME,
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceGrowth,
    TreeLimits,
)
from target_service.config import TargetConfig
from target_service.core.sequence import Sequence
from target_service.core.weights import FIRST_VERSION
from target_service.execution.batch import StepItem
from target_service.execution.node_tables import NodeTables
from target_service.sampling.verifier import Verified
from target_service.speculation.hidden_states.encoding import StepFeatures
from target_service.speculation.hidden_states.sending import Features

log = logging.getLogger(__name__)
# Sequences that a draft follows while its drafts are not used.
DRAFTED_ANYWAY = 1


class DraftTrees(DraftInbox):
    """Holds the growing tree of every drafted sequence. A late, dead or wrong draft costs speed and nothing else.
    Everything but the inbox belongs to the engine's thread."""

    def __init__(
        self, config: TargetConfig, vocabulary_size: int, features: Features, tables: NodeTables | None = None
    ) -> None:
        """Drafts are also written to `tables`, where the device chooses rows."""
        super().__init__()
        self._tables = tables
        self.config = config
        self._vocabulary_size = vocabulary_size
        self._features = features
        self._trees: dict[int, GrowingTree] = {}
        # A draft can send a malformed growth for every sequence.
        self._refusals = LogLimit()
        # Sequences that were opened on this stream so far.
        self._opened: set[int] = set()
        # Sequences that may be drafted for, and those of them that the draft has to be sent.
        self._eligible: dict[int, Sequence] = {}
        self._unopened: list[Sequence] = []
        self.latency = DraftLatency(config.draft_failures_to_open)
        self.info: DraftInfo | None = None
        # Whether the target's own passes draft; see `draft_in_passes`.
        self.in_pass = False
        # Why there is no draft; empty while one is connected, and before the first.
        self.lost = ""
        self._enabled = self.active = config.speculates
        # Whether drafting stopped because drafts did not pay, and not because of load.
        self._dropped = False
        # Whether the next step waits for no draft, and what the draft has not been sent since.
        self.rests = False
        self._unsent: list[SequenceAdvance] = []
        self.model_version = FIRST_VERSION

    def draft_in_passes(self, info: DraftInfo) -> None:
        """Have no draft to connect to: this one runs behind the target's own passes, and is asked for nothing."""
        self.info, self.in_pass = info, True

    @property
    def connected(self) -> bool:
        return self.info is not None

    @property
    def has_open_sequences(self) -> bool:
        """Whether any sequence is open at a connected draft."""
        return self.active and self.connected and bool(self._eligible if self.in_pass else self._trees)

    @property
    def awaits_growth(self) -> bool:
        """Whether a draft may send more while a pass runs."""
        return self.has_open_sequences and not self.in_pass

    def tree_of(self, sequence: Sequence) -> GrowingTree | None:
        """The sequence's growing tree; None when it is not drafted for."""
        tree = self._trees.get(sequence.sequence_id)
        if tree is None:
            return None
        try:
            tree.settle()
        except InvalidField as error:
            self._refuse(sequence.sequence_id, error)
            return None
        return tree

    def is_open(self, sequence: Sequence) -> bool:
        if self.in_pass:
            return self.active and sequence.request.device_rows and self.is_eligible(sequence)
        return self.connected and sequence.sequence_id in self._trees

    def is_eligible(self, sequence: Sequence) -> bool:
        """Whether the sequence may be drafted for when the load allows it."""
        return sequence.sequence_id in self._eligible

    def add(self, sequence: Sequence) -> None:
        """Register a new sequence; the draft gets it with `open_added`, once the load includes it."""
        if self._enabled and sequence.request.speculate and not sequence.request.external:
            self._eligible[sequence.sequence_id] = sequence
            if self.in_pass and self._tables is not None:
                self._tables.assign_slot(sequence.sequence_id)
            self._unopened.append(sequence)

    def remove(self, sequence_id: int) -> None:
        self._eligible.pop(sequence_id, None)
        self._opened.discard(sequence_id)
        self._features.forget(sequence_id)
        if self._tables is not None:
            self._tables.free_slot(sequence_id)
        if sequence_id in self._trees:
            # A trie learns the text up to here.
            self._close([sequence_id])
            del self._trees[sequence_id]

    @property
    def reads_features(self) -> bool:
        """Whether the draft reads the hidden states of every pass."""
        return self._features.reads_every_pass

    def update_load(self, running: int, useful: bool = True) -> None:
        """Stop drafting above the configured load, and resume well below it.

        While drafts are not `useful`, drafting stops for more than one sequence as well, since each frame takes time;
        a draft that reads features stops at any load, and is not used at a high one."""
        if not self._enabled:
            return
        useful = useful or (self._tables is None and running <= DRAFTED_ANYWAY and not self.reads_features)
        if self._tables is not None and self.reads_features:
            # Sequences up to which a draft that reads hidden states is used where steps run ahead, and at most how many
            # when it is used again. The host works for every token and every state that it is sent, with 64 sequences
            # 11 ms for a pass beside prompts in place of 5, as long as the pass: whole answers came at 0.79 to 0.90 of
            # lookup's rate with 64, at 0.75 and 0.92 with 128, and at 0.76 and 0.88 with 256 (H200s,
            # `benchmarks/results/2026-11-28-h200-whole-answers.md`).
            useful = useful and running <= (32 if self.active else 24)
        if self.active and (self.too_many(running) or not useful):
            self.active, self._dropped = False, not useful
            self._close_all()
        elif not self.active and useful and self._may_resume(running):
            self.active = True
            # A head drafts badly without the states of earlier tokens, which would make it look worse than it is.
            only_new = self._dropped and self.reads_features
            self._unopened = [one for one in self._eligible.values() if not (only_new and one.step)]

    def _may_resume(self, running: int) -> bool:
        """Whether the load allows drafting: well below the limit, or just below it if load was not why it stopped."""
        return running <= self.config.drafting_resumes_at or (self._dropped and not self.too_many(running))

    def too_many(self, running: int) -> bool:
        return running > self.config.speculative_disable_queue_size

    def reopen_all(self, model_version: int) -> None:
        """Open every sequence at the draft again: drafts and kept hidden states are those of other weights."""
        self.model_version = model_version
        self._close_all()
        self._features.forget_all()
        self._unopened = list(self._eligible.values())

    def open_added(self) -> None:
        """Open the sequences at the draft that are not open there yet. A draft in this process reads them here."""
        for sequence in self._unopened:
            if self.is_eligible(sequence) and sequence.sequence_id not in self._trees:
                self._open(sequence)
        self._unopened = []

    def listen_to_openings(self) -> None:
        """Read what has arrived if it is unknown yet which hidden states the draft needs, so that those of a step that
        is about to be committed can go with it."""
        if self._features.holds_vectors:
            self.listen()

    def wait_for(self, sequences: SequenceOf[Sequence], max_wait: float = float("inf")) -> int:
        """Wait until the draft has answered the last commit of each sequence, for at most `max_wait` seconds and the
        configured time. Returns the nanoseconds waited."""
        if sequences:
            self._send_unsent()
        self.listen()
        if not self.latency.waiting_pays or self._answered(sequences):
            return 0
        begin = time.monotonic_ns()
        deadline = time.monotonic() + min(self.config.draft_wait_ms / 1e3, max_wait)
        while not self._answered(sequences):
            # Other frames of the draft do not count as the answer.
            if time.monotonic() >= deadline or not self.wait_until(deadline):
                self.latency.late()
                break
            self.listen()
        else:
            self.latency.in_time()
        return time.monotonic_ns() - begin

    def collect(
        self, items: SequenceOf[StepItem], states: StepFeatures | None, outcomes: SequenceOf[Verified | None]
    ) -> None:
        """Take in the hidden states of a step that was committed, before `send_commits` sends it."""
        self._features.collect(items, states, outcomes, self._eligible)

    def send_commits(self, commits: SequenceOf[tuple[Sequence, int]]) -> None:
        """Re-root a step's trees, given (sequence, tokens committed), and send the commits in one frame.

        Where the host cuts trees and the next step waits for none, a draft that reads no hidden states is sent them
        later, in order: it grows one tree for all of them, and takes no time meanwhile, which on a CPU is the target's.
        One that may be preparing is sent them at once, as nothing else shows that it is ready."""
        if not self._trees and not self.reads_features:
            return
        ahead, along = self._features.due(self._trees, commits)
        if ahead and self._link is not None and self.connected:
            # The draft has the tokens that these belong to.
            self._link.send_features(ahead)
        advances = self._unsent
        for sequence, committed in commits:
            sequence_id = sequence.sequence_id
            tree = self._trees.get(sequence_id)
            if tree is None:
                continue
            tokens, features = tuple(sequence.token_ids[-committed:]), along.get(sequence_id)
            # Passes that were launched at once are one step each, with at least one token.
            while sequence.step > tree.step + 1:
                tree.move_root(1)
                advances.append(SequenceAdvance(sequence_id, tree.step, tokens[:1], features))
                tokens = tokens[1:]
            tree.move_root(len(tokens))
            advances.append(SequenceAdvance(sequence_id, tree.step, tokens, features))
        holds = self.rests and self._tables is None and not self.reads_features and not self.latency.beginning
        if not holds or len(advances) >= MAX_SEQUENCES_PER_FRAME:
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Send the commits that the draft has not been sent, of those sequences that it still follows."""
        advances, self._unsent = [one for one in self._unsent if one.sequence_id in self._trees], []
        if advances and self._link is not None and self.connected:
            self.latency.sent()
            self._link.advance(advances)

    def has_answered(self) -> bool:
        """Whether the draft has answered the last commit of every sequence. Reads what has arrived."""
        self.listen()
        return all(tree.answered for tree in self._trees.values())

    def _answered(self, sequences: SequenceOf[Sequence]) -> bool:
        trees = (self._trees.get(sequence.sequence_id) for sequence in sequences)
        return all(tree is None or tree.answered for tree in trees)

    def _open(self, sequence: Sequence) -> None:
        if self._link is None or not self.connected or not self.active:
            return
        request = sequence.request
        # A draft does not know grammars.
        mode, sampling = request.mode, replace(request.sampling, structured_output=None)
        if mode is VerificationMode.TYPICAL:
            # It accepts what is probable.
            mode, sampling = VerificationMode.GREEDY, replace(sampling, temperature=0.0)
        # What the device chooses from may be larger than what a pass verifies: as large as the draft itself allows.
        device_chooses = self._tables is not None and mode is not VerificationMode.REJECTION
        if not self._trees:
            self.latency.expect_first_answer()
        self.latency.sent()
        # All its tokens go with it.
        self._unsent = [one for one in self._unsent if one.sequence_id != sequence.sequence_id]
        reopened = sequence.sequence_id in self._opened
        self._opened.add(sequence.sequence_id)
        self._trees[sequence.sequence_id] = GrowingTree(sequence.token_ids, sequence.step, reopened=reopened)
        if self._tables is not None:
            self._tables.assign_slot(sequence.sequence_id)
            self._tables.clear(sequence.sequence_id)
        self._link.open(
            OpenSequence(
                sequence_id=sequence.sequence_id,
                token_ids=tuple(sequence.token_ids),
                prompt_length=sequence.prompt_length,
                step=sequence.step,
                seed=request.seed,
                mode=mode,
                sampling=sampling,
                limits=TreeLimits() if device_chooses else TreeLimits(max_nodes=request.max_draft_nodes),
                vocabulary_size=self._vocabulary_size,
                tenant=request.tenant,
                corpus=request.corpus,
                traceparent=request.traceparent,
                model_version=self.model_version,
            )
        )
        self._features.hold_vectors(sequence)

    def _forget_trees(self) -> None:
        """Drop every tree, also from the device's tables."""
        if self._tables is not None:
            for sequence_id in self._trees:
                self._tables.clear(sequence_id)
        self._trees.clear()
        self._unsent.clear()

    def _close_all(self) -> None:
        self._close(list(self._trees))
        self._forget_trees()

    def _close(self, sequence_ids: list[int]) -> None:
        self._send_unsent()
        if sequence_ids and self._link is not None and self.connected:
            self._link.close(sequence_ids)

    def _handle(self, event: QueuedEvent) -> None:
        match event:
            case SequenceGrowth():
                self._graft(event)
            case Opened():
                features = self._features.release_vectors(event.sequence_id, event.features_from)
                if features and self._link is not None:
                    self._link.send_features(features)
            case SequenceFailure():
                log.info("the draft has failed on a sequence: %s", event.reason)
                self._trees.pop(event.sequence_id, None)
                self._note_refusal(event.sequence_id, event.reason)
            case Connected():
                self._forget_trees()
                self._opened.clear()
                if not self._meets_needs(event.info):
                    return
                log.info("draft %s is connected", event.info.drafter)
                self.info, self.lost = event.info, ""
                for sequence in self._eligible.values():
                    self._open(sequence)
            case Lost():
                # Only sequences that this draft followed need another one.
                for sequence_id in event.sequence_ids:
                    if self._trees.pop(sequence_id, None) is not None:
                        self._open(self._eligible[sequence_id])
            case Disconnected():
                log.warning("no draft: %s", event.reason)
                self.info, self.lost = None, event.reason
                self._forget_trees()
                self._features.disconnect()

    def _cut_off(self, reason: str) -> None:
        log.error("the draft is cut off: %s", reason)
        self._forget_trees()
        if self._link is not None:
            self._link.cut_off(reason)

    def _meets_needs(self, info: DraftInfo) -> bool:
        """Whether this target can send what the draft requires."""
        try:
            self._features.connect(info.features)
        except NotSupported as error:
            required = info.features is not None and info.features.required
            log.warning("draft %s %s: %s", info.drafter, "is not used" if required else "gets no features", error)
            return not required
        return True

    def _graft(self, growth: SequenceGrowth) -> None:
        tree = self._trees.get(growth.sequence_id)
        if tree is None:
            # Closed while the growth was on its way.
            return
        if growth.token_ids:
            # An empty growth shows that the draft is alive, not that it can draft for the sequence.
            self.latency.received()
        try:
            awaited, base = not tree.answered, tree.length_at(growth.base_step)
            if tree.begins_again(growth) and self._tables is not None:
                self._tables.clear(growth.sequence_id)
            tree.hold(growth)
            if self._tables is not None and base is not None:
                # All slots may have been taken when it was opened.
                self._tables.assign_slot(growth.sequence_id)
                self._tables.grow(growth, base, self._eligible[growth.sequence_id].token_ids)
            if awaited and tree.answered:
                self.latency.answered(self.received_at)
            if tree.lag(growth) <= 1:
                self.latency.in_time()
        except InvalidField as error:
            self._refuse(growth.sequence_id, error)

    def _refuse(self, sequence_id: int, error: InvalidField) -> None:
        others = self._refusals.due()
        if others is not None:
            log.warning("a malformed growth ends drafting for its sequence: %s (and %d like it)", error, others)
        del self._trees[sequence_id]
        self._note_refusal(sequence_id, error.reason)
        self._close([sequence_id])

    def _note_refusal(self, sequence_id: int, reason: str) -> None:
        sequence = self._eligible.get(sequence_id)
        # None if it ended while the draft's frame was on its way.
        if sequence is not None:
            # What `google.rpc.ErrorInfo` allows as a reason. Callers receive it, so no other text of a draft may pass
            # for one.
            sequence.totals.draft_refused = (
                reason if re.fullmatch(r"[A-Z][A-Z0-9_]{0,62}", reason) else OutriderError.reason
            )
