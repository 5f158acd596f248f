"""The draft service over a real socket: frames in and out, and bad frames that hurt their own sequence only."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from draft_harness import PROPOSE, Draft, becomes, build_server, draft_over
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_drafter import VOCABULARY, ScriptedDrafter, opening
from waits import HUNG_SECONDS, until

from draft_service.config import DraftConfig
from draft_service.drafters.base import DraftSequence, info_of
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.server import SERVICE_NAME, DraftServicer
from draft_service.session import SequenceAdmission
from outrider import __version__, busy_polling
from outrider.busy_polling import BusyPolling
from outrider.errors import (
    InvalidField,
)
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.v1 import draft_pb2, tree_pb2
from outrider.wire.drafts import growth_from_pb, open_to_pb
from outrider.wire.frames import MAX_OUTSTANDING_CREDIT
from outrider.wire.trees import error_of_rpc


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    async with draft_over() as running:
        yield running


async def test_open_and_advance_are_answered(draft: Draft) -> None:
    async with draft.stream() as stream:
        await stream.open(opening(7))
        opened = await stream.opened()
        assert (opened.sequence_id, opened.limits.max_nodes) == (7, 4)
        first = (await stream.growth()).sequences[0]
        assert (first.sequence_id, first.base_step, first.first_node_id, first.replaces) == (7, 0, 1, True)
        assert list(first.token_ids) == [512, 13, 14, 15]
        await stream.advance((7, 1, [13, 14]))
        frame = await stream.hear()
        second = growth_from_pb(frame.growth.sequences[0], VOCABULARY)
        assert (second.base_step, second.token_ids) == (1, (514, 15, 16, 17))
        assert frame.timings.compute_nanoseconds > 0


async def test_one_advance_frame_is_answered_by_one_growth_frame(draft: Draft) -> None:
    async with draft.stream() as stream:
        for sequence_id in (1, 2, 3):
            await stream.open(opening(sequence_id))
            await stream.opened()
            await stream.growth()
        await stream.advance(*((sequence_id, 1, [20]) for sequence_id in (3, 1, 2)))
        assert [part.sequence_id for part in (await stream.growth()).sequences] == [3, 1, 2]


class Talkative:
    """A call whose target has said all that it will ever say: there is always a frame to read."""

    def __init__(self, *frames: draft_pb2.ProposeRequest) -> None:
        self._frames = iter(frames)
        self.growths = 0

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> Any:
        return next(self._frames, grpc.aio.EOF)

    async def write(self, response: draft_pb2.ProposeResponse) -> None:
        self.growths += response.WhichOneof("frame") == "growth"


def frames_of(steps: int) -> Iterator[draft_pb2.ProposeRequest]:
    """Credit, a sequence, and what so many steps commit of it."""
    yield draft_pb2.ProposeRequest(credit=draft_pb2.Credit(frames=500))
    yield draft_pb2.ProposeRequest(open=open_to_pb(opening()))
    for number in range(1, 1 + steps):
        advance = draft_pb2.SequenceAdvance(sequence_id=1, step=number, token_ids=[20])
        yield draft_pb2.ProposeRequest(advance=draft_pb2.AdvanceSequences(sequences=[advance]))


async def served(drafter: ScriptedDrafter, call: Talkative) -> None:
    """Serve a call until it has said all."""
    servicer = DraftServicer(drafter, SequenceAdmission(10, VOCABULARY), info_of(drafter, VOCABULARY, ""))
    try:
        await servicer.Propose(call, call)  # type: ignore[arg-type]
    finally:
        servicer.close()


async def test_growth_goes_out_though_a_frame_is_always_waiting() -> None:
    """Where the drafter works beside the event loop, frames come faster than they are handled."""
    drafter = ScriptedDrafter(max_context=4000)
    drafter.device = "cuda:0"  # type: ignore[attr-defined]
    call = Talkative(*frames_of(1000))
    await served(drafter, call)
    # One for every few frames that are taken at a time, and not one at the end.
    assert call.growths > 5


class Patient(Talkative):
    """One whose frames take turns of the event loop to be written, as gRPC's do."""

    async def write(self, response: draft_pb2.ProposeResponse) -> None:
        await super().write(response)
        for _ in range(5):
            await asyncio.sleep(0)


