"""The target's side of a `Propose` stream: fresh ids, bounded credit, and nothing unchecked let through."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scripted_drafter import VOCABULARY, Listener, opening, step

from outrider.drafting.stream import (
    CREDIT_WINDOW,
    GROWTHS_PER_FRAME,
    MAX_ALLOWANCE,
    DraftConversation,
)
from outrider.errors import CreditExceeded, Draining
from outrider.v1 import draft_pb2
from outrider.wire.drafts import failure_to_pb
from outrider.wire.frames import (
    MAX_CLOSED_PER_FRAME,
    MAX_FEATURE_BYTES,
    MAX_SEQUENCES_PER_FRAME,
    SequenceAdvance,
    SequenceFeatures,
    Vectors,
)


class Talk:
    """A conversation and what it delivered; `said()` takes what it wants written."""

    def __init__(self) -> None:
        self.listener = Listener()
        self.conversation = DraftConversation(self.listener, VOCABULARY)

    def said(self) -> list[draft_pb2.ProposeRequest]:
        frames = list(self.conversation.outgoing)
        self.conversation.outgoing.clear()
        return frames

    def credit(self) -> int:
        return sum(frame.credit.frames for frame in self.said())

    def hear_growth(self, *parts: draft_pb2.SequenceGrowth) -> None:
        self.conversation.receive(draft_pb2.ProposeResponse(growth=draft_pb2.GrowSequences(sequences=parts)))

    def hear_opened(self, wire_id: int) -> None:
        opened = draft_pb2.SequenceOpened(sequence_id=wire_id)
        self.conversation.receive(draft_pb2.ProposeResponse(opened=opened))


def part(wire_id: int, base_step: int = 0, **fields: Any) -> draft_pb2.SequenceGrowth:
    whole = {"first_node_id": 1, "parent_ids": [0, 1], "token_ids": [5, 6], "scores": [0.5, 0.25]}
    return draft_pb2.SequenceGrowth(sequence_id=wire_id, base_step=base_step, **(whole | fields))


@pytest.fixture
def talk() -> Talk:
    return Talk()


def test_it_begins_with_credit(talk: Talk) -> None:
    assert talk.credit() == CREDIT_WINDOW


def test_sequences_travel_under_fresh_ids_and_come_back_under_their_own(talk: Talk) -> None:
    talk.said()
    talk.conversation.open(opening(900))
    talk.conversation.open(opening(800))
    first, second = talk.said()
    assert (first.open.sequence_id, second.open.sequence_id) == (1, 2)
    talk.conversation.advance([step(1, 20, sequence_id=800), step(1, 21, sequence_id=900)])
    (frame,) = talk.said()
    assert [(each.sequence_id, each.step) for each in frame.advance.sequences] == [(2, 1), (1, 1)]
    talk.hear_growth(part(2, 1), part(1, 1))
    assert [growth.sequence_id for growth in talk.listener.growths] == [800, 900]


@pytest.mark.parametrize("closed_first", [True, False], ids=["closed", "not closed"])
def test_growth_of_an_earlier_life_is_dropped(talk: Talk, closed_first: bool) -> None:
    talk.said()
    talk.conversation.open(opening(7))
    if closed_first:
        talk.conversation.close([7])
    talk.conversation.open(opening(7))
    _, close, again = talk.said()
    assert list(close.close.sequence_ids) == [1] and again.open.sequence_id == 2
    talk.hear_growth(part(1))
    assert talk.listener.growths == []
    talk.hear_growth(part(2))
    assert [growth.sequence_id for growth in talk.listener.growths] == [7]


def test_what_is_not_open_is_not_mentioned(talk: Talk) -> None:
    talk.said()
    talk.conversation.advance([step(1, 2, sequence_id=5)])
    talk.conversation.close([5, 6])
    assert talk.said() == []


def test_a_sequence_longer_than_the_draft_follows_is_not_sent(talk: Talk) -> None:
    talk.said()
    talk.conversation.max_context = 3
    talk.conversation.open(opening(7, range(4)))
    assert talk.said() == [] and talk.listener.failures[0].reason == "POSITION_OUT_OF_RANGE"
    talk.conversation.open(opening(7, range(3)))
    assert len(talk.said()) == 1


def test_a_failure_ends_its_sequence(talk: Talk) -> None:
    talk.conversation.open(opening(7))
    talk.conversation.open(opening(8))
    talk.said()
    status = failure_to_pb(1, Draining("soon gone"))
    talk.conversation.receive(draft_pb2.ProposeResponse(status=status))
    (failure,) = talk.listener.failures
    assert (failure.sequence_id, failure.reason) == (7, "DRAINING")
    talk.conversation.advance([step(1, 20, sequence_id=7), step(1, 20, sequence_id=8)])
    (frame,) = talk.said()
    assert [each.sequence_id for each in frame.advance.sequences] == [2]


def test_a_failure_of_nobody_is_nothing(talk: Talk) -> None:
    talk.conversation.open(opening(7))
    talk.conversation.receive(draft_pb2.ProposeResponse(status=failure_to_pb(99, Draining("soon gone"))))
    assert talk.listener.failures == []


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [5, VOCABULARY]},
        {"token_ids": [5, 2**32 - 1]},
        {"token_ids": [5]},
        {"parent_ids": [0, 2]},
        {"scores": [0.5, math.nan]},
        {"scores": [0.5, -1.0]},
        {"scores": []},
        {"first_node_id": 0},
        {"parent_ids": [0] * 1024, "token_ids": range(1024), "scores": [0.5] * 1024},
    ],
    ids=["vocabulary", "-1", "lengths", "own parent", "NaN", "negative", "no scores", "id 0", "oversize"],
)
def test_a_bad_growth_ends_its_own_sequence_only(talk: Talk, fields: dict[str, Any]) -> None:
    talk.conversation.open(opening(7))
    talk.conversation.open(opening(8))
    talk.said()
    talk.hear_growth(part(1, **fields), part(2))
    assert [growth.sequence_id for growth in talk.listener.growths] == [8]
    assert [(each.sequence_id, each.reason) for each in talk.listener.failures] == [(7, "INVALID_FIELD")]
    assert [list(frame.close.sequence_ids) for frame in talk.said()] == [[1]]
    talk.hear_growth(part(1))
    assert len(talk.listener.growths) == 1


class TestCredit:
    def test_a_flood_is_cut_off_at_the_window(self, talk: Talk) -> None:
        given = talk.credit()
        with pytest.raises(CreditExceeded):
            for _ in range(CREDIT_WINDOW + 1):
                talk.hear_growth(part(1))
        # Nothing was asked, so nothing more was given.
        assert given + talk.credit() == CREDIT_WINDOW

    def test_what_a_draft_may_send_is_bounded_by_what_it_was_asked(self, talk: Talk) -> None:
        given, asked = talk.credit(), 10
        for number in range(asked):
            talk.conversation.open(opening(number))
        heard = 0
        with pytest.raises(CreditExceeded):
            while True:
                given += talk.credit()
                talk.hear_growth()
                heard += 1
        assert heard == given == CREDIT_WINDOW + asked * GROWTHS_PER_FRAME

    def test_a_quiet_draft_does_not_save_up(self, talk: Talk) -> None:
        talk.conversation.open(opening(1))
        for number in range(1, 10_000):
            talk.conversation.advance([step(number, 20)])
        given = talk.credit()
        heard = 0
        with pytest.raises(CreditExceeded):
            while True:
                talk.hear_growth()
                heard += 1
                given += talk.credit()
        assert heard == given <= CREDIT_WINDOW + MAX_ALLOWANCE

    def test_an_honest_draft_never_runs_out(self, talk: Talk) -> None:
        credit = talk.credit()
        talk.conversation.open(opening(1))
        for number in range(1, 2_000):
            talk.conversation.advance([step(number, 20)])
            credit += talk.credit()
            assert credit > 0
            talk.hear_growth(part(1, number, first_node_id=2 * number))
            credit += talk.credit() - 1

    def test_frames_of_a_newer_kind_have_their_price(self, talk: Talk) -> None:
        for _ in range(CREDIT_WINDOW):
            talk.conversation.receive(draft_pb2.ProposeResponse())
        with pytest.raises(CreditExceeded):
            talk.conversation.receive(draft_pb2.ProposeResponse())

    @pytest.mark.parametrize("kind", ["opened", "status"])
    def test_answers_to_nothing_are_cut_off(self, talk: Talk, kind: str) -> None:
        def hear() -> None:
            if kind == "opened":
                talk.hear_opened(1)
            else:
                talk.conversation.receive(draft_pb2.ProposeResponse(status=failure_to_pb(1, Draining("no"))))

        talk.conversation.open(opening(1))
        talk.hear_opened(1)
        # A drafter may fail at the tree of a sequence that it took.
        hear()
        with pytest.raises(CreditExceeded):
            hear()


def test_silence_counts_from_the_first_question_to_any_answer(talk: Talk) -> None:
    assert talk.conversation.silence == 0
    talk.conversation.open(opening(1))
    talk.conversation.advance([step(1, 20)])
    assert talk.conversation.silence > 0 and not talk.conversation.received
    talk.hear_opened(1)
    assert talk.conversation.silence == 0 and talk.conversation.received
    talk.conversation.advance([step(2, 20)])
    assert talk.conversation.silence > 0
    talk.conversation.close([1])
    assert talk.conversation.silence == 0


def vectors(size: int) -> Vectors:
    return Vectors("bfloat16", 64, bytes(size))


def test_features_travel_under_fresh_ids_and_only_of_open_sequences(talk: Talk) -> None:
    talk.conversation.open(opening(900))
    talk.said()
    one = SequenceFeatures(900, 3, vectors(128))
    talk.conversation.send_features([one, SequenceFeatures(901, 0, vectors(128))])
    (frame,) = talk.said()
    (sent,) = frame.features.sequences
    assert (sent.sequence_id, sent.position, list(sent.features.shape)) == (1, 3, [1, 64])
    talk.conversation.close([900])
    talk.said()
    talk.conversation.send_features([one])
    assert talk.said() == []


def test_no_answer_is_owed_for_features_but_a_failure_may_come(talk: Talk) -> None:
    talk.conversation.open(opening(7))
    talk.hear_opened(1)
    talk.conversation.send_features([SequenceFeatures(7, 0, vectors(128))])
    assert talk.conversation.silence == 0.0
    talk.conversation.receive(draft_pb2.ProposeResponse(status=failure_to_pb(1, Draining("soon gone"))))
    assert [failure.sequence_id for failure in talk.listener.failures] == [7]
    # The open's own.
    talk.conversation.receive(draft_pb2.ProposeResponse(status=failure_to_pb(1, Draining("again"))))
    with pytest.raises(CreditExceeded):
        talk.hear_opened(1)


def test_growth_that_features_gave_rise_to_is_paid_for(talk: Talk) -> None:
    talk.conversation.open(opening(7))
    for _ in range(100):
        talk.conversation.send_features([SequenceFeatures(7, 0, vectors(128))])
        talk.hear_growth(part(1))
    assert len(talk.listener.growths) == 100


def test_frames_with_features_stay_below_the_message_limit(talk: Talk) -> None:
    for number in range(1, 9):
        talk.conversation.open(opening(number))
    talk.said()
    most = vectors(MAX_FEATURE_BYTES)
    talk.conversation.send_features([SequenceFeatures(number, 0, most) for number in range(1, 9)])
    talk.conversation.advance([SequenceAdvance(number, 1, (5,), most) for number in range(1, 9)])
    frames = [frame for frame in talk.said() if frame.WhichOneof("frame") in ("features", "advance")]
    assert all(frame.ByteSize() < 4 << 20 for frame in frames)
    kinds = [frame.WhichOneof("frame") for frame in frames]
    assert kinds == ["features"] * 4 + ["advance"] * 4
    assert [part.sequence_id for frame in frames[4:] for part in frame.advance.sequences] == list(range(1, 9))


def test_no_frame_has_more_parts_than_a_draft_takes(talk: Talk) -> None:
    count = MAX_SEQUENCES_PER_FRAME + 3
    for number in range(count):
        talk.conversation.open(opening(number))
    talk.said()
    talk.conversation.advance([step(1, 20, sequence_id=number) for number in range(count)])
    advances = [frame.advance for frame in talk.said() if frame.HasField("advance")]
    assert [len(frame.sequences) for frame in advances] == [MAX_SEQUENCES_PER_FRAME, 3]
    for number in range(count, MAX_CLOSED_PER_FRAME + 3):
        talk.conversation.open(opening(number))
    talk.said()
    talk.conversation.close(range(MAX_CLOSED_PER_FRAME + 3))
    closes = [frame.close for frame in talk.said()]
    assert [len(frame.sequence_ids) for frame in closes] == [MAX_CLOSED_PER_FRAME, 3]
