"""The link against a scripted draft service on a real server: it connects, checks, delivers, gives up, comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from draft_harness import draft_over
from scripted_drafter import VOCABULARY, Listener, opening, step

from draft_service.drafter import create
from outrider.draft_wire import failure_to_pb, info_to_pb
from outrider.errors import Draining, Unauthenticated
from outrider.frames import DraftInfo, TreeLimits
from outrider.serving import GrpcServer, Service, ServingOptions
from outrider.v1 import draft_pb2, draft_pb2_grpc
from target_service.draft_client import GrpcDraftLink, LinkOptions, connect_draft
from target_service.draft_stream import CREDIT_WINDOW

SERVICE_NAME = "outrider.v1.DraftService"
INFO = DraftInfo("fake", VOCABULARY, "ab" * 32, TreeLimits(63, 8), 1024, "9")
FAST = LinkOptions(min_backoff=0.01, max_backoff=0.05, connect_timeout=0.5)


class FakeDraft(draft_pb2_grpc.DraftServiceServicer):
    """Records what it hears, and behaves as the test says: `behave(frame, context)` is called per frame."""

    def __init__(self) -> None:
        self.info = INFO
        self.streams: list[list[draft_pb2.ProposeRequest]] = []
        self.behave: Callable[[draft_pb2.ProposeRequest, Any], Awaitable[object]] = self.answer

    async def GetDraftInfo(self, _request: Any, _context: Any) -> draft_pb2.GetDraftInfoResponse:
        return info_to_pb(self.info)

    async def Propose(self, _requests: Any, context: Any) -> None:
        heard: list[draft_pb2.ProposeRequest] = []
        self.streams.append(heard)
        while (frame := await context.read()) is not grpc.aio.EOF:
            heard.append(frame)
            if await self.behave(frame, context) == "end":
                return

    async def answer(self, frame: draft_pb2.ProposeRequest, context: Any) -> object:
        """As a draft should, with one node per growth."""
        if frame.HasField("open"):
            opened = draft_pb2.SequenceOpened(sequence_id=frame.open.sequence_id)
            await context.write(draft_pb2.ProposeResponse(opened=opened))
            await context.write(growth(frame.open.sequence_id, frame.open.step))
        if frame.HasField("advance"):
            for each in frame.advance.sequences:
                await context.write(growth(each.sequence_id, each.step))
        return None


def growth(wire_id: int, base_step: int, **fields: Any) -> draft_pb2.ProposeResponse:
    whole = {"first_node_id": base_step + 1, "parent_ids": [0], "token_ids": [7], "scores": [0.5]}
    part = draft_pb2.SequenceGrowth(sequence_id=wire_id, base_step=base_step, **(whole | fields))
    return draft_pb2.ProposeResponse(growth=draft_pb2.GrowSequences(sequences=[part]))


@asynccontextmanager
async def serving(fake: FakeDraft, listen: str = "127.0.0.1:0", **options: Any) -> AsyncIterator[GrpcServer]:
    service = Service(SERVICE_NAME, lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(fake, server))
    server = GrpcServer(ServingOptions(listen=listen, **options), [service])
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def linked(address: str, options: LinkOptions = FAST, fingerprint: str = "") -> AsyncIterator[Any]:
    listener = Listener()
    link = GrpcDraftLink(address, listener, VOCABULARY, fingerprint, options)
    try:
        yield link, listener
    finally:
        await asyncio.to_thread(link.stop)


async def until(listener: Listener, condition: Callable[[Listener], object]) -> None:
    """The listener's own wait blocks, and the fake service lives on this thread's loop."""
    await asyncio.to_thread(listener.until, condition)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def fake() -> FakeDraft:
    return FakeDraft()


async def test_what_is_asked_is_answered(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        assert heard.infos == [INFO]
        link.open(opening(42, step=3))
        await until(heard, lambda it: it.answered(42, 3))
        link.advance([step(4, 20, sequence_id=42)])
        await until(heard, lambda it: it.answered(42, 4))
        assert heard.failures == heard.losses == []


async def test_one_call_is_one_frame_in_order(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        await eventually(lambda: fake.streams)
        for sequence_id in (1, 2, 3):
            link.open(opening(sequence_id))
        for number in range(1, 30):
            link.advance([step(number, 20, sequence_id=sequence_id) for sequence_id in (1, 2, 3)])
        link.close([1, 2])
        await eventually(lambda: any(frame.HasField("close") for frame in fake.streams[0]))
        kinds = [frame.WhichOneof("frame") for frame in fake.streams[0]]
        assert [kind for kind in kinds if kind != "credit"] == ["open"] * 3 + ["advance"] * 29 + ["close"]
        advances = [frame.advance.sequences for frame in fake.streams[0] if frame.HasField("advance")]
        assert all([part.step for part in parts] == [i + 1] * 3 for i, parts in enumerate(advances))


async def test_a_long_conversation_never_runs_out_of_credit(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        for number in range(1, 5 * CREDIT_WINDOW):
            link.advance([step(number, 20)])
            await until(heard, lambda it, number=number: it.answered(1, number))
        assert heard.losses == []


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


@pytest.mark.parametrize(("vocabulary_size", "fingerprint"), [(0, ""), (VOCABULARY, "")], ids=["any", "size only"])
async def test_a_draft_that_takes_any_model_is_used(fake: FakeDraft, vocabulary_size: int, fingerprint: str) -> None:
    fake.info = replace(INFO, vocabulary_size=vocabulary_size, tokenizer_fingerprint=fingerprint)
    async with serving(fake) as server, linked(server.address, fingerprint="ab" * 32) as (_, heard):
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
        pytest.param(acknowledge_for_ever, "never asked", id="acknowledges for ever"),
        pytest.param(refuse, "UNAUTHENTICATED", id="refuses"),
        pytest.param(stay_silent, "no answer", id="is silent"),
    ],
)
async def test_a_draft_that_misbehaves_is_cut_off_and_tried_again(fake: FakeDraft, behave: Any, reason: str) -> None:
    fake.behave = behave
    options = replace(FAST, answer_timeout=0.2)
    async with serving(fake) as server, linked(server.address, options) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))

        def told(it: Listener) -> bool:
            # A write that races with the end of its call may hide the status: then the next loss tells it.
            link.open(opening(1))
            return any(reason in loss for loss in it.losses)

        await until(heard, told)
        fake.behave = fake.answer
        await until(heard, lambda it: it.connected)
        link.open(opening(1, step=5))
        await until(heard, lambda it: it.answered(1, 5))


async def test_a_silent_draft_that_owes_nothing_is_left_alone(fake: FakeDraft) -> None:
    options = replace(FAST, answer_timeout=0.1)
    async with serving(fake) as server, linked(server.address, options) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        await until(heard, lambda it: it.answered(1, 0))
        await asyncio.sleep(0.4)
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


async def test_after_stop_nothing_is_delivered_and_nothing_raises(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        await until(heard, lambda it: it.growths)
        await asyncio.to_thread(link.stop)
        delivered = len(heard.growths)
        link.open(opening(2))
        link.advance([step(1, 2)])
        link.close([1])
        link.stop()
        await asyncio.sleep(0.05)
        assert len(heard.growths) == delivered and heard.losses == []


async def test_stopping_does_not_wait_for_a_draft_that_is_not_there() -> None:
    async with linked("127.0.0.1:1", LinkOptions(max_backoff=30.0)) as (link, _):
        begin = time.monotonic()
        await asyncio.to_thread(link.stop)
        assert time.monotonic() - begin < 2.0


async def test_tokens_travel_with_every_call(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("t" * 20 + " target\n")
    options = replace(FAST, metadata=(("authorization", "Bearer " + "t" * 20),))
    async with draft_over(auth_tokens=str(path)) as draft:
        async with linked(draft.server.address) as (_, refused):
            await until(refused, lambda it: it.losses)
            assert "UNAUTHENTICATED" in refused.losses[0]
        async with linked(draft.server.address, options) as (link, heard):
            await until(heard, lambda it: it.infos)
            link.open(opening(1, tenant="acme"))
            await until(heard, lambda it: it.answered(1, 0))


async def test_mutual_tls(certificates: Any) -> None:
    credentials = grpc.ssl_channel_credentials(
        certificates.authority.read_bytes(),
        certificates.client_key.read_bytes(),
        certificates.client.read_bytes(),
    )
    settings = {
        "tls_certificate": str(certificates.server),
        "tls_key": str(certificates.server_key),
        "tls_client_ca": str(certificates.authority),
    }
    async with draft_over(**settings) as draft:
        async with linked(draft.server.address) as (_, refused):
            await until(refused, lambda it: it.losses)
        async with linked(draft.server.address, replace(FAST, credentials=credentials)) as (link, heard):
            await until(heard, lambda it: it.infos)
            link.open(opening(1))
            await until(heard, lambda it: it.answered(1, 0))


def test_a_drafter_in_process_is_found_by_the_scheme_of_the_address() -> None:
    heard = Listener()
    link = connect_draft("inprocess:random", heard, VOCABULARY, "")
    link.open(opening(3))
    assert heard.infos[0].drafter == "random" and heard.answered(3, 0)
    link.stop()
    with pytest.raises(ValueError, match="nothing"):
        connect_draft("inprocess:nothing", heard, VOCABULARY, "")
    assert create("random").name == "random"