def noting_threads(drafter: ScriptedDrafter) -> list[threading.Thread]:
    """The threads that a drafter, as on a GPU, is asked for trees on, in order."""
    threads: list[threading.Thread] = []
    propose = drafter.propose

    def noting(sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        threads.append(threading.current_thread())
        return propose(sequences)

    drafter.device, drafter.propose = "cuda:0", noting  # type: ignore[attr-defined, method-assign]
    return threads


async def wait_for_frames(draft: Draft, streams: int) -> None:
    """Until the server has so many streams, and each waits for its next frame."""
    inboxes = draft.worker._streams
    await until(lambda: len(inboxes) == streams and all(inbox._queue._getters for inbox in inboxes))  # type: ignore


async def test_a_commit_that_was_waited_for_wakes_no_thread() -> None:
    drafter = ScriptedDrafter()
    threads = noting_threads(drafter)
    async with draft_over(drafter) as draft, draft.stream() as stream:
        await stream.open(opening(1))
        await stream.opened()
        await stream.growth()
        for number in range(1, 4):
            await wait_for_frames(draft, 1)
            await stream.advance((1, number, [20]))
            await stream.growth()
    assert threads[1:] == [threading.current_thread()] * 3


async def test_what_may_take_long_is_not_drafted_on_the_loop() -> None:
    """A prompt, and whatever comes while there is another stream, whose frames would not be read meanwhile."""
    drafter = ScriptedDrafter()
    threads = noting_threads(drafter)
    async with draft_over(drafter) as draft, draft.stream() as one:
        await one.open(opening(1))
        await one.opened()
        await one.growth()
        async with draft.stream() as other:
            await other.open(opening(1))
            await other.opened()
            await other.growth()
            for number in range(1, 4):
                for stream in (one, other):
                    await wait_for_frames(draft, 2)
                    await stream.advance((1, number, [20]))
                    await stream.growth()
        assert len(threads) == 8 and all(thread.name.startswith("drafter") for thread in threads)
        # The other stream has ended.
        await wait_for_frames(draft, 1)
        await one.advance((1, 4, [20]))
        await one.growth()
    assert threads[8:] == [threading.current_thread()]


async def test_frames_are_read_while_a_drafter_that_is_behind_works() -> None:
    """Or it would fall further behind with each call: gRPC hands out the frames of a stream one by one."""
    drafter = ScriptedDrafter(max_context=4000)
    threads = noting_threads(drafter)
    await served(drafter, Patient(*frames_of(300)))
    assert len(threads) > 3 and all(thread.name.startswith("drafter") for thread in threads[1:])


async def test_nothing_is_drafted_on_the_loop_while_the_thread_is_at_work() -> None:
    """One call at a time, also where the one before was given up on."""
    drafter, working, go_on, done = ScriptedDrafter(), threading.Event(), threading.Event(), []
    noting_threads(drafter)
    servicer = DraftServicer(drafter, SequenceAdmission(10, VOCABULARY), info_of(drafter, VOCABULARY, ""))

    def slow() -> None:
        working.set()
        assert go_on.wait(HUNG_SECONDS)
        done.append("slow")

    try:
        first = asyncio.create_task(servicer._on_drafter(slow))
        await asyncio.to_thread(working.wait, HUNG_SECONDS)
        first.cancel()
        later = asyncio.create_task(servicer._at_once(done.append, "later"))
        await asyncio.sleep(0.02)
        assert done == []
        go_on.set()
        await later
        assert done == ["slow", "later"]
        await servicer._at_once(lambda: done.append(threading.current_thread().name))
        assert done[2:] == [threading.current_thread().name]
    finally:
        servicer.close()


async def test_growth_waits_for_credit_and_then_is_the_newest(draft: Draft) -> None:
    async with draft.stream(credit=0) as stream:
        await stream.open(opening())
        await stream.opened()
        for number in range(1, 6):
            await stream.advance((1, number, [20 + number]))
        await stream.credit(1)
        frame = await stream.hear()
        assert [part.base_step for part in frame.growth.sequences] == [5]
        assert frame.timings.queue_nanoseconds > 0


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ((1, 1, []), "INVALID_FIELD"),
        ((1, 1, [VOCABULARY]), "INVALID_FIELD"),
        ((1, 1, [2**32 - 1]), "INVALID_FIELD"),
        ((1, 1, [1] * 257), "INVALID_FIELD"),
        ((1, 2, [1]), "STEP_SKIPPED"),
        ((1, 2**63, [1]), "STEP_SKIPPED"),
        ((99, 1, [1]), "UNKNOWN_SEQUENCE"),
        ((1, 1, [1] * 62), "POSITION_OUT_OF_RANGE"),
    ],
    ids=["empty", "vocabulary", "-1", "oversize", "skipped", "far ahead", "nobody's", "too long"],
)
async def test_a_bad_advance_ends_its_own_sequence_only(
    draft: Draft, part: tuple[int, int, list[int]], reason: str
) -> None:
    async with draft.stream() as stream:
        for sequence_id in (1, 2):
            await stream.open(opening(sequence_id))
            await stream.opened()
            await stream.growth()
        await stream.advance(part, (2, 1, [20]))
        assert await stream.reason() == (part[0], reason)
        growth = await stream.growth()
        assert [each.sequence_id for each in growth.sequences] == [2]
        if part[0] == 1:
            await stream.advance((1, 1, [20]))
            assert await stream.reason() == (1, "UNKNOWN_SEQUENCE")


