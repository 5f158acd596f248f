"""What one tenant may take, over a real socket: who is refused, when to come again, and that nothing is left taken."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from conversation import Conversation
from generation import answers, asking
from scripted_engine import ScriptedEngine

from outrider.errors import QuotaExceeded
from outrider.limits import TenantLimits, TenantTable
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import error_of_rpc
from target_service.config import TargetConfig
from target_service.core.quotas import TenantQuotas
from target_service.core.sequence import SequenceRequest

QUIET, LOUD = (("outrider-tenant", "quiet"),), (("outrider-tenant", "loud"),)
SHORT = asking(sampling={"max_tokens": 1})


def only(**limits: Any) -> TenantTable:
    """Limits for everybody."""
    return TenantTable(TenantLimits(**limits))


async def refusal(target: Any, request: Any, metadata: Any) -> QuotaExceeded:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(target, request, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_of_rpc(caught.value)
    assert isinstance(error, QuotaExceeded)
    return error


async def test_one_tenants_calls_leave_room_for_anothers(targets: Any) -> None:
    engine = ScriptedEngine()
    engine.paused.set()
    async with targets(engine, table=only(streams=2)) as target:
        calls = [target.stub.Generate(asking(), metadata=LOUD) for _ in range(2)]
        for call in calls:
            await call.read()
        error = await refusal(target, asking(), LOUD)
        assert (error.metadata, error.retry_after) == ({"quota": "streams", "limit": "2"}, 1.0)
        engine.paused.clear()
        assert await answers(target, SHORT, metadata=QUIET)
        for call in calls:
            call.cancel()
        await target.idle()
        assert await answers(target, SHORT, metadata=LOUD)


@pytest.mark.parametrize("what", ["waiting", "sequences"])
async def test_sequences_are_counted_until_they_end(targets: Any, what: str) -> None:
    engine = ScriptedEngine()
    engine.paused.set()
    async with targets(engine, table=only(**{what: 2})) as target:
        calls = [target.stub.Generate(asking(), metadata=LOUD) for _ in range(2)]
        for call in calls:
            await call.read()
        assert (await refusal(target, asking(), LOUD)).metadata == {"quota": what, "limit": "2"}
        for call in calls:
            call.cancel()
        await target.idle()
        engine.paused.clear()
        for _ in range(5):
            assert await answers(target, SHORT, metadata=LOUD)


async def test_who_has_said_a_token_waits_no_more(targets: Any) -> None:
    engine = ScriptedEngine()
    async with targets(engine, table=only(waiting=1)) as target:
        call = target.stub.Generate(asking(sampling={"max_tokens": 200}), metadata=LOUD)
        async for response in call:
            if response.HasField("chunk"):
                engine.paused.set()
                break
        second = target.stub.Generate(asking(), metadata=LOUD)
        assert (await second.read()).HasField("started")
        assert (await refusal(target, asking(), LOUD)).metadata["quota"] == "waiting"
        call.cancel()
        second.cancel()


async def test_open_sequences_of_all_streams_count_together(targets: Any) -> None:
    async with targets(table=only(sequences=3)) as target:
        conversations = [Conversation(target, metadata=LOUD) for _ in range(2)]
        opening = pb.VerifyRequest(open=pb.OpenVerification(token_ids=[10, 20]))
        for conversation in (*conversations, conversations[0]):
            assert (await conversation.ask(opening)).HasField("opened")
        error = await conversations[1].fail(opening)
        assert error.metadata == {"quota": "sequences", "limit": "3"}
        assert await answers(target, SHORT, metadata=QUIET)
        for conversation in conversations:
            conversation.call.cancel()
        await target.idle()


async def test_requests_a_second_and_when_to_come_again(targets: Any) -> None:
    async with targets(table=only(requests_per_second=0.01, burst=3)) as target:
        for _ in range(3):
            assert await answers(target, SHORT, metadata=LOUD)
        error = await refusal(target, SHORT, LOUD)
        assert error.retry_after == pytest.approx(100.0, abs=20.0)
        assert await answers(target, SHORT, metadata=QUIET)


async def test_a_tenants_share_reaches_the_engine(targets: Any) -> None:
    table = TenantTable(TenantLimits(), {"loud": TenantLimits(weight=0.5, running=3, kv_tokens=64)})
    async with targets(table=table) as target:
        assert await answers(target, asking(), metadata=LOUD)
        assert await answers(target, SHORT, metadata=QUIET)
        first, second = (request.limits for request in target.engine.requests)
        # Who does not say how much gets what there is room for.
        assert target.engine.requests[0].max_tokens == 62
        error = await refusal(target, asking(sampling={"max_tokens": 100}), LOUD)
    assert (first.weight, first.running, first.kv_tokens) == (0.5, 3, 64)
    assert second.weight == 1.0
    assert (error.metadata, error.retry_after) == ({"limit": "64", "tokens": "102"}, None)


class TestBucket:
    def quotas(self, **limits: Any) -> TenantQuotas:
        self.now = 100.0
        return TenantQuotas(only(**limits), clock=lambda: self.now)

    def test_it_fills_with_time_up_to_the_burst(self) -> None:
        quotas = self.quotas(requests_per_second=2.0, burst=3)
        for _ in range(3):
            quotas.request("a")
        with pytest.raises(QuotaExceeded) as caught:
            quotas.request("a")
        assert caught.value.retry_after == pytest.approx(0.5)
        self.now += 0.5
        quotas.request("a")
        self.now += 1000.0
        for _ in range(3):
            quotas.request("a")
        with pytest.raises(QuotaExceeded):
            quotas.request("a")

    def test_refused_requests_cost_nothing(self) -> None:
        quotas = self.quotas(requests_per_second=1.0, burst=1)
        quotas.request("a")
        for _ in range(50):
            with pytest.raises(QuotaExceeded):
                quotas.request("a")
        self.now += 1.0
        quotas.request("a")

    def test_names_made_up_are_forgotten(self) -> None:
        quotas = self.quotas(requests_per_second=1.0, burst=2)
        for number in range(20_000):
            self.now += 0.01
            quotas.request(str(number))
        assert len(quotas._accounts) < 2_000

    def test_who_has_something_open_is_not(self) -> None:
        quotas = self.quotas(streams=1)
        with quotas.counted("busy", "streams"):
            for number in range(5_000):
                quotas.request(str(number))
                with quotas.counted(str(number), "streams"):
                    pass
            with pytest.raises(QuotaExceeded), quotas.counted("busy", "streams"):
                pass


def test_defaults_leave_room_for_others() -> None:
    config = TargetConfig()
    limits = config.tenant_limits
    assert 0 < limits.waiting < config.max_waiting
    assert 0 < limits.streams < 2 * (config.max_running + config.max_waiting) + 64
    assert limits.requests_per_second and limits.sequences and limits.texts


def test_asking_is_cheap_where_nothing_is_bounded() -> None:
    quotas = TenantQuotas()
    assert quotas.table.of("anybody") == SequenceRequest.__dataclass_fields__["limits"].default_factory()


async def test_cancelled_calls_give_back_what_they_took(targets: Any) -> None:
    engine = ScriptedEngine()
    engine.paused.set()
    async with targets(engine, table=only(streams=4, waiting=4, sequences=4)) as target:
        for _ in range(5):
            calls = [target.stub.Generate(asking(), metadata=LOUD) for _ in range(4)]
            for call in calls:
                await call.read()
            for call in calls:
                call.cancel()
            await target.idle()
            await asyncio.sleep(0)
