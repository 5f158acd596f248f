"""Verify over a real socket and a scripted engine whose model counts upwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from scripted_engine import END_TOKEN, SERVED, VOCABULARY, ScriptedEngine

from outrider.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    InvalidField,
    OutriderError,
    PositionOutOfRange,
    QuotaExceeded,
    StepReplayed,
    StepSkipped,
    UnknownSequence,
    WrongRoot,
)
from outrider.tracing import Tracing
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire import error_of
from target_service.admission import Admission
from target_service.events import Sequences
from target_service.server import StreamLimits
from target_service.tracing import RequestTrace
from target_service.verify_session import VerifySession


class Conversation:
    """One Verify stream, frame by frame."""

    def __init__(self, target: Any) -> None:
        self.call = target.stub.Verify()

    async def send(self, frame: pb.VerifyRequest) -> None:
        await self.call.write(frame)

    async def hear(self) -> pb.VerifyResponse:
        response = await asyncio.wait_for(self.call.read(), 2)
        assert isinstance(response, pb.VerifyResponse)
        return response

    async def open(self, *token_ids: int, **fields: Any) -> pb.VerificationOpened:
        await self.send(pb.VerifyRequest(open=pb.OpenVerification(token_ids=token_ids or (10,), **fields)))
        return (await self.hear()).opened

    async def ask(self, frame: pb.VerifyRequest) -> pb.VerifyResponse:
        await self.send(frame)
        return await self.hear()

    async def fail(self, frame: pb.VerifyRequest) -> OutriderError:
        """The error that answers a frame."""
        answer = await self.ask(frame)
        assert answer.WhichOneof("frame") == "status"
        return error_of(answer.status.status)

    async def silent(self) -> None:
        """Nothing more is said."""
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(self.call.read(), 0.05)


def tree(sequence_id: int, step: int, *token_ids: int, parents: tuple[int, ...] = ()) -> pb.VerifyRequest:
    """A tree frame; a chain unless parents are given."""
    chain = (0, *range(len(token_ids) - 1))
    rows = tree_pb2.TokenTree(token_ids=token_ids, parents=parents or chain)
    return pb.VerifyRequest(tree=pb.VerifyTree(sequence_id=sequence_id, step=step, tree=rows))


def close(sequence_id: int) -> pb.VerifyRequest:
    return pb.VerifyRequest(close=pb.CloseVerification(sequence_id=sequence_id))


@pytest.fixture
async def talk(target: Any) -> AsyncIterator[Conversation]:
    conversation = Conversation(target)
    yield conversation
    conversation.call.cancel()
    await target.idle()


class TestSteps:
    async def test_tree_by_tree(self, talk: Conversation) -> None:
        opened = await talk.open(5, 10, client_tag=77, sampling={"seed": 3, "temperature": 1})
        assert (opened.client_tag, opened.step, opened.seed, opened.max_rows) == (77, 0, 3, 16)
        assert opened.mode == tree_pb2.VERIFICATION_MODE_COUPLED
        first = (await talk.ask(tree(opened.sequence_id, 0, 10, 99, 11, 12, parents=(0, 0, 0, 2)))).verdict
        assert (first.step, first.next_step) == (0, 1)
        assert list(first.accepted_rows) == [2, 3]
        assert list(first.token_ids) == [11, 12, 13]
        answer = await talk.ask(tree(opened.sequence_id, 1, 13))
        assert list(answer.verdict.accepted_rows) == []
        assert list(answer.verdict.token_ids) == [14]
        assert (answer.timings.queue_nanoseconds, answer.timings.compute_nanoseconds) == (5, 7)

    async def test_end(self, talk: Conversation) -> None:
        opened = await talk.open(VOCABULARY - 1)
        asked = tree(opened.sequence_id, 0, VOCABULARY - 1, 0, 1, 2, 3)
        verdict = (await talk.ask(asked)).verdict
        assert list(verdict.token_ids) == [0, 1, END_TOKEN]
        assert verdict.finish_reason == pb.FINISH_REASON_END_OF_SEQUENCE
        assert (await talk.ask(asked)).verdict == verdict
        assert isinstance(await talk.fail(tree(opened.sequence_id, 1, END_TOKEN)), UnknownSequence)

    async def test_many_sequences_on_one_stream(self, talk: Conversation) -> None:
        ids = [(await talk.open(10 * (i + 1), client_tag=i)).sequence_id for i in range(5)]
        for i, sequence_id in enumerate(ids):
            await talk.send(tree(sequence_id, 0, 10 * (i + 1)))
        said = {}
        for _ in ids:
            verdict = (await talk.hear()).verdict
            said[verdict.sequence_id] = list(verdict.token_ids)
        assert said == {sequence_id: [10 * (i + 1) + 1] for i, sequence_id in enumerate(ids)}

    async def test_logprobs(self, talk: Conversation) -> None:
        opened = await talk.open(sampling={"logprobs": 1})
        verdict = (await talk.ask(tree(opened.sequence_id, 0, 10, 11))).verdict
        assert [len(entry.top) for entry in verdict.logprobs] == [1, 1]

    async def test_tenant_and_kind_reach_the_engine(self, target: Any) -> None:
        call = target.stub.Verify(metadata=(("outrider-tenant", "acme"),))
        await call.write(pb.VerifyRequest(open=pb.OpenVerification(token_ids=[1, 2])))
        await call.read()
        (request,) = target.engine.requests
        assert (request.tenant, request.external, request.speculate) == ("acme", True, False)
        call.cancel()


class TestRepeats:
    async def test_same_step_same_verdict(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        asked = tree(opened.sequence_id, 0, 10, 11)
        first = await talk.ask(asked)
        assert await talk.ask(asked) == first
        assert await talk.ask(asked) == first
        assert list((await talk.ask(tree(opened.sequence_id, 1, 12))).verdict.token_ids) == [13]
        assert target.engine.open_sequences == 1

    async def test_same_step_under_way_is_answered_once(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        target.engine.paused.set()
        for _ in range(3):
            await talk.send(tree(opened.sequence_id, 0, 10))
        await asyncio.sleep(0.02)
        target.engine.paused.clear()
        assert (await talk.hear()).verdict.step == 0
        await talk.silent()

    async def test_other_tree_for_a_step_under_way(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        target.engine.paused.set()
        await talk.send(tree(opened.sequence_id, 0, 10))
        assert isinstance(await talk.fail(tree(opened.sequence_id, 0, 10, 11)), StepReplayed)
        target.engine.paused.clear()
        assert list((await talk.hear()).verdict.token_ids) == [11]

    async def test_other_tree_for_an_answered_step(self, talk: Conversation) -> None:
        opened = await talk.open()
        await talk.ask(tree(opened.sequence_id, 0, 10))
        assert isinstance(await talk.fail(tree(opened.sequence_id, 0, 10, 11)), StepReplayed)
        assert list((await talk.ask(tree(opened.sequence_id, 1, 11))).verdict.token_ids) == [12]

    async def test_step_long_gone(self, talk: Conversation) -> None:
        opened = await talk.open()
        asked = tree(opened.sequence_id, 0, 10)
        await talk.ask(asked)
        await talk.ask(tree(opened.sequence_id, 1, 11))
        assert isinstance(await talk.fail(asked), StepReplayed)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "kind", "field"),
        [
            (lambda i: tree(i, 1, 10), StepSkipped, None),
            (lambda i: tree(i, 2**64 - 1, 10), StepSkipped, None),
            (lambda i: tree(i, 0, 11), WrongRoot, None),
            (lambda i: tree(i + 1, 0, 10), UnknownSequence, None),
            (lambda _: tree(0, 0, 10), UnknownSequence, None),
            (lambda i: tree(i, 0), InvalidField, "tree.token_ids"),
            (lambda i: tree(i, 0, *range(10, 27)), InvalidField, "tree.token_ids"),
            (lambda i: tree(i, 0, 10, VOCABULARY), InvalidField, "tree.token_ids[1]"),
            (lambda i: tree(i, 0, 10, 2**32 - 1), InvalidField, "tree.token_ids[1]"),
            (lambda i: tree(i, 0, 10, 11, parents=(0, 1)), InvalidField, "tree.parents[1]"),
            (lambda i: tree(i, 0, 10, 11, parents=(0,)), InvalidField, "tree.parents"),
            (lambda i: tree(i, 0, 10, 11, 11, parents=(0, 0, 0)), InvalidField, "tree.token_ids[2]"),
            (lambda _: pb.VerifyRequest(), InvalidField, "frame"),
        ],
        ids=[
            "next-step",
            "far-step",
            "wrong-root",
            "unknown",
            "zero",
            "empty",
            "too-many-rows",
            "token-outside",
            "token-at-the-top",
            "own-parent",
            "few-parents",
            "twin-children",
            "no-frame",
        ],
    )
    async def test_bad_frame_harms_only_itself(
        self, talk: Conversation, make: Any, kind: type[OutriderError], field: str | None
    ) -> None:
        opened = await talk.open()
        answer = await talk.ask(make(opened.sequence_id))
        error = error_of(answer.status.status)
        assert type(error) is kind
        assert field is None or getattr(error, "field", None) == field
        assert (answer.status.sequence_id, answer.status.step) == (
            make(opened.sequence_id).tree.sequence_id,
            make(opened.sequence_id).tree.step,
        )
        assert list((await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.token_ids) == [11]

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"token_ids": []}, "open.token_ids"),
            ({"token_ids": [1, VOCABULARY]}, "open.token_ids[1]"),
            ({"token_ids": [1], "sampling": {"temperature": float("nan")}}, "open.sampling.temperature"),
            ({"token_ids": [1], "mode": 2}, "open.mode"),
            ({"token_ids": [1], "mode": 9}, "open.mode"),
        ],
        ids=["empty", "token-outside", "nan", "mode-at-zero", "unknown-mode"],
    )
    async def test_bad_open(self, talk: Conversation, target: Any, fields: Any, field: str) -> None:
        answer = await talk.ask(pb.VerifyRequest(open=pb.OpenVerification(client_tag=5, **fields)))
        error = error_of(answer.status.status)
        assert isinstance(error, InvalidField)
        assert error.field == field
        assert (answer.status.client_tag, answer.status.sequence_id) == (5, 0)
        assert not target.engine.requests

    async def test_prompt_and_tree_past_the_context(self, talk: Conversation) -> None:
        long = pb.OpenVerification(token_ids=[10] * SERVED.max_context)
        assert isinstance(await talk.fail(pb.VerifyRequest(open=long)), PositionOutOfRange)
        opened = await talk.open(*[10] * (SERVED.max_context - 2))
        deep = tree(opened.sequence_id, 0, 10, 11, 12, 13)
        assert isinstance(await talk.fail(deep), PositionOutOfRange)
        verdict = (await talk.ask(tree(opened.sequence_id, 0, 10, 11, 12))).verdict
        assert (list(verdict.token_ids), verdict.finish_reason) == ([11, 12], pb.FINISH_REASON_LENGTH)

    async def test_sequence_of_another_stream(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        other = Conversation(target)
        assert isinstance(await other.fail(tree(opened.sequence_id, 0, 10)), UnknownSequence)
        await other.send(close(opened.sequence_id))
        other.call.cancel()
        assert list((await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.token_ids) == [11]

    async def test_too_many_sequences(self, targets: Any) -> None:
        async with targets(limits=StreamLimits(max_sequences=2)) as target:
            talk = Conversation(target)
            first = await talk.open()
            await talk.open()
            assert isinstance(await talk.fail(pb.VerifyRequest(open=pb.OpenVerification(token_ids=[1]))), QuotaExceeded)
            await talk.send(close(first.sequence_id))
            assert (await talk.open()).sequence_id == 3
            talk.call.cancel()

    async def test_ended_sequences_make_room(self, targets: Any) -> None:
        async with targets(limits=StreamLimits(max_sequences=1)) as target:
            talk = Conversation(target)
            for _ in range(3):
                opened = await talk.open(sampling={"max_tokens": 1})
                assert (await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.finish_reason
            talk.call.cancel()

    async def test_draining_and_dead(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        target.engine.drain()
        assert isinstance(await talk.fail(pb.VerifyRequest(open=pb.OpenVerification(token_ids=[1]))), Draining)
        assert list((await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.token_ids) == [11]
        target.engine.die(RuntimeError("kernel"))
        failed = (await talk.hear()).status
        assert (failed.sequence_id, failed.step) == (opened.sequence_id, 1)
        assert isinstance(error_of(failed.status), EngineDead)
        assert isinstance(await talk.fail(tree(opened.sequence_id, 1, 11)), UnknownSequence)


class TestEnds:
    async def test_close_frees_and_may_be_repeated(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        for _ in range(2):
            await talk.send(close(opened.sequence_id))
        await target.idle()
        assert target.engine.cancelled == [opened.sequence_id]
        assert isinstance(await talk.fail(tree(opened.sequence_id, 0, 10)), UnknownSequence)

    async def test_close_with_a_step_under_way(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        target.engine.paused.set()
        await talk.send(tree(opened.sequence_id, 0, 10))
        await talk.send(close(opened.sequence_id))
        await target.idle()
        target.engine.paused.clear()
        await talk.silent()

    @pytest.mark.parametrize("how", ["cancel", "half-close", "channel", "deadline"])
    async def test_every_end_frees_everything(self, target: Any, how: str) -> None:
        """A cancelled stream looks like a clean end to a server, so both must abort what was not closed."""
        channel = grpc.aio.insecure_channel(target.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        target = replace(target, channel=channel)
        talk = Conversation(target)
        if how == "deadline":
            talk.call = target.stub.Verify(timeout=0.2)
        for _ in range(3):
            await talk.open()
        if how == "cancel":
            talk.call.cancel()
        elif how == "half-close":
            await talk.call.done_writing()
            assert await talk.call.read() is grpc.aio.EOF
            assert await talk.call.code() is grpc.StatusCode.OK
        elif how == "channel":
            await channel.close()
        await target.idle()
        assert sorted(target.engine.cancelled) == [1, 2, 3]
        await channel.close()

    async def test_idle_sequence_is_ended(self, targets: Any) -> None:
        async with targets(limits=StreamLimits(idle_seconds=0.2)) as target:
            talk = Conversation(target)
            idle, busy = await talk.open(10), await talk.open(10)
            step, failed = 0, None
            while failed is None:
                answer = await talk.ask(tree(busy.sequence_id, step, 10 + step))
                if answer.HasField("status"):
                    failed = answer.status
                else:
                    step += 1
                    await asyncio.sleep(0.02)
            assert failed.sequence_id == idle.sequence_id
            assert isinstance(error_of(failed.status), DeadlineExceeded)
            assert step > 3
            talk.call.cancel()
            await target.idle()

    async def test_reader_that_does_not_read_is_not_read(self) -> None:
        """Frames stop being taken once more answers wait than there may be sequences."""
        engine, taken = ScriptedEngine(), 0

        async def frames() -> AsyncIterator[pb.VerifyRequest]:
            nonlocal taken
            while True:
                taken += 1
                yield tree(1, 0, 10)

        session = VerifySession(
            Sequences(engine, asyncio.get_running_loop()),
            Admission(SERVED),
            tenant="default",
            trace=lambda: RequestTrace(Tracing(), None),
            max_sequences=4,
            idle_seconds=10,
        )
        reader = asyncio.create_task(session.read(frames()))
        await asyncio.sleep(0.02)
        assert taken == 5
        for _ in range(3):
            assert await session.next() is not None
        await asyncio.sleep(0.02)
        assert taken == 8
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