async def test_a_step_behind_is_aborted(draft: Draft) -> None:
    async with draft.stream() as stream:
        await stream.open(opening(step=5))
        await stream.opened()
        await stream.growth()
        await stream.advance((1, 4, [1]))
        frame = await stream.hear()
        assert frame.status.status.code == grpc.StatusCode.ABORTED.value[0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": []}, "open.token_ids"),
        ({"token_ids": [VOCABULARY]}, "open.token_ids[0]"),
        ({"prompt_length": 9}, "open.prompt_length"),
        ({"tenant": "../x"}, "open.tenant"),
        ({"mode": 99}, "open.mode"),
        ({"sampling": tree_pb2.SamplingParameters(temperature=float("nan"))}, "open.sampling.temperature"),
    ],
    ids=["empty", "out of range", "prompt length", "tenant", "mode", "sampling"],
)
async def test_a_bad_open_is_refused_with_its_field(draft: Draft, change: dict[str, Any], field: str) -> None:
    async with draft.stream() as stream:
        pb = open_to_pb(opening(3))
        for name in change:
            pb.ClearField(name)
        pb.MergeFrom(draft_pb2.OpenSequence(**change))
        await stream.send(open=pb)
        sequence_id, error = await stream.failure()
        assert sequence_id == 3 and isinstance(error, InvalidField) and error.field == field
        await stream.open(opening(3))
        await stream.opened()


async def test_an_id_opened_twice_is_closed(draft: Draft) -> None:
    async with draft.stream() as stream:
        await stream.open(opening())
        await stream.opened()
        await stream.growth()
        await stream.open(opening())
        assert await stream.reason() == (1, "SEQUENCE_EXISTS")
        await draft.empty()


async def test_another_vocabulary_is_refused() -> None:
    async with draft_over(vocabulary_size=VOCABULARY) as draft, draft.stream() as stream:
        await stream.open(replace(opening(), vocabulary_size=VOCABULARY + 1))
        assert await stream.reason() == (1, "WRONG_VOCABULARY")


