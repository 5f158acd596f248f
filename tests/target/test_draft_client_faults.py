"""The link against a scripted draft service that is late, wrong, silent, greedy or gone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_draft import FAST, INFO, SERVICE_NAME, FakeDraft, eventually, growth, linked, serving, until
from scripted_drafter import VOCABULARY, Listener, opening, step

from outrider.drafting.link import GrpcDraftLink
from outrider.drafting.stream import CREDIT_WINDOW, DraftConversation
from outrider.errors import Draining, Unauthenticated
from outrider.serving import GrpcServer, Service, ServingOptions
from outrider.v1 import draft_pb2
from outrider.wire.drafts import failure_to_pb, info_to_pb
from outrider.wire.frames import DraftInfo, SequenceAdvance, SequenceFeatures, Vectors


@pytest.fixture
def fake() -> FakeDraft:
    return FakeDraft()


@pytest.mark.parametrize(
    "info",
    [replace(INFO, vocabulary_size=VOCABULARY + 1), replace(INFO, tokenizer_fingerprint="cd" * 32)],
    ids=["vocabulary", "tokenizer"],
)
async def test_a_draft_for_another_model_is_not_used_until_it_changes(fake: FakeDraft, info: DraftInfo) -> None:
    fake.info = info
    async with serving(fake) as server, linked(server.address, fingerprint="ab" * 32) as (link, heard):
        await until(heard, lambda it: it.losses)
        link.open(opening())
        await asyncio.sleep(0.2)
        # Said once, however often it is tried.
        assert len(heard.losses) == 1 and not heard.infos and not fake.streams
        fake.info = INFO
        await until(heard, lambda it: it.infos)


async def test_a_lost_draft_is_reported_and_met_again(fake: FakeDraft) -> None:
    async def end_at_once(frame: draft_pb2.ProposeRequest, _context: Any) -> object:
        return "end" if frame.HasField("open") else None

    fake.behave = end_at_once
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        await until(heard, lambda it: len(it.losses) == 1 and len(it.infos) == 2)
        assert "ended the stream" in heard.losses[0]
        fake.behave = fake.answer
        link.open(opening(1, step=9))
        await until(heard, lambda it: it.answered(1, 9))


async def test_a_draft_that_comes_late_is_found(fake: FakeDraft, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/draft.sock"
    async with linked(address) as (link, heard):
        await until(heard, lambda it: it.losses)
        link.open(opening())
        link.advance([step(1, 2)])
        link.close([1])
        async with serving(fake, address):
            await until(heard, lambda it: it.infos)
            await eventually(lambda: fake.streams and fake.streams[0])
            # What was said to nobody is not said to the next one.
            assert [frame.WhichOneof("frame") for frame in fake.streams[0]] == ["credit"]
        await until(heard, lambda it: len(it.losses) == 2)
        async with serving(fake, address):
            await until(heard, lambda it: len(it.infos) == 2)


async def flood(frame: draft_pb2.ProposeRequest, context: Any) -> None:
    if frame.HasField("open"):
        for number in range(20 * CREDIT_WINDOW):
            await context.write(growth(frame.open.sequence_id, 0, first_node_id=number + 1))


async def acknowledge_for_ever(frame: draft_pb2.ProposeRequest, context: Any) -> None:
    if frame.HasField("open"):
        for _ in range(9):
            await context.write(draft_pb2.ProposeResponse(opened=draft_pb2.SequenceOpened(sequence_id=1)))


async def refuse(_frame: draft_pb2.ProposeRequest, _context: Any) -> None:
    raise Unauthenticated("a token is required")


async def stay_silent(_frame: draft_pb2.ProposeRequest, _context: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        pytest.param(flood, "more than it has credit for", id="floods"),
        pytest.param(acknowledge_for_ever, "never sent", id="acknowledges for ever"),
        pytest.param(refuse, "UNAUTHENTICATED", id="refuses"),
        pytest.param(stay_silent, "no answer", id="is silent"),
    ],
)
async def test_a_draft_that_misbehaves_is_cut_off_and_tried_again(fake: FakeDraft, behave: Any, reason: str) -> None:
    fake.behave = behave
    options = replace(FAST, answer_timeout=0.2) if behave is stay_silent else FAST
    async with serving(fake) as server, linked(server.address, options) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))

        def told(it: Listener) -> bool:
            # A write that races with the end of its call may hide the status: then the next loss tells it.
            link.open(opening(1))
            return any(reason in loss for loss in it.losses)

        await until(heard, told)
        fake.behave = fake.answer
        link._options = FAST

        def answered(it: Listener) -> bool:
            # One that was connected before may still be cut off.
            link.open(opening(1, step=5))
            return it.answered(1, 5)

        await until(heard, answered)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
async def test_a_draft_with_a_bug_is_tried_again_ever_more_slowly(fake: FakeDraft, code: grpc.StatusCode) -> None:
    """It answered and failed at once, so that the target connected again at nearly every token."""

    async def fail(frame: draft_pb2.ProposeRequest, context: Any) -> None:
        if frame.HasField("open"):
            await context.write(draft_pb2.ProposeResponse(opened=draft_pb2.SequenceOpened(sequence_id=1)))
            await context.abort(code, "internal error")

    fake.behave = fail
    options = replace(FAST, fault_backoff=0.1, max_fault_backoff=60.0)
    async with serving(fake) as server, linked(server.address, options) as (link, heard):
        lost = 0.0
        for count in (1, 2, 3):
            await until(heard, lambda it, count=count: len(it.infos) == count)  # type: ignore[misc]
            begun = time.monotonic()
            link.open(opening(1))
            await until(heard, lambda it, count=count: len(it.losses) == count)  # type: ignore[misc]
            assert code.name in heard.losses[-1]
            # Half of the pause at the least, which is spread: it may be longer on a busy machine, and never shorter.
            assert begun - lost > 0.05 * (count - 1)
            lost = time.monotonic()


async def test_a_slow_draft_is_late_and_not_lost(fake: FakeDraft) -> None:
    may_answer = asyncio.Event()

    async def slowly(frame: draft_pb2.ProposeRequest, context: Any) -> object:
        await may_answer.wait()
        return await fake.answer(frame, context)

    fake.behave = slowly
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        # These return although nothing is answered yet.
        link.open(opening(1))
        for number in (1, 2, 3):
            link.advance([step(number, 20)])
        may_answer.set()
        await until(heard, lambda it: it.answered(1, 3))
        assert [growth.base_step for growth in heard.growths] == [0, 1, 2, 3] and heard.losses == []


async def test_a_silent_draft_that_owes_nothing_is_left_alone(fake: FakeDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations: list[DraftConversation] = []
    monkeypatch.setattr(GrpcDraftLink, "_watch", lambda link, one: conversations.append(one) or link._until_cut_off())
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        await eventually(lambda: conversations)
        link.open(opening(1))
        await until(heard, lambda it: it.answered(1, 0))
        # The acknowledgement and the tree may come apart.
        await eventually(lambda: conversations[0].silence == 0.0)
        assert heard.losses == []


async def test_bytes_that_are_no_message_end_the_stream() -> None:
    async def propose(_requests: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(b"\xff" * 30)

    async def info(_request: bytes, _context: Any) -> bytes:
        return info_to_pb(INFO).SerializeToString()

    handlers = {
        "Propose": grpc.stream_stream_rpc_method_handler(propose),
        "GetDraftInfo": grpc.unary_unary_rpc_method_handler(info),
    }
    handler = grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)
    service = Service(SERVICE_NAME, lambda server: server.add_generic_rpc_handlers((handler,)))
    server = GrpcServer(ServingOptions(), [service])
    await server.start()
    async with linked(server.address) as (_, heard):
        await until(heard, lambda it: len(it.losses) > 1)
        assert heard.losses[0] == "the draft sent bytes that are no message"
    await server.stop(0)


async def test_a_bad_growth_ends_its_own_sequence_only(fake: FakeDraft) -> None:
    async def spoil_the_first(frame: draft_pb2.ProposeRequest, context: Any) -> None:
        await fake.answer(frame, context)
        if frame.HasField("open") and frame.open.sequence_id == 1:
            await context.write(growth(1, 0, token_ids=[VOCABULARY]))

    fake.behave = spoil_the_first
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(10))
        link.open(opening(20))
        await until(heard, lambda it: it.failures and it.answered(20, 0))
        assert [(each.sequence_id, each.reason) for each in heard.failures] == [(10, "INVALID_FIELD")]
        link.advance([step(1, 5, sequence_id=10), step(1, 5, sequence_id=20)])
        await until(heard, lambda it: it.answered(20, 1))
        assert not heard.answered(10, 1) and heard.losses == []


async def test_a_failed_sequence_is_reported_under_its_own_id(fake: FakeDraft) -> None:
    async def fail(frame: draft_pb2.ProposeRequest, context: Any) -> None:
        if frame.HasField("open"):
            status = failure_to_pb(frame.open.sequence_id, Draining("soon gone"))
            await context.write(draft_pb2.ProposeResponse(status=status))

    fake.behave = fail
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(77))
        await until(heard, lambda it: it.failures)
        assert [(each.sequence_id, each.reason) for each in heard.failures] == [(77, "DRAINING")]


async def test_features_are_dropped_when_the_draft_reads_slowly(fake: FakeDraft) -> None:
    released = asyncio.Event()

    async def wait(frame: draft_pb2.ProposeRequest, context: Any) -> object:
        if frame.HasField("features"):
            await released.wait()
        return await fake.answer(frame, context)

    fake.behave = wait
    size, limit = 1 << 18, 1 << 20
    piece = Vectors("bfloat16", 128, bytes(size))
    options = replace(FAST, max_waiting_feature_bytes=limit)
    async with serving(fake) as server, linked(server.address, options) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening())
        for number in range(200):
            link.send_features([SequenceFeatures(1, number, piece)])
            await asyncio.sleep(0.001)
        link.advance([SequenceAdvance(1, 1, (5,), piece)])
        released.set()
        await until(heard, lambda it: it.answered(1, 1))
        frames = [frame.WhichOneof("frame") for frame in fake.streams[0]]
        # What transport and link hold, and no more; commits are never dropped, only what they bring along.
        assert 0 < frames.count("features") * size < 100 * size
        (advance,) = (frame.advance for frame in fake.streams[0] if frame.HasField("advance"))
        assert not advance.sequences[0].HasField("features")
        link.send_features([SequenceFeatures(1, 999, piece)])
        await eventually(
            lambda: any(part.position == 999 for frame in fake.streams[0] for part in frame.features.sequences)
        )
