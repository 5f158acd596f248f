"""A scripted draft service on a real server, and a link to it, for tests of the target's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from scripted_drafter import VOCABULARY, Listener
from waits import HUNG_SECONDS

from outrider.drafting.link import GrpcDraftLink, LinkOptions
from outrider.serving import GrpcServer, Service, ServingOptions
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import info_to_pb
from outrider.wire.frames import DraftInfo, TreeLimits

SERVICE_NAME = "outrider.v1.DraftService"
INFO = DraftInfo("fake", VOCABULARY, "ab" * 32, TreeLimits(63, 8), 1024, "9")
# Fast to try again, and never tired of waiting: a draft is lost when a test says so.
FAST = LinkOptions(
    min_backoff=0.01,
    max_backoff=0.05,
    fault_backoff=0.02,
    max_fault_backoff=0.05,
    connect_timeout=HUNG_SECONDS,
    answer_timeout=HUNG_SECONDS,
    ping_timeout=HUNG_SECONDS,
)
# Between two tries, for a link that is to be stopped there.
NEVER_AGAIN = LinkOptions(min_backoff=10 * HUNG_SECONDS, max_backoff=10 * HUNG_SECONDS)


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
    async with asyncio.timeout(HUNG_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)