@pytest.mark.parametrize(
    "wire", [b"", b"\x12\xff\x01", b"\xff" * 40, b"\x7a\x00"], ids=["empty", "cut off", "noise", "unknown frame"]
)
async def test_bytes_that_are_no_frame_end_their_stream_only(draft: Draft, wire: bytes) -> None:
    async with draft.stream() as good:
        await good.open(opening())
        await good.opened()
        await good.growth()
        bad = draft.channel.stream_stream(PROPOSE)()
        await bad.write(wire)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await good.advance((1, 1, [20]))
        assert (await good.growth()).sequences[0].base_step == 1


async def test_too_much_credit_ends_the_stream(draft: Draft) -> None:
    async with draft.stream(credit=MAX_OUTSTANDING_CREDIT + 1) as stream:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.hear()
        error = error_of_rpc(caught.value)
        assert isinstance(error, InvalidField) and error.field == "credit.frames"


@pytest.mark.parametrize("how", ["cancelled", "half closed", "closed"])
async def test_however_a_stream_ends_nothing_stays(draft: Draft, how: str) -> None:
    async with draft.stream() as stream:
        for sequence_id in range(5):
            await stream.open(opening(sequence_id))
            await stream.opened()
            await stream.growth()
        assert len(draft.drafter.open_sequences) == 5
        if how == "cancelled":
            stream.call.cancel()
        elif how == "half closed":
            await stream.call.done_writing()
            assert await stream.hear() is grpc.aio.EOF
        else:
            await stream.send(close=draft_pb2.CloseSequences(sequence_ids=[0, 1, 2, 3, 4, 99, 0]))
        await draft.empty()


