"""The state of one stream: one growth per open and advance, steps in order, credit, and nothing left behind."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_drafter import VOCABULARY, ScriptedDrafter, opening, step

from benchmarks.drafters.random_trees import RANDOM
from draft_service.drafters.base import DraftSequence, create
from draft_service.faults import DrafterFailed
from draft_service.session import ProposeSession, SequenceAdmission
from outrider.errors import (
    InvalidField,
    OutriderError,
    PositionOutOfRange,
    SequenceExists,
    StepReplayed,
    StepSkipped,
    UnknownCorpus,
    UnknownSequence,
)
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.drafts import growth_from_pb, growth_to_pb
from outrider.wire.frames import MAX_OUTSTANDING_CREDIT, MAX_SEQUENCES_PER_FRAME, ROOT_ID, SequenceGrowth, TreeLimits


def make(
    drafter: ScriptedDrafter | None = None, admission: SequenceAdmission | None = None, credit: int = 100
) -> ProposeSession:
    session = ProposeSession(drafter or ScriptedDrafter(), admission or SequenceAdmission(10_000), "default")
    session.grant(credit)
    return session


def only(growths: list[SequenceGrowth]) -> SequenceGrowth:
    assert len(growths) == 1
    return growths[0]


def test_open_and_every_advance_are_answered_by_one_growth() -> None:
    session = make()
    session.open(opening())
    first = only(session.propose_growth())
    assert (first.sequence_id, first.base_step, first.first_node_id, first.replaces) == (1, 0, 1, True)
    assert first.token_ids == (512, 13, 14, 15) and first.parent_ids == (ROOT_ID, ROOT_ID, 2, 3)
    assert session.propose_growth() == []
    session.advance(step(1, 13, 14))
    second = only(session.propose_growth())
    assert (second.base_step, second.first_node_id) == (1, 5)
    assert second.token_ids == (514, 15, 16, 17) and second.parent_ids == (ROOT_ID, ROOT_ID, 6, 7)
    assert session.propose_growth() == []


def test_an_empty_guess_is_an_answer_too() -> None:
    session = make(ScriptedDrafter(nodes=0))
    session.open(opening())
    empty = only(session.propose_growth())
    assert empty.token_ids == () and empty.replaces and empty.first_node_id == 1


def test_distributions_name_node_ids() -> None:
    session = make()
    session.open(opening(mode=VerificationMode.REJECTION, sampling=SamplingParams(temperature=1.0)))
    session.propose_growth()
    session.advance(step(1, 13))
    growth = only(session.propose_growth())
    assert set(growth.distributions) == {ROOT_ID, growth.first_node_id + 1}


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (TreeLimits(), TreeLimits(4, 4)),
        (TreeLimits(2, 0), TreeLimits(2, 4)),
        (TreeLimits(200, 1), TreeLimits(4, 1)),
    ],
    ids=["left to the draft", "smaller", "larger"],
)
def test_limits_are_the_smaller_of_asked_and_offered(asked: TreeLimits, kept: TreeLimits) -> None:
    assert make().open(opening(limits=asked)).limits == kept


def test_many_sequences_are_drafted_in_one_batch() -> None:
    drafter = ScriptedDrafter()
    session = make(drafter)
    for sequence_id in range(1, 6):
        session.open(opening(sequence_id, [sequence_id]))
    growths = session.propose_growth()
    assert [growth.sequence_id for growth in growths] == [1, 2, 3, 4, 5]
    assert drafter.batches == [5] and session.credit == 99


def test_a_frame_holds_a_bounded_number_of_sequences() -> None:
    session = make()
    for sequence_id in range(MAX_SEQUENCES_PER_FRAME + 3):
        session.open(opening(sequence_id))
    assert [len(session.propose_growth()) for _ in range(3)] == [MAX_SEQUENCES_PER_FRAME, 3, 0]


def test_a_call_drafts_for_no_more_sequences_than_the_drafter_takes_at_once() -> None:
    drafter = ScriptedDrafter()
    drafter.most_sequences = 2  # type: ignore[attr-defined]
    session = make(drafter)
    for number in range(5):
        session.open(opening(number))
    session.grant(5)
    while session.propose_growth():
        pass
    assert drafter.batches == [2, 2, 1]


@pytest.mark.parametrize(("most", "batches"), [(None, [3]), (0, [1, 1, 1]), (10**6, [3])])
def test_a_drafter_of_ones_own_may_say_nothing_or_nonsense_of_that(most: int | None, batches: list[int]) -> None:
    """Such a drafter need not inherit anything."""
    drafter = ScriptedDrafter()
    if most is not None:
        drafter.most_sequences = most  # type: ignore[attr-defined]
    session = make(drafter)
    for number in range(3):
        session.open(opening(number))
    session.grant(5)
    while session.propose_growth():
        pass
    assert drafter.batches == batches


def test_the_same_step_again_is_ignored() -> None:
    session = make()
    session.open(opening(step=4))
    session.advance(step(5, 13))
    session.propose_growth()
    session.advance(step(5, 99))
    assert session.propose_growth() == []
    session.advance(step(6, 14))
    assert only(session.propose_growth()).token_ids[1] == 15


@pytest.mark.parametrize(
    ("number", "error"), [(3, StepReplayed), (6, StepSkipped), (0, StepReplayed), (2**63, StepSkipped)]
)
def test_steps_out_of_order_are_refused_and_change_nothing(number: int, error: type[OutriderError]) -> None:
    session = make()
    session.open(opening(step=4))
    session.propose_growth()
    with pytest.raises(error):
        session.advance(step(number, 13))
    assert session.propose_growth() == []
    session.advance(step(5, 13))
    assert only(session.propose_growth()).base_step == 5


def test_an_advance_of_nobody_is_refused() -> None:
    session = make()
    for sequence_id in (0, 1, 2**64 - 1):
        with pytest.raises(UnknownSequence):
            session.advance(step(1, 13, sequence_id=sequence_id))
        with pytest.raises(UnknownSequence):
            session.vocabulary_of(sequence_id)


def test_an_id_in_use_is_refused() -> None:
    session = make()
    session.open(opening())
    with pytest.raises(SequenceExists):
        session.open(opening())


def test_a_closed_id_may_be_used_again() -> None:
    session = make()
    session.open(opening())
    session.close([1, 1, 2])
    assert session.propose_growth() == []
    session.open(opening(token_ids=[20]))
    assert only(session.propose_growth()).first_node_id == 1


def test_the_longest_context_is_kept() -> None:
    session = make(ScriptedDrafter(max_context=4))
    with pytest.raises(PositionOutOfRange):
        session.open(opening(1, range(5)))
    session.open(opening(2, range(4)))
    with pytest.raises(PositionOutOfRange):
        session.advance(step(1, 9, sequence_id=2))


def test_what_the_drafter_refuses_is_not_counted_in() -> None:
    drafter, admission = ScriptedDrafter(), SequenceAdmission(1)
    session = make(drafter, admission)
    drafter.refuses = UnknownCorpus("no such corpus")
    with pytest.raises(UnknownCorpus):
        session.open(opening(corpus="nowhere"))
    drafter.refuses = None
    session.open(opening())
    assert admission.sequences == len(session) == 1


def test_tokens_that_the_target_has_no_id_for_are_pruned_with_what_hangs_below() -> None:
    class Wide(ScriptedDrafter):
        def propose(self, sequences: list[DraftSequence]) -> list[TokenTree]:
            return [TokenTree((1, 5, 2000, 6, 7), (0, 0, 0, 2, 1), (1.0, 0.5, 0.4, 0.3, 0.2))] * len(sequences)

    session = make(Wide())
    session.open(opening())
    growth = only(session.propose_growth())
    assert (growth.token_ids, growth.parent_ids, growth.scores) == ((5, 7), (0, 1), (0.5, 0.2))


class TestCredit:
    def test_nothing_is_sent_without_credit(self) -> None:
        session = make(credit=0)
        session.open(opening())
        assert session.propose_growth() == []
        session.grant(1)
        assert len(session.propose_growth()) == 1

    def test_what_piles_up_is_one_growth_per_sequence_of_the_newest_step(self) -> None:
        drafter = ScriptedDrafter()
        session = make(drafter, credit=0)
        for sequence_id in (1, 2):
            session.open(opening(sequence_id))
        for number in range(1, 6):
            session.advance(step(number, 12 + number))
        session.grant(3)
        growths = session.propose_growth()
        assert [(growth.sequence_id, growth.base_step) for growth in growths] == [(1, 5), (2, 0)]
        assert session.propose_growth() == [] and drafter.batches == [2] and session.credit == 2

    def test_more_than_may_be_outstanding_is_refused(self) -> None:
        session = make(credit=MAX_OUTSTANDING_CREDIT)
        with pytest.raises(InvalidField) as caught:
            session.grant(1)
        assert caught.value.field == "credit.frames" and session.credit == MAX_OUTSTANDING_CREDIT


def test_the_end_of_a_stream_frees_everything() -> None:
    drafter, admission = ScriptedDrafter(), SequenceAdmission(99)
    session = make(drafter, admission)
    for sequence_id in range(20):
        session.open(opening(sequence_id))
    session.end()
    assert not drafter.open_sequences and admission.sequences == len(session) == 0
    assert session.propose_growth() == []


frames = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 4), st.integers(0, 3)),
        st.tuples(st.just("advance"), st.integers(0, 4), st.integers(0, 6)),
        st.tuples(st.just("close"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("credit"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@examples(150)
@given(frames)
def test_whatever_comes_in_whatever_order_the_books_balance(events: list[tuple[str, int, int]]) -> None:
    """Random frames against the random drafter: ids never repeat, growth is sound, counts agree."""
    drafter, admission = create(RANDOM), SequenceAdmission(3)
    session = ProposeSession(drafter, admission, "default")
    last_id: dict[int, int] = {}
    steps: dict[int, int] = {}
    for kind, sequence_id, number in events:
        try:
            if kind == "open":
                session.open(opening(sequence_id, step=number))
                steps[sequence_id], last_id[sequence_id] = number, 0
            elif kind == "advance":
                session.advance(step(number, 7, sequence_id=sequence_id))
                steps[sequence_id] = number
            elif kind == "close":
                session.close([sequence_id])
            elif kind == "credit":
                session.grant(sequence_id)
        except OutriderError:
            session.close([sequence_id])
        if kind == "take":
            before = session.credit
            growths = session.propose_growth()
            assert session.credit == before - bool(growths)
            for growth in growths:
                assert growth_from_pb(growth_to_pb(growth), VOCABULARY).token_ids == growth.token_ids
                assert growth.base_step == steps[growth.sequence_id]
                assert growth.first_node_id == last_id[growth.sequence_id] + 1
                last_id[growth.sequence_id] += len(growth.token_ids)
        assert admission.sequences == len(session) <= 3
    session.end()
    assert admission.sequences == 0


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "scripted.propose returned NoneType, not 2 trees"),
        ([], "scripted.propose returned 0 trees, not 2 trees"),
        ([TokenTree.root_only(1), "a"], "scripted.propose returned str in place 1, not a TokenTree"),
    ],
    ids=["none", "too-few", "no-tree"],
)
def test_a_result_that_is_no_trees_is_named(result: object, said: str) -> None:
    drafter = ScriptedDrafter()
    session = make(drafter, credit=1)
    session.open(opening(1))
    session.open(opening(2))
    drafter.propose = lambda _: result  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(DrafterFailed, match=said) as caught:
        session.propose_growth()
    assert caught.value.sequence_ids == [1, 2] and len(session) == 2
    # The target still counts the frame that did not come.
    assert session.credit == 1
