"""Frames of a caller who means harm: each costs its own sequence or its own stream, and nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from draft_harness import Draft, Stream, draft_over
from scripted_drafter import ScriptedDrafter, opening
from waits import HUNG_SECONDS

from draft_service.drafters.base import DraftSequence
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.session import ProposeSession, SequenceAdmission
from outrider.errors import InvalidField, UnknownSequence
from outrider.v1 import draft_pb2
from outrider.wire.drafts import open_to_pb
from outrider.wire.frames import MAX_CLOSED_PER_FRAME, MAX_SEQUENCES_PER_FRAME, MAX_VOCABULARY
from outrider.wire.trees import error_of_rpc


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    async with draft_over() as running:
        yield running


@pytest.fixture(scope="module")
def trie() -> NgramDrafter:
    drafter = NgramDrafter(TrieConfig())
    drafter.start()
    return drafter


class FailingDrafter(ScriptedDrafter):
    """Meets a bug in one of its calls, at sequences of the seed 13."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call

    def _meet(self, call: str, sequence: DraftSequence) -> None:
        if call == self._call and sequence.seed == 13:
            raise OverflowError("a number that no array takes")

    def open(self, sequence: DraftSequence) -> None:
        self._meet("open", sequence)
        super().open(sequence)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        self._meet("advance", sequence)
        super().advance(sequence, committed)

    def close(self, sequence: DraftSequence) -> None:
        super().close(sequence)
        self._meet("close", sequence)


async def opened(stream: Stream, *sequence_ids: int, seed: int = 1) -> None:
    for sequence_id in sequence_ids:
        await stream.open(opening(sequence_id, seed=seed))
        await stream.opened()
        await stream.growth()


async def test_a_vocabulary_that_no_array_takes_is_refused(trie: NgramDrafter) -> None:
    """Its tokens overflowed the trie's, and the place that was taken for the sequence was lost for good."""
    async with draft_over(trie) as draft, draft.stream() as stream:
        for sequence_id, size in ((1, 2**32 - 1), (2, MAX_VOCABULARY + 1)):
            pb = open_to_pb(opening(sequence_id, [5], vocabulary_size=MAX_VOCABULARY))
            pb.vocabulary_size, pb.token_ids[0] = size, size - 1
            await stream.send(open=pb)
            number, error = await stream.failure()
            assert number == sequence_id and isinstance(error, InvalidField)
            assert error.field == "open.vocabulary_size"
        assert draft.worker.admission.sequences == 0


async def test_the_largest_token_there_can_be_is_drafted_for(trie: NgramDrafter) -> None:
    async with draft_over(trie) as draft, draft.stream() as stream:
        largest = MAX_VOCABULARY - 1
        await stream.open(opening(1, [largest, largest], vocabulary_size=MAX_VOCABULARY))
        await stream.opened()
        assert set((await stream.growth()).sequences[0].token_ids) == {largest}
        await stream.advance((1, 1, [largest]))
        assert set((await stream.growth()).sequences[0].token_ids) == {largest}


async def test_a_prompt_longer_than_is_followed_is_not_looked_at(draft: Draft) -> None:
    async with draft.stream() as stream:
        await stream.open(opening(1, [2**31] * 65))
        assert await stream.reason() == (1, "POSITION_OUT_OF_RANGE")


@pytest.mark.parametrize("call", ["open", "advance"])
async def test_a_bug_that_one_sequence_meets_ends_that_one(call: str, caplog: pytest.LogCaptureFixture) -> None:
    async with draft_over(FailingDrafter(call), max_sequences=2) as draft, draft.stream() as stream:
        await opened(stream, 1)
        await stream.open(opening(2, seed=13))
        if call == "advance":
            await stream.opened()
            await stream.growth()
            await stream.advance((2, 1, [20]))
        assert await stream.reason() == (2, "INTERNAL")
        assert draft.worker.admission.sequences == 1
        # The others of the stream go on, and there is room for another.
        await stream.advance((1, 1, [20]))
        assert [part.sequence_id for part in (await stream.growth()).sequences] == [1]
        await opened(stream, 3)
    assert "OverflowError" in caplog.text


async def test_a_bug_at_one_end_does_not_end_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async with draft_over(FailingDrafter("close"), max_sequences=2) as draft, draft.stream() as stream:
        await opened(stream, 1)
        await opened(stream, 2, seed=13)
        await stream.send(close=draft_pb2.CloseSequences(sequence_ids=[2]))
        await stream.advance((1, 1, [20]))
        assert [part.sequence_id for part in (await stream.growth()).sequences] == [1]
        assert draft.worker.admission.sequences == 1
        await opened(stream, 3, seed=13)
        # One that fails twice, at its advance and at its end, has its status.
        await stream.advance((3, 2, [20]))
        assert await stream.reason() == (3, "STEP_SKIPPED")
        await opened(stream, 4)
    assert "OverflowError" in caplog.text


def test_a_bug_at_one_end_leaves_no_sequence_open() -> None:
    drafter, admission = FailingDrafter("close"), SequenceAdmission(10)
    session = ProposeSession(drafter, admission, "default")
    for sequence_id, seed in ((1, 1), (2, 13), (3, 1)):
        session.open(opening(sequence_id, seed=seed))
    session.end()
    assert (len(session), admission.sequences, drafter.open_sequences) == (0, 0, set())


async def test_unknown_sequences_of_a_frame_are_told_of_once(draft: Draft) -> None:
    async with draft.stream() as stream:
        await opened(stream, 1)
        await stream.advance(*((100 + i, 1, [1]) for i in range(MAX_SEQUENCES_PER_FRAME - 1)), (1, 1, [20]))
        sequence_id, error = await stream.failure()
        assert sequence_id == 100 and isinstance(error, UnknownSequence)
        assert error.metadata["others"] == str(MAX_SEQUENCES_PER_FRAME - 2)
        assert [part.sequence_id for part in (await stream.growth()).sequences] == [1]


@pytest.mark.parametrize("kind", ["advance", "features", "close"])
async def test_a_frame_of_too_many_parts_ends_its_stream(draft: Draft, kind: str) -> None:
    """600,000 of them took the service 13 seconds and 800 MB; now they are counted before any is looked at."""
    many = range(1, 600_001)
    frames = {
        "advance": lambda: draft_pb2.AdvanceSequences(
            sequences=[draft_pb2.SequenceAdvance(sequence_id=i) for i in many]
        ),
        "features": lambda: draft_pb2.SendFeatures(sequences=[draft_pb2.SequenceFeatures(sequence_id=i) for i in many]),
        "close": lambda: draft_pb2.CloseSequences(sequence_ids=many),
    }
    async with draft.stream() as stream, draft.stream() as other:
        await opened(other, 1)
        await opened(stream, 1)
        await stream.send(**{kind: frames[kind]()})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.hear() is not grpc.aio.EOF:
                pass
        assert isinstance(error_of_rpc(caught.value), InvalidField)
        await other.advance((1, 1, [20]))
        await other.growth()
        async with asyncio.timeout(HUNG_SECONDS):
            while draft.worker.admission.sequences != 1:
                await asyncio.sleep(0.01)


async def test_as_many_parts_as_a_frame_may_have_are_taken(draft: Draft) -> None:
    async with draft.stream() as stream:
        await stream.send(close=draft_pb2.CloseSequences(sequence_ids=range(MAX_CLOSED_PER_FRAME)))
        await opened(stream, 1)
