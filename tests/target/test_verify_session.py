"""Verify over a real socket and a scripted engine whose model counts upwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from conversation import Conversation, close, tree
from scripted_engine import END_TOKEN, SERVED, VOCABULARY, ScriptedEngine
from waits import HUNG_SECONDS, ever_longer

from benchmarks.shared.virtual_clock import VirtualClock
from outrider.errors import (
    DeadlineExceeded,
    StepReplayed,
    UnknownSequence,
)
from outrider.telemetry.tracing import Tracing
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire.trees import error_of
from target_service.api import verify_session
from target_service.api.admission import Admission
from target_service.api.verify_session import VerifyStream
from target_service.config import TargetConfig
from target_service.core.events import Sequences
from target_service.core.quotas import TenantQuotas
from target_service.telemetry.tracing import RequestTrace


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

    async def test_verdicts_due_at_a_half_close_are_sent(self, talk: Conversation, target: Any) -> None:
        first, second, idle = [await talk.open(10 * (i + 1)) for i in range(3)]
        target.engine.paused.set()
        await talk.send(tree(first.sequence_id, 0, 10))
        await talk.send(tree(second.sequence_id, 0, 20, 21))
        await talk.call.done_writing()
        # Time for the end of the frames to be read; the verdicts come whether that was enough or not.
        await asyncio.sleep(0.02)
        target.engine.paused.clear()
        said = {}
        while (answer := await asyncio.wait_for(talk.call.read(), HUNG_SECONDS)) is not grpc.aio.EOF:
            said[answer.verdict.sequence_id] = list(answer.verdict.token_ids)
        assert said == {first.sequence_id: [11], second.sequence_id: [21, 22]}
        assert await talk.call.code() is grpc.StatusCode.OK
        await target.idle()
        assert idle.sequence_id in target.engine.cancelled

    async def test_cancelling_after_a_half_close_waits_for_no_verdict(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        target.engine.paused.set()
        await talk.send(tree(opened.sequence_id, 0, 10))
        await talk.call.done_writing()
        talk.call.cancel()
        await target.idle()
        assert target.engine.cancelled == [opened.sequence_id]

    @pytest.mark.parametrize("how", ["cancel", "half-close", "channel", "deadline"])
    async def test_every_end_frees_everything(self, target: Any, how: str) -> None:
        """A cancelled stream looks like a clean end to a server, so both must abort what was not closed."""
        channel = grpc.aio.insecure_channel(target.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        target = replace(target, channel=channel)
        talk = Conversation(target)
        if how == "deadline":
            await self._open_before_a_deadline(target)
        else:
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
        opened = len(target.engine.requests)
        assert opened >= 3 and sorted(target.engine.cancelled) == list(range(1, opened + 1))
        await channel.close()

    async def _open_before_a_deadline(self, target: Any) -> None:
        """Three on one stream, whose deadline then passes."""
        for seconds in ever_longer():
            talk = Conversation(target, timeout=seconds)
            with contextlib.suppress(grpc.aio.AioRpcError):
                for _ in range(3):
                    await talk.open()
                return
        pytest.fail("no deadline was long enough")

    async def test_idle_sequence_is_ended(self, targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = VirtualClock()
        monkeypatch.setattr(verify_session, "time", SimpleNamespace(monotonic=clock))
        # Sequences are looked at every hundredth of a second, by a clock that the test sets.
        async with targets(config=TargetConfig(verify_idle_seconds=0.04)) as target:
            talk = Conversation(target)
            idle, busy = await talk.open(10), await talk.open(10)
            for step in range(4):
                clock.pass_by(0.009)
                await talk.ask(tree(busy.sequence_id, step, 10 + step))
            clock.pass_by(0.01)
            failed = (await talk.hear()).status
            assert failed.sequence_id == idle.sequence_id
            assert isinstance(error_of(failed.status), DeadlineExceeded)
            assert (await talk.ask(tree(busy.sequence_id, 4, 14))).verdict.step == 4
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

        session = VerifyStream(
            TargetConfig(max_sequences_per_stream=4, verify_idle_seconds=HUNG_SECONDS),
            Sequences(engine),
            Admission(SERVED, TenantQuotas()),
            tenant="default",
            trace=lambda: RequestTrace(Tracing(), None),
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