async def test_a_bug_at_a_tree_ends_its_sequences_without_its_text(
    draft: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    draft.drafter.fails = True
    async with draft.stream(credit=1) as stream:
        # More often than there is credit: a frame that does not come costs none.
        for number in range(3):
            await stream.open(opening(number))
            await stream.opened()
            sequence_id, error = await stream.failure()
            assert (sequence_id, error.reason) == (number, "INTERNAL") and "bug" not in error.message
        await draft.empty()
        draft.drafter.fails = False
        await stream.open(opening(9))
        await stream.opened()
        assert [part.sequence_id for part in (await stream.growth()).sequences] == [9]
    # Once with its traceback, and then counted.
    assert len(caplog.records) == 1 and caplog.records[0].exc_info
    assert "the drafter scripted" in caplog.text and "IndexError: a bug in the drafter" in caplog.text


@pytest.mark.parametrize(
    "result",
    [
        None,
        [],
        [None],
        [TokenTree((12, 1), (0, "root"), (1.0, 0.5))],  # type: ignore[arg-type]
        [TokenTree((12, 1), (0, 0), (1.0, "likely"))],  # type: ignore[arg-type]
    ],
    ids=["none", "too-few", "no-tree", "parents", "scores"],
)
async def test_what_is_no_tree_ends_its_sequence_only(draft: Draft, result: object) -> None:
    right = draft.drafter.propose
    async with draft.stream(credit=1) as stream:
        draft.drafter.propose = lambda _: result
        await stream.open(opening(1))
        await stream.opened()
        assert await stream.reason() == (1, "INTERNAL")
        draft.drafter.propose = right
        await stream.open(opening(2))
        await stream.opened()
        assert [part.sequence_id for part in (await stream.growth()).sequences] == [2]


async def test_a_bug_of_a_drafter_of_arrays_ends_its_sequences_only() -> None:
    drafter = NgramDrafter(TrieConfig())
    drafter.start()
    right = drafter.start_trees

    def wrong(_: object) -> Any:
        raise OverflowError("a number that no array takes")

    async with draft_over(drafter) as draft, draft.stream(credit=1) as stream:
        drafter.start_trees = wrong  # type: ignore[method-assign]
        await stream.open(opening(1))
        await stream.opened()
        assert await stream.reason() == (1, "INTERNAL")
        drafter.start_trees = right  # type: ignore[method-assign]
        await stream.open(opening(2))
        await stream.opened()
        await stream.growth()
        assert draft.worker.admission.sequences == 1


async def test_sequences_of_one_stream_are_unknown_to_another(draft: Draft) -> None:
    async with draft.stream() as one, draft.stream() as other:
        await one.open(opening(5))
        await one.opened()
        await other.advance((5, 1, [20]))
        assert await other.reason() == (5, "UNKNOWN_SEQUENCE")
        await other.send(close=draft_pb2.CloseSequences(sequence_ids=[5]))
        await one.growth()
        await one.advance((5, 1, [20]))
        assert (await one.growth()).sequences[0].base_step == 1


async def test_info_says_what_is_served() -> None:
    async with draft_over(vocabulary_size=VOCABULARY, tokenizer_fingerprint="ab" * 32) as draft:
        info = await draft.stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
        assert (info.drafter, info.vocabulary_size, info.tokenizer_fingerprint) == ("scripted", 1000, "ab" * 32)
        assert (info.limits.max_nodes, info.max_context, info.version) == (4, 64, __version__)
        assert not info.HasField("features")


async def test_the_tokenizer_of_a_head_is_told() -> None:
    drafter = ScriptedDrafter()
    drafter.tokenizer_fingerprint = "cd" * 32  # type: ignore[attr-defined]
    for own, told in (("", "cd" * 32), ("ab" * 32, "ab" * 32)):
        async with draft_over(drafter, vocabulary_size=VOCABULARY, tokenizer_fingerprint=own) as draft:
            info = await draft.stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
            assert info.tokenizer_fingerprint == told


async def test_health_is_told_per_service(draft: Draft) -> None:
    health = health_pb2_grpc.HealthStub(draft.channel)
    for name in ("", SERVICE_NAME):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_draining_refuses_new_sequences_and_waits_for_open_ones(draft: Draft) -> None:
    async with draft.stream() as stream:
        await stream.open(opening(1))
        await stream.opened()
        await stream.growth()
        draining = asyncio.create_task(draft.worker.drain())
        await asyncio.sleep(0.01)
        await stream.open(opening(2))
        assert await stream.reason() == (2, "DRAINING")
        assert not draining.done()
        await stream.send(close=draft_pb2.CloseSequences(sequence_ids=[1]))
        async with asyncio.timeout(HUNG_SECONDS):
            await draining


async def test_streams_end_once_all_has_drained(draft: Draft) -> None:
    """A target keeps its stream open without sequences: the service would wait for it until its grace is over."""
    async with draft.stream() as stream, draft.stream() as other:
        await stream.open(opening(1))
        await stream.opened()
        await stream.send(close=draft_pb2.CloseSequences(sequence_ids=[1]))
        async with asyncio.timeout(HUNG_SECONDS):
            await draft.worker.drain()
        for one in (stream, other):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await one.hear() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def figure(draft: Draft, name: str) -> float:
    """Sum of a metric's samples, counters and gauges alike."""
    families = {family.name: family for family in draft.metrics.families.collect()}
    return sum(sample.value for sample in families[name].samples)


async def test_what_is_counted_in_is_counted_out(draft: Draft) -> None:
    async with draft.stream() as stream:
        for sequence_id in range(4):
            await stream.open(opening(sequence_id))
            await stream.opened()
            await stream.growth()
        await becomes(lambda: figure(draft, "outrider_draft_sequences"), 4)
        await stream.advance((0, 9, [1]), (1, 1, [13]))
        assert await stream.reason() == (0, "STEP_SKIPPED")
        await stream.growth()
        await stream.open(opening(1))
        assert await stream.reason() == (1, "SEQUENCE_EXISTS")
        await stream.send(close=draft_pb2.CloseSequences(sequence_ids=[2]))
    await draft.empty()
    assert figure(draft, "outrider_draft_sequences") == figure(draft, "outrider_draft_streams") == 0
    assert figure(draft, "outrider_draft_sequences_opened") == 4
    assert figure(draft, "outrider_draft_sequences_closed") == 4
    assert figure(draft, "outrider_draft_sequences_failed") == 2
    assert figure(draft, "outrider_draft_committed_tokens") == 1


async def test_a_stream_that_ends_while_its_drafter_works_is_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cancelled call still has at work on the drafter's thread goes before its end."""
    monkeypatch.setattr(DraftServicer, "_at_once", DraftServicer._on_drafter)
    drafter, working, go_on = ScriptedDrafter(), threading.Event(), threading.Event()
    opened = drafter.open

    def slow(sequence: DraftSequence) -> None:
        working.set()
        assert go_on.wait(HUNG_SECONDS)
        opened(sequence)

    drafter.device, drafter.open = "cuda", slow  # type: ignore[attr-defined, method-assign]
    async with draft_over(drafter) as draft:
        async with draft.stream() as stream:
            await stream.open(opening(1))
            assert await asyncio.to_thread(working.wait, HUNG_SECONDS)
            assert figure(draft, "outrider_draft_streams") == 1
        # The cancellation has come by the time that a later call is answered.
        await draft.stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
        await asyncio.sleep(0.05)
        go_on.set()
        async with asyncio.timeout(HUNG_SECONDS):
            while figure(draft, "outrider_draft_streams"):
                await asyncio.sleep(0.002)
        await draft.empty()
        assert figure(draft, "outrider_draft_sequences") == 0
        assert figure(draft, "outrider_draft_sequences_opened") == figure(draft, "outrider_draft_sequences_closed") == 1
        draft.worker.close()


async def test_the_drafter_is_stopped_behind_its_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftServicer, "_at_once", DraftServicer._on_drafter)
    drafter, calls = ScriptedDrafter(), []
    close, working = drafter.close, threading.Event()

    def slow(sequence: DraftSequence) -> None:
        working.set()
        time.sleep(0.1)
        close(sequence)
        calls.append("closed")

    drafter.device, drafter.close = "cuda", slow  # type: ignore[attr-defined, method-assign]
    async with draft_over(drafter) as draft, draft.stream() as stream:
        await stream.open(opening(1))
        await stream.opened()
        await stream.send(close=draft_pb2.CloseSequences(sequence_ids=[1]))
        assert await asyncio.to_thread(working.wait, HUNG_SECONDS)
        draft.worker.close()
        assert calls == ["closed"]


