"""The trie drafter: what a sequence itself said, then what its tenant said, then a shared corpus if one was named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from draft_service.corpora import Corpora
from draft_service.drafter import CorpusGrowth, Drafter, DrafterSpec, DraftSequence, tree_limits
from draft_service.learning import Learner, Lesson, as_tokens
from draft_service.ngram_config import NEVER_LOG2, TrieConfig
from draft_service.ngram_trie import NgramTrie
from draft_service.tree_growth import UNIT, Shape, Trie, grow
from outrider.frames import TreeLimits
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree

# Committed tokens are taught to the tenant's trie in pieces of this size, to spare the queue.
_PIECE = 16


@dataclass(slots=True)
class _Followed:
    """What the drafter keeps of one sequence. `taught` counts its tokens that were handed to the tenant's trie."""

    own: NgramTrie
    tenant: NgramTrie
    shared: NgramTrie | None
    taught: int


class NgramDrafter:
    """See `TrieConfig` for what can be set and `tree_growth` for how candidates are ranked."""

    name = "trie"
    vocabulary_size = 0

    def __init__(self, config: TrieConfig) -> None:
        self._config = config
        self.limits: TreeLimits = config.limits
        self.max_context = config.max_context
        self._evidence = config.evidence()
        self._corpora = Corpora(config)
        self._learner = Learner(config.max_backlog)
        self._nothing = NgramTrie(2, 4)

    def start(self) -> None:
        """Compile (about ten seconds once per machine, then cached) and restore the snapshot."""
        self._learner.start()

    def stop(self) -> None:
        self._learner.stop()

    def flush(self) -> None:
        """Wait until all that was committed so far is learnt. For tests and benchmarks."""
        self._learner.flush()

    def open(self, sequence: DraftSequence) -> None:
        shared = self._corpora.shared(sequence.corpus) if sequence.corpus else None
        config = self._config
        recent = as_tokens(sequence.token_ids[-config.own_tokens :])
        capacity = 2 * config.own_tokens * config.depth
        own = NgramTrie(config.depth, capacity, NEVER_LOG2, first_rows=(len(recent) + 64) * config.depth)
        own.insert(recent, weight=UNIT)
        followed = _Followed(own, self._corpora.tenant(sequence.tenant), shared, 0)
        sequence.state = followed
        if not config.learn_prompts:
            followed.taught = sequence.prompt_length
        self._teach(sequence, followed)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        followed: _Followed = sequence.state
        fresh, depth = len(committed), self._config.depth
        tail = as_tokens(sequence.token_ids[-(fresh + depth) :])
        followed.own.insert(tail[-fresh:], tail[:-fresh], UNIT)
        if len(sequence.token_ids) - followed.taught >= _PIECE:
            self._teach(sequence, followed)

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self._teach(sequence, sequence.state)
            sequence.state = None

    def _teach(self, sequence: DraftSequence, followed: _Followed) -> None:
        """Hand what is new to the tenant's trie."""
        config, end = self._config, len(sequence.token_ids)
        if followed.taught < sequence.prompt_length:
            self._lesson(sequence, followed, sequence.prompt_length, UNIT)
        if followed.taught < end and config.learn_outputs:
            self._lesson(sequence, followed, end, UNIT * config.output_weight)

    def _lesson(self, sequence: DraftSequence, followed: _Followed, end: int, weight: int) -> None:
        begin = followed.taught
        context = as_tokens(sequence.token_ids[max(0, begin - self._config.depth) : begin])
        tokens = as_tokens(sequence.token_ids[begin:end])
        self._learner.teach(Lesson(followed.tenant, context, tokens, weight))
        followed.taught = end

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        return [self._tree(sequence) for sequence in sequences]

    def _tree(self, sequence: DraftSequence) -> TokenTree:
        followed: _Followed = sequence.state
        context = as_tokens(sequence.token_ids[-self._config.max_match :])
        shape = self._shape(sequence)
        tokens = np.empty(shape.nodes + 1, np.int32)
        parents = np.empty(shape.nodes + 1, np.int32)
        scores = np.empty(shape.nodes + 1, np.float64)
        shared = followed.shared or self._nothing
        with followed.tenant.lock, shared.lock:
            tries = (followed.own.arrays(), followed.tenant.arrays(), shared.arrays())
            rows = grow(tries, context, self._evidence, shape, tokens, parents, scores)
        tokens[0], parents[0], scores[0] = sequence.root, 0, 1.0
        return TokenTree(tuple(tokens[:rows].tolist()), tuple(parents[:rows].tolist()), tuple(scores[:rows].tolist()))

    def _shape(self, sequence: DraftSequence) -> Shape:
        limits = tree_limits(self.limits, sequence.limits)
        coupled = sequence.mode is VerificationMode.COUPLED
        return Shape(
            nodes=limits.max_nodes,
            depth=limits.max_depth,
            breadth=self._config.breadth,
            floor=self._config.min_score,
            coupled=coupled,
            power=1.0 / max(sequence.sampling.temperature, 0.1) if coupled else 1.0,
            sharpness=1.0,
            seed=np.uint64(sequence.seed),
            position=np.uint64(len(sequence.token_ids)),
        )

    def stats(self) -> Mapping[str, float]:
        return {}


def _create(config: TrieConfig) -> Drafter:
    return NgramDrafter(config)


SPEC = DrafterSpec("trie", "trie", TrieConfig, _create)
