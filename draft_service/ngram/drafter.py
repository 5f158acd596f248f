"""The trie drafter: tries of the sequence's own tokens, of its tenant's, and of a shared corpus if one is named."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from draft_service.compiling import LOOPS
from draft_service.drafters.base import CorpusGrowth, Drafter, DrafterSpec, DraftSequence, tree_limits
from draft_service.drafters.grown import GrownTrees, Pending, in_order
from draft_service.ngram import snapshot
from draft_service.ngram.arrays import HALF_LIFE_LOG2, Tokens
from draft_service.ngram.batch import ROOM, Asked, TrieBatch
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.corpora import Corpora
from draft_service.ngram.drawn_growth import draw_tree
from draft_service.ngram.growth import TreeBounds
from draft_service.ngram.own_tries import OwnRows
from draft_service.ngram.prediction import UNIT
from draft_service.ngram.trie import NgramTrie
from draft_service.ngram.trie_worker import TrieWorker
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import CorpusInfo, TreeLimits

log = logging.getLogger(__name__)
# Seconds until a snapshot without a deleted corpus is written. Chosen, not measured: until then a crash would bring the
# corpus back, and many deletions must not write the disk more often.
_FORGET_SECONDS = 30.0


@dataclass(slots=True)
class _NgramSequence:
    """State of one sequence: its own trie, its row in the batch's tables, how many of its tokens the tenant's trie has
    learnt, and the tokens that are inserted with the next tree."""

    own: NgramTrie
    place: int
    inserted: int
    fresh: list[int] = field(default_factory=list)


class NgramDrafter(Drafter):
    """See `TrieConfig` for settings, `prediction` and `growth` for how candidates are ranked."""

    name = "trie"
    vocabulary_size = 0
    loops = (f"{__name__}:compile_loops",)

    def __init__(self, config: TrieConfig) -> None:
        self._config = config
        self.limits: TreeLimits = config.limits
        self.max_context = config.max_context
        self._evidence = config.evidence()
        self._corpora = Corpora(config)
        self._worker = TrieWorker(config.max_backlog, self._save if config.snapshot else None, config.snapshot_seconds)
        # That a snapshot must have been written with.
        self._settings = {"depth": config.depth, "unit": UNIT, "half_life_log2": HALF_LIFE_LOG2}
        self._nothing = NgramTrie(2, 4)
        self._own_rows = OwnRows(config)
        self._batch = TrieBatch(config, self._evidence)

    def start(self) -> None:
        """Compile (seconds once per machine, then cached) and restore the snapshot."""
        LOOPS.wait()
        self.compile_loops()
        self._restore()

    def stop(self) -> None:
        """Learn the queued tokens and write the snapshot."""
        self._worker.stop()
        if self._config.snapshot:
            self._claim.release()

    def flush(self) -> None:
        """Wait until all tokens committed so far are inserted. For tests and benchmarks."""
        self._worker.flush()

    def open(self, sequence: DraftSequence) -> None:
        if sequence.corpus:
            self._corpora.check_shared(sequence.corpus)
        config = self._config
        recent = _as_tokens(sequence.token_ids[-config.own_tokens :])
        own = self._own_rows.made(len(recent) + ROOM)
        own.insert(recent, weight=UNIT)
        self._own_rows.grew(own)
        limits = tree_limits(self.limits, sequence.limits)
        # A distribution goes with every drawn row, which takes another loop.
        nodes = 0 if sequence.mode is VerificationMode.REJECTION else limits.max_nodes
        power = _gumbel_max_power(sequence) if sequence.mode is VerificationMode.COUPLED else None
        place = self._batch.add_sequence(
            own, sequence.token_ids, replace(limits, max_nodes=nodes), power, sequence.seed
        )
        sequence.state = _NgramSequence(own, place, inserted=0 if config.learn_prompts else sequence.prompt_length)
        self._insert_new(sequence)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        followed: _NgramSequence = sequence.state
        own, fresh, depth = followed.own, followed.fresh, self._config.depth
        fresh.extend(committed)
        before = len(own.rows)
        # Fresh tokens are usually inserted by the call that grows the next tree.
        if len(fresh) > ROOM:
            self._own_rows.bound(own)
            tail = _as_tokens(sequence.token_ids[-(len(fresh) + depth) :])
            own.insert(tail[-len(fresh) :], tail[: -len(fresh)], UNIT)
            self._batch.restart(followed.place, own, sequence.token_ids)
            fresh.clear()
        elif own.used + len(fresh) * depth > len(own.rows):
            self._own_rows.bound(own)
            own.make_room(len(fresh) * depth)
            self._batch.moved(followed.place, own)
        self._own_rows.grew(own, before)

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self._insert_new(sequence)
            self._batch.remove_sequence(sequence.state.place)
            self._own_rows.left(sequence.state.own)
            sequence.state = None

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        trees = in_order(sequences, self._grow, self._draw)
        self._insert_due(sequences)
        return trees

    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        """See `ArrayDrafter.start_trees`; everything is computed when the trees are fetched."""
        return Pending(lambda _early: self.grow(sequences))

    def grow(self, sequences: Sequence[DraftSequence]) -> GrownTrees:
        """The trees of sequences without a REJECTION request. The next call overwrites them."""
        grown = self._grow(sequences)
        self._insert_due(sequences)
        return grown

    def _grow(self, sequences: Sequence[DraftSequence]) -> GrownTrees:
        tries, asked, fresh = self._asked(sequences)
        with _Held(tries):
            grown = self._batch.grow(tries, asked, fresh)
        for sequence, (_, used) in zip(sequences, grown.sizes.tolist(), strict=True):
            followed: _NgramSequence = sequence.state
            followed.own.used = used
            followed.fresh.clear()
        return grown

    def _draw(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """The trees of sequences of REJECTION requests."""
        # Only inserts their fresh tokens.
        self._grow(sequences)
        tries, asked, _ = self._asked(sequences)
        with _Held(tries):
            return [
                self._drawn(sequence, sequence.state.own, tries[tenant], tries[shared])
                for sequence, (_, tenant, shared, _) in zip(sequences, asked, strict=True)
            ]

    def _insert_due(self, sequences: Sequence[DraftSequence]) -> None:
        """Teach what is long enough. Only after all trees are made, since the learning thread would compete for the
        interpreter."""
        for sequence in sequences:
            # In pieces, to spare the queue.
            if len(sequence.token_ids) - sequence.state.inserted >= 16:
                self._insert_new(sequence)

    def add_corpus(self, tenant: str, corpus: str, token_ids: Sequence[int]) -> CorpusGrowth:
        """See `CorpusDrafter.add_corpus`."""
        return self._worker.call_on_thread(partial(self._corpora.add, tenant, corpus, _as_tokens(token_ids)))

    def corpora(self, tenant: str) -> list[CorpusInfo]:
        """See `CorpusDrafter.corpora`."""
        return self._corpora.listed(tenant)

    def delete_corpus(self, tenant: str | None, corpus: str) -> CorpusInfo:
        """See `CorpusDrafter.delete_corpus`. A snapshot without it follows soon."""
        deleted = self._worker.call_on_thread(partial(self._corpora.delete, tenant, corpus))
        self._worker.ask_for_chore(_FORGET_SECONDS)
        return deleted

    def stats(self) -> Mapping[str, float]:
        worker = self._worker
        return self._corpora.figures() | {
            "trie_own_rows": self._own_rows.taken,
            "trie_backlog_tokens": worker.backlog,
            "trie_learnt_tokens_total": worker.inserted_tokens,
            "trie_dropped_tokens_total": worker.dropped_tokens,
        }

    def _asked(self, sequences: Sequence[DraftSequence]) -> tuple[list[NgramTrie], list[Asked], list[int]]:
        """The tries that are read for these sequences, each once, and the other arguments of `TrieBatch.grow`."""
        numbers: dict[tuple[str, str], tuple[int, int]] = {}
        places: dict[int, int] = {}
        tries: list[NgramTrie] = []
        asked: list[Asked] = []
        fresh: list[int] = []
        for sequence in sequences:
            names = sequence.tenant, sequence.corpus
            pair = numbers.get(names)
            if pair is None:
                # One that was deleted since the open is none.
                shared = (self._corpora.find_shared(sequence.corpus) if sequence.corpus else None) or self._nothing
                # Looked up only: to ask for trees of a tenant must take no room.
                tenant = self._corpora.find_tenant(sequence.tenant) or self._nothing
                for trie in (tenant, shared):
                    if places.setdefault(id(trie), len(tries)) == len(tries):
                        tries.append(trie)
                pair = numbers[names] = places[id(tenant)], places[id(shared)]
            followed: _NgramSequence = sequence.state
            asked.append((followed.place, *pair, len(followed.fresh)))
            fresh += followed.fresh
        return tries, asked, fresh

    def _drawn(self, sequence: DraftSequence, own: NgramTrie, tenant: NgramTrie, shared: NgramTrie) -> TokenTree:
        """A tree whose nodes are drawn, with the fresh tokens inserted already."""
        limits = tree_limits(self.limits, sequence.limits)
        bounds = limits.max_nodes, limits.max_depth, self._config.breadth, self._config.min_score
        shape = TreeBounds(*bounds, coupled=False, power=_gumbel_max_power(sequence))
        return draw_tree((own.arrays(), tenant.arrays(), shared.arrays()), sequence, self._evidence, shape)

    def _insert_new(self, sequence: DraftSequence) -> None:
        """Queue new tokens for the tenant's trie, prompt and output each with its weight."""
        config, known, followed = self._config, sequence.token_ids, sequence.state
        outputs_end = len(known) if config.learn_outputs else 0
        # An occurrence in an output counts as two in a prompt. Chosen.
        for end, weight in ((sequence.prompt_length, UNIT), (outputs_end, 2 * UNIT)):
            begin = followed.inserted
            if begin < end:
                context, tokens = _as_tokens(known[max(0, begin - config.depth) : begin]), _as_tokens(known[begin:end])
                self._worker.submit(
                    len(tokens), partial(self._corpora.insert, sequence.tenant, context, tokens, weight)
                )
                followed.inserted = end

    def _save(self) -> None:
        try:
            snapshot.save(self._claim.path, self._corpora.contents(), self._settings)
        except OSError as error:
            log.error("the trie snapshot was not written: %s", error)

    @cached_property
    def _claim(self) -> snapshot.Claim:
        """The file for the snapshots. Other processes may keep theirs in the same folder."""
        return snapshot.Claim(Path(self._config.snapshot))

    def _restore(self) -> None:
        if not self._config.snapshot:
            return
        path = self._claim.source()
        log.info("tries are kept in %s, and start with those of %s", self._claim.path, path)
        try:
            tries, damaged = snapshot.load(path, self._settings)
        except snapshot.SnapshotRefused as error:
            log.error("the trie snapshot was refused, and every trie starts empty: %s", error)
            snapshot.keep_refused(path)
            return
        damaged += self._corpora.restore(tries)
        for tenant, corpus in damaged:
            log.error("a damaged trie of the snapshot is refused, and starts empty: tenant %r, %r", tenant, corpus)
        if damaged:
            snapshot.keep_refused(path)

    def compile_loops(self) -> None:
        """Run every compiled loop once on a throw-away sequence."""
        NgramTrie(2, 64).evict(4)
        own = NgramTrie(self._config.depth, 4096)
        drawn = DraftSequence(0, [1, 2, 1, 2, 1], 5, 4, mode=VerificationMode.REJECTION, limits=TreeLimits(4, 4))
        own.insert(_as_tokens(drawn.token_ids), weight=UNIT)
        self._drawn(drawn, own, self._nothing, self._nothing)
        place = self._batch.add_sequence(own, [1, 2, 1], self.limits, None, 0)
        self._batch.grow([self._nothing], [(place, 0, 0, 2)], [2, 1]).packed([(0, 0, 1, 4)])
        self._batch.remove_sequence(place)


def compile_loops() -> None:
    """Compile every loop of a trie."""
    NgramDrafter(TrieConfig()).compile_loops()


class _Held:
    """Holds the locks of tries, against the learning thread. Only one thread ever holds more than one."""

    __slots__ = ("_tries",)

    def __init__(self, tries: Sequence[NgramTrie]) -> None:
        self._tries = tries

    def __enter__(self) -> None:
        for trie in self._tries:
            trie.lock.acquire()

    def __exit__(self, *_: object) -> None:
        for trie in self._tries:
            trie.lock.release()


def _gumbel_max_power(sequence: DraftSequence) -> float:
    """The exponent on probabilities in the Gumbel-max draw of a sampled sequence."""
    # Below 0.1 the target's distribution is a point, and raising frequencies further only overflows.
    return 1.0 / max(sequence.sampling.temperature or 1.0, 0.1)


def _as_tokens(token_ids: Sequence[int]) -> Tokens:
    return np.array(token_ids, dtype=np.int32)


SPEC = DrafterSpec("trie", TrieConfig, NgramDrafter)
