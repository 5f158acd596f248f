"""All trees of a frame in one call: the same trees as one after the other, whatever waits, ends or grows meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_checks import check_integrity
from trie_trees import build_tree

from draft_service.drafters.base import DraftSequence, tree_limits
from draft_service.ngram.arrays import HALF_LIFE_LOG2, NEVER_LOG2
from draft_service.ngram.batch import ROOM
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.ngram.prediction import UNIT
from draft_service.ngram.trie import NgramTrie
from outrider.sampling import LOSSLESS_MODES, SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits

VOCABULARY = 6
CONFIG = TrieConfig(num_draft_tokens=24, learn_prompts=False, learn_outputs=False, own_tokens=128)
TEACHING = [1, 2, 3, 4, 1, 2, 3, 5, 0] * 3
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
modes = st.sampled_from(list(LOSSLESS_MODES))


@dataclass
class Plain:
    """One sequence, its own trie fed token by token and its tree grown by itself."""

    sequence: DraftSequence
    tenant: NgramTrie
    own: NgramTrie = field(init=False)

    def __post_init__(self) -> None:
        self.own = NgramTrie(CONFIG.depth, 200_000, NEVER_LOG2)
        self.learn(0)

    def learn(self, begin: int) -> None:
        for end in range(begin + 1, len(self.sequence.token_ids) + 1):
            tokens = np.array(self.sequence.token_ids[:end], np.int32)
            self.own.insert(tokens[-1:], tokens[:-1], UNIT)

    def tree(self) -> TokenTree:
        tries = (self.own.arrays(), self.tenant.arrays(), NgramTrie(2, 4).arrays())
        limits = tree_limits(CONFIG.limits, self.sequence.limits)
        return build_tree(tries, self.sequence, CONFIG.evidence(), limits, CONFIG.breadth, CONFIG.min_score)


def drafter() -> tuple[NgramDrafter, NgramTrie]:
    """A drafter whose one tenant knows a text, and a trie that knows the same."""
    made, tenant = NgramDrafter(CONFIG), NgramTrie(CONFIG.depth, CONFIG.tenant_capacity, HALF_LIFE_LOG2)
    made.add_corpus("default", "", TEACHING)
    tenant.insert(np.array(TEACHING, np.int32), weight=UNIT)
    return made, tenant


def make_sequence(
    token_ids: list[int], mode: VerificationMode = VerificationMode.GREEDY, seed: int = 0, nodes: int = 0
) -> DraftSequence:
    greedy = mode is VerificationMode.GREEDY
    return DraftSequence(
        1,
        list(token_ids),
        len(token_ids),
        VOCABULARY,
        seed=seed,
        mode=mode,
        sampling=SamplingParams(temperature=0.0 if greedy else 0.7),
        limits=TreeLimits(max_nodes=nodes),
    )


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(texts, modes, st.integers(0, 2**64 - 1), st.integers(0, 30), st.lists(texts, max_size=4)),
        min_size=1,
        max_size=20,
    )
)
def test_a_batch_is_what_each_would_be_alone(
    drawn: list[tuple[list[int], VerificationMode, int, int, list[list[int]]]],
) -> None:
    made, tenant = drafter()
    sequences = [make_sequence(text, mode, seed, nodes) for text, mode, seed, nodes, _ in drawn]
    plain = [Plain(sequence, tenant) for sequence in sequences]
    for sequence in sequences:
        made.open(sequence)
    assert made.propose(sequences) == [each.tree() for each in plain]
    # Several commits may come before a tree is asked for, and some sequences commit nothing.
    for (*_, commits), sequence, each in zip(drawn, sequences, plain, strict=True):
        for committed in commits:
            begin = len(sequence.token_ids)
            sequence.token_ids.extend(committed)
            made.advance(sequence, committed)
            each.learn(begin)
    assert made.propose(sequences) == [each.tree() for each in plain]
    made.stop()


@pytest.mark.parametrize(
    "commits", [[ROOM], [ROOM + 1], [ROOM, 1], [200], [3] * 40], ids=["full", "over", "full-and-one", "long", "many"]
)
def test_more_than_may_wait_is_inserted_at_once(commits: list[int]) -> None:
    made, tenant = drafter()
    sequence = make_sequence([1, 2, 3])
    plain = Plain(sequence, tenant)
    made.open(sequence)
    for size in commits:
        begin = len(sequence.token_ids)
        committed = [(begin + i) * 7919 % 13 % VOCABULARY for i in range(size)]
        sequence.token_ids.extend(committed)
        made.advance(sequence, committed)
        plain.learn(begin)
    assert made.propose([sequence]) == [plain.tree()]
    made.stop()


def test_tries_may_move_and_forget_between_frames() -> None:
    made, _ = drafter()
    sequences = [make_sequence([1, 2, 3, i]) for i in range(4)]
    for sequence in sequences:
        made.open(sequence)
    words = random.Random(5)
    for step in range(600):
        for sequence in sequences:
            # Ever new words, then a loop.
            committed = [words.randrange(1000), words.randrange(1000)] if step < 580 else [1, 2, 3]
            sequence.token_ids.extend(committed)
            made.advance(sequence, committed)
        trees = made.propose(sequences)
    for sequence, tree in zip(sequences, trees, strict=True):
        own: NgramTrie = sequence.state.own
        check_integrity(own)
        assert own.tokens == len(sequence.token_ids) and own.evictions > 0, "more was said than it holds"
        assert tree.token_ids[:4] == (3, 1, 2, 3)
    made.stop()


def test_a_place_is_given_again() -> None:
    made, tenant = drafter()
    for round_number in range(40):
        sequences = [make_sequence([round_number % VOCABULARY, i % VOCABULARY, 2, 3]) for i in range(20)]
        for sequence in sequences:
            made.open(sequence)
        assert made.propose(sequences) == [Plain(sequence, tenant).tree() for sequence in sequences]
        for sequence in sequences:
            made.close(sequence)
    made.stop()


def test_no_sequences_no_trees() -> None:
    made, _ = drafter()
    assert made.propose([]) == []
    made.stop()
