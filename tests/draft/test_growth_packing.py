"""Trees as bytes: what protobuf reads of them is what it reads of a growth made node by node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.packing import pack, room_for, signed
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.session import PackedGrowth, ProposeSession, SequenceAdmission, Tracked
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.v1 import draft_pb2
from outrider.wire.drafts import growth_to_pb
from outrider.wire.frames import OpenSequence, SequenceGrowth, TreeLimits

ids = st.integers(0, 2**64 - 1)
steps = st.integers(0, 2**63 - 1)
first_ids = st.integers(1, 2**32 - 300)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    rows = draw(st.integers(1, 60))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=rows, max_size=rows))
    parents = [0] + [draw(st.integers(0, row - 1)) for row in range(1, rows)]
    scores = [1.0, *draw(st.lists(st.floats(0, 1), min_size=rows - 1, max_size=rows - 1))]
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


def packed(drawn: Sequence[tuple[TokenTree, int, int, int]], vocabulary_size: int) -> bytes | None:
    most = max(len(tree) for tree, *_ in drawn)
    room = np.zeros((len(drawn), 2, most), np.int32), np.zeros((len(drawn), most)), np.zeros((len(drawn), 2), np.int64)
    for i, (tree, *_) in enumerate(drawn):
        room[0][i, 0, : len(tree)], room[0][i, 1, : len(tree)] = tree.token_ids, tree.parents
        room[1][i, : len(tree)], room[2][i, 0] = tree.scores, len(tree)
    heads = np.array([(signed(name), step, first, vocabulary_size) for _, name, step, first in drawn], np.int64)
    out = np.zeros(room_for(len(drawn), most - 1), np.uint8)
    size = pack(*room, heads, out)
    return None if size < 0 else out[:size].tobytes()


@examples(150)
@given(st.lists(st.tuples(trees(), ids, steps, first_ids), min_size=1, max_size=6))
def test_bytes_say_what_messages_say(drawn: list[tuple[TokenTree, int, int, int]]) -> None:
    expected = draft_pb2.GrowSequences(
        sequences=[
            growth_to_pb(Tracked(DraftSequence(name, [1], 1, 2**31), step, first).growth(tree))
            for tree, name, step, first in drawn
        ]
    )
    message = packed(drawn, 2**31)
    assert message is not None
    assert draft_pb2.GrowSequences.FromString(message) == expected


def test_the_largest_numbers_fit_the_room() -> None:
    rows = 256
    tree = TokenTree((2**31 - 1,) * rows, tuple(range(-1, rows - 1)), (1.0,) * rows)
    message = packed([(tree, 2**64 - 1, 2**63 - 1, 2**32 - 1 - rows)] * 3, 2**31)
    assert message is not None
    assert len(message) <= room_for(3, rows - 1)
    assert len(draft_pb2.GrowSequences.FromString(message).sequences[2].token_ids) == rows - 1


def test_a_token_past_the_vocabulary_is_not_packed() -> None:
    tree = TokenTree((9, 3, 9), (0, 0, 1), (1.0, 0.5, 0.5))
    assert packed([(tree, 1, 0, 1)], 10) is not None
    assert packed([(tree, 1, 0, 1)], 9) is None


def opened(sequence_id: int, mode: VerificationMode, vocabulary_size: int) -> OpenSequence:
    greedy = mode is VerificationMode.GREEDY
    return OpenSequence(
        sequence_id=sequence_id,
        token_ids=(1, 2, 3, 1, 1, 2, 3, 4, 1, 2, 3),
        prompt_length=11,
        step=5,
        seed=11,
        mode=mode,
        sampling=SamplingParams(temperature=0.0 if greedy else 0.8),
        limits=TreeLimits(),
        vocabulary_size=vocabulary_size,
    )


@pytest.mark.parametrize(
    ("modes", "vocabulary_size", "bytes_come"),
    [
        ([VerificationMode.GREEDY, VerificationMode.COUPLED], 5, True),
        ([VerificationMode.GREEDY, VerificationMode.REJECTION], 5, False),
        ([VerificationMode.GREEDY], 4, False),
    ],
    ids=["packed", "drawn", "small-vocabulary"],
)
def test_a_session_takes_the_same_growth_either_way(
    modes: list[VerificationMode], vocabulary_size: int, bytes_come: bool
) -> None:
    drafter = NgramDrafter(TrieConfig(learn_prompts=False, learn_outputs=False))
    frames = []
    for taking in (ProposeSession.propose_growth, ProposeSession.propose_packed):
        session = ProposeSession(drafter, SequenceAdmission(10), "default")
        session.grant(2)
        for number, mode in enumerate(modes, 1):
            session.open(opened(2**64 - number, mode, vocabulary_size))
        frames.append([taking(session) for _ in range(2)])
        session.end()
    drafter.stop()
    (plain, nothing), (other, nothing_either) = frames
    assert nothing == nothing_either == []
    assert isinstance(other, PackedGrowth) is bytes_come
    assert _messages(other) == _messages(plain)
    assert any(growth.token_ids for growth in _messages(plain))


def _messages(taken: PackedGrowth | list[SequenceGrowth]) -> list[draft_pb2.SequenceGrowth]:
    if isinstance(taken, PackedGrowth):
        sequences = list(draft_pb2.GrowSequences.FromString(taken.message).sequences)
        assert [growth.sequence_id for growth in sequences] == taken.sequence_ids
        assert [len(growth.token_ids) for growth in sequences] == taken.nodes
        return sequences
    return [growth_to_pb(growth) for growth in taken]


def test_a_drafter_packs_what_it_grew() -> None:
    drafter = NgramDrafter(TrieConfig(learn_prompts=False, learn_outputs=False))
    sequence = DraftSequence(1, [1, 2, 3, 1, 2], 5, 10)
    drafter.open(sequence)
    grown = drafter.start_trees([sequence]).fetch().packed([(1, 0, 1, 10)])
    assert grown is not None
    nodes, message = grown
    growth = draft_pb2.GrowSequences.FromString(message).sequences[0]
    assert len(growth.token_ids) == nodes[0] > 0
    assert all(parent < growth.first_node_id + i for i, parent in enumerate(growth.parent_ids))
    drafter.close(sequence)
    drafter.stop()