@pytest.mark.parametrize(
    ("device", "cores", "busy_poll_ms", "seconds"),
    [("cuda:0", 16, 10.0, 0.01), ("cuda:0", 4, 10.0, 0.0), ("cuda:0", 16, 0.0, 0.0), ("cpu", 16, 10.0, 0.0)],
    ids=["polling", "few cores", "turned off", "on a CPU"],
)
async def test_the_service_polls_after_a_frame(
    device: str, cores: int, busy_poll_ms: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[float] = []
    monkeypatch.setattr(BusyPolling, "start", lambda self: started.append(self.seconds))
    monkeypatch.setattr(busy_polling, "usable_cores", lambda: cores)
    drafter = ScriptedDrafter()
    drafter.device = device  # type: ignore[attr-defined]
    async with draft_over(drafter, busy_poll_ms=busy_poll_ms) as draft, draft.stream() as stream:
        await stream.open(opening(1))
        await stream.opened()
        await stream.growth()
        # Its growth comes once the first frame is done with.
        await stream.advance((1, 1, [20]))
        await stream.growth()
    assert set(started) == {seconds}


async def test_settings_that_contradict_the_drafter_are_refused() -> None:
    drafter = ScriptedDrafter()
    drafter.vocabulary_size = 7
    with pytest.raises(SettingsError, match="vocabulary_size"):
        build_server(DraftConfig(vocabulary_size=8), drafter)
