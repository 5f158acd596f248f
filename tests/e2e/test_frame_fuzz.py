"""Any frame at all, on both ends of a `Propose` stream: what is wrong with it is said, and nothing else is raised."""

from __future__ import annotations

import logging

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_drafter import Listener, opening, step

from draft_service.faults import FaultLog
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.server import _ProposeStream
from draft_service.session import ProposeSession, SequenceAdmission
from draft_service.telemetry.metrics import DraftMetrics
from draft_service.telemetry.tracing import StreamTrace
from outrider.drafting.draft_tree import GrowingTree
from outrider.drafting.stream import DraftConversation
from outrider.errors import CreditExceeded, InvalidField, OutriderError
from outrider.telemetry.tracing import Tracing
from outrider.v1 import draft_pb2, tree_pb2

VOCABULARY = 1000
EDGES32 = [0, 1, 2, 999, 1000, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
uint32 = st.sampled_from(EDGES32) | st.integers(0, 12)
uint64 = st.sampled_from([0, 1, 2, 3, 2**63 - 1, 2**63, 2**64 - 1])
ids = st.integers(1, 3) | uint64
tokens = st.lists(uint32, max_size=6) | st.lists(st.integers(0, 9), min_size=1, max_size=6)
reals = st.floats(width=32)

# Mostly sound but for one field or two: frames that are wrong all over are refused at their first.
names = st.sampled_from(["", "", "", "", "a/b"])
samplings = st.sampled_from([tree_pb2.SamplingParameters()] * 4) | st.builds(
    tree_pb2.SamplingParameters, temperature=reals, top_k=uint32, top_p=reals, seed=uint64
)
opens = st.builds(
    draft_pb2.OpenSequence,
    sequence_id=ids,
    tenant=names,
    corpus=names,
    token_ids=st.lists(st.sampled_from(EDGES32), min_size=1, max_size=1) | tokens,
    prompt_length=st.sampled_from([1, 1, 1, 0, 2]),
    step=st.sampled_from([0, 0, 2**64 - 1]),
    seed=uint64,
    mode=st.sampled_from([0, 1, 2, 3, 3, 4]),
    sampling=samplings,
    limits=st.builds(draft_pb2.TreeLimits, max_nodes=st.sampled_from([0, 8, 1023, 1024]), max_depth=uint32),
    vocabulary_size=st.sampled_from([VOCABULARY, 2**31 - 1, 2**31, 2**32 - 1]),
)
# The last token of each vocabulary.
last = st.builds(
    lambda number, size: draft_pb2.OpenSequence(
        sequence_id=number, vocabulary_size=size, token_ids=[size - 1], prompt_length=1
    ),
    ids,
    st.sampled_from([VOCABULARY, 2**31 - 1, 2**31, 2**32 - 1]),
)
tensors = st.builds(tree_pb2.Tensor, dtype=st.integers(0, 4), shape=st.lists(uint32, max_size=3), data=st.binary())
advances = st.builds(draft_pb2.SequenceAdvance, sequence_id=ids, step=uint64, token_ids=tokens) | st.builds(
    draft_pb2.SequenceAdvance, sequence_id=ids, step=uint64, token_ids=tokens, features=tensors
)
features = st.builds(draft_pb2.SequenceFeatures, sequence_id=ids, position=uint32, features=tensors)
requests = st.one_of(
    st.builds(draft_pb2.ProposeRequest, open=opens | last),
    st.builds(
        draft_pb2.ProposeRequest,
        advance=st.builds(draft_pb2.AdvanceSequences, sequences=st.lists(advances, max_size=3)),
    ),
    st.builds(
        draft_pb2.ProposeRequest, features=st.builds(draft_pb2.SendFeatures, sequences=st.lists(features, max_size=3))
    ),
    st.builds(draft_pb2.ProposeRequest, close=st.builds(draft_pb2.CloseSequences, sequence_ids=st.lists(ids))),
    st.builds(draft_pb2.ProposeRequest, credit=st.builds(draft_pb2.Credit, frames=st.just(8) | uint32)),
    st.just(draft_pb2.ProposeRequest()),
)
scores = st.lists(st.floats(0, 1, width=32) | reals, max_size=4)
growths = st.builds(
    draft_pb2.SequenceGrowth,
    sequence_id=st.integers(1, 3) | uint64,
    base_step=uint64,
    first_node_id=st.integers(1, 9) | uint32,
    parent_ids=st.lists(uint32, max_size=4),
    token_ids=st.lists(uint32, max_size=4),
    scores=scores,
    distributions=st.lists(
        st.builds(
            tree_pb2.DraftDistribution,
            parent=uint32,
            token_ids=st.lists(uint32, max_size=3),
            weights=st.lists(uint32, max_size=3),
        ),
        max_size=2,
    ),
    replaces=st.booleans(),
)
responses = st.one_of(
    st.builds(
        draft_pb2.ProposeResponse, growth=st.builds(draft_pb2.GrowSequences, sequences=st.lists(growths, max_size=3))
    ),
    st.builds(draft_pb2.ProposeResponse, opened=st.builds(draft_pb2.SequenceOpened, sequence_id=uint64)),
    st.builds(draft_pb2.ProposeResponse, status=st.builds(draft_pb2.SequenceStatus, sequence_id=uint64)),
    st.just(draft_pb2.ProposeResponse()),
)


@pytest.fixture(scope="module")
def trie() -> NgramDrafter:
    drafter = NgramDrafter(TrieConfig(max_context=64))
    drafter.start()
    return drafter


@examples(300)
@given(frames=st.lists(requests, max_size=8))
def test_a_draft_bears_any_frame(trie: NgramDrafter, frames: list[draft_pb2.ProposeRequest]) -> None:
    admission = SequenceAdmission(4)
    stream = _ProposeStream(
        ProposeSession(trie, admission, "default"),
        DraftMetrics("trie", "0", dict),
        StreamTrace(Tracing(), (), "trie"),
        FaultLog("trie"),
    )
    bugs: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = bugs.append  # type: ignore[method-assign]
    logging.getLogger("draft_service.faults").addHandler(handler)
    try:
        for frame in frames:
            stream.handle_frame(frame)
            while stream.grow():
                pass
    except OutriderError:
        # The stream ends, and says why.
        pass
    finally:
        logging.getLogger("draft_service.faults").removeHandler(handler)
        stream.end()
    assert admission.sequences == 0 and bugs == []


@examples(300)
@given(frames=st.lists(responses, max_size=8))
def test_a_target_bears_any_frame(frames: list[draft_pb2.ProposeResponse]) -> None:
    heard = Listener()
    conversation = DraftConversation(heard, VOCABULARY)
    for number in (1, 2, 3):
        conversation.open(opening(number))
        conversation.advance([step(1, 5, sequence_id=number)])
    try:
        for frame in frames:
            conversation.receive(frame)
    except (CreditExceeded, InvalidField):
        # So does this one.
        pass
    tree = GrowingTree([10, 11, 12, 5], step=1)
    for growth in heard.growths:
        try:
            tree.hold(growth)
            tree.settle()
        except InvalidField:
            break
        whole = tree.cut(set(range(1, tree.nodes + 1)))
        assert max(whole.token_ids) < VOCABULARY and all(p < i for i, p in enumerate(whole.parents) if i)
