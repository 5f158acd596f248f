"""OpenEngine's control plane: what a target is and how it is, draining, and KV events."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from generation import asking
from openengine_calls import calling, generate_request, refusal
from scripted_engine import SERVED, ScriptedEngine
from scripted_service import CONFIG, Target, target_over
from waits import HUNG_SECONDS, until

import outrider
from outrider.errors import NotSupported, OutriderError, PermissionDenied, PositionOutOfRange
from outrider.openengine import openengine_pb2 as pb
from outrider.serving import Authenticator, Caller, GrpcServer, ServingOptions
from outrider.v1 import target_pb2
from outrider.wire.trees import error_of_rpc
from target_service.api.kv_events import KvEventLog
from target_service.openengine.kv_events import source_at
from target_service.openengine.services import OpenEngineServices
from tree_kernels.prefix_tree import PageChange

ACME, OPERATOR = "acme-0123456789ab", "operator-0123456789"
TOKENS = {ACME: Caller("acme"), OPERATOR: Caller("ops", operator=True)}


def stored(block: int, parent: int = 0) -> PageChange:
    return PageChange(block, True, parent, "acme", array("i", range(16)).tobytes())


def bearing(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),)}


class TestInfo:
    async def test_the_server(self, target: Any) -> None:
        info = await calling(target.channel, "GetServerInfo", pb.GetServerInfoRequest())
        assert (info.engine_name, info.engine_version) == ("outrider", outrider.__version__)
        assert info.engine_role == pb.ENGINE_ROLE_AGGREGATED and list(info.supported_models) == ["counter"]
        assert (info.schema_revision, info.minimum_client_revision, len(info.schema_release)) == (1, 1, 40)
        capacity = info.capacity
        assert (capacity.kv_block_size, capacity.total_kv_blocks) == (16, target.engine.snapshot().pages_total)
        assert (capacity.max_running_requests, capacity.max_batched_tokens) == (CONFIG.max_running, CONFIG.step_rows)
        assert capacity.HasField("max_loras") and not capacity.max_loras
        assert (info.parallelism.data_parallel_size, info.parallelism.tensor_parallel_size) == (1, 1)
        connector = await calling(target.channel, "GetKvConnectorInfo", pb.GetKvConnectorInfoRequest())
        assert connector == info.kv_connector and connector.HasField("enabled") and not connector.enabled
        again = await calling(target.channel, "GetServerInfo", pb.GetServerInfoRequest())
        assert again.instance_id == info.instance_id != ""

    @pytest.mark.parametrize("has_text", [False, True])
    async def test_the_model(self, targets: Any, model_tokenizer: Any, has_text: bool) -> None:
        served = replace(SERVED, tokenizer=model_tokenizer if has_text else None, other_names=("other",))
        async with targets(served=served) as target:
            info = await calling(target.channel, "GetModelInfo", pb.GetModelInfoRequest(model="other"))
            theirs = await target.stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())
            assert [info.served_model_name, *info.served_model_aliases] == list(theirs.served_names)
            assert (info.model_id, info.max_context_length) == (CONFIG.model, theirs.max_context)
            assert (info.supports_text_input, info.supports_token_ids_input) == (has_text, True)
            forms = info.generation.guided_decoding
            assert forms.supported == has_text and bool(forms.modes) == has_text and 0 not in forms.modes
            assert info.generation.output_logprobs.max_top_n == 20
            assert info.generation.HasField("supports_cache_salt") and not info.generation.supports_cache_salt
            code, _ = await refusal(target.channel, "GetModelInfo", pb.GetModelInfoRequest(model="none"))
            assert code is grpc.StatusCode.NOT_FOUND
            code, error = await refusal(target.channel, "GetModelInfo", pb.GetModelInfoRequest())
            assert (code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "model")

    async def test_the_load_is_the_engines(self, target: Any) -> None:
        target.engine.paused.set()
        call = target.stub.Generate(asking())
        await call.read()
        now = target.engine.snapshot()
        load = await calling(target.channel, "GetLoad", pb.GetLoadRequest(include_per_rank=True))
        assert (load.running_requests, load.queued_requests) == (now.running, now.waiting) == (1, 0)
        assert (load.used_kv_blocks, load.total_kv_blocks) == (now.pages_used, now.pages_total)
        (rank,) = load.ranks
        assert (rank.data_parallel_rank, rank.running_requests, rank.used_kv_blocks) == (0, 1, now.pages_used)
        assert not load.HasField("running_tokens") and not rank.HasField("decode_batch_size")
        call.cancel()


class TestHealth:
    async def state(self, target: Any, **fields: Any) -> tuple[Any, dict[str, Any]]:
        said = await calling(target.channel, "Health", pb.HealthRequest(**fields))
        return said.state, {check.name: check.state for check in said.checks}

    async def test_it_starts(self) -> None:
        openengine = OpenEngineServices()
        server = GrpcServer(ServingOptions(), openengine.services)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            said = await calling(channel, "Health", pb.HealthRequest(include_inference_probe=True))
            assert said.state == pb.HEALTH_STATE_STARTING
            for method in ("GetServerInfo", "Generate", "Abort"):
                code, error = await refusal(channel, method, b"")
                assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
        await server.stop(0)

    async def test_it_follows_the_targets_own(self, target: Any) -> None:
        assert await self.state(target) == (pb.HEALTH_STATE_READY, {"scheduler": pb.HEALTH_STATE_READY})
        target.server.health.set_serving(False)
        assert (await self.state(target))[0] == pb.HEALTH_STATE_NOT_READY
        target.server.health.set_serving(True)
        target.server.health.close()
        assert (await self.state(target))[0] == pb.HEALTH_STATE_DRAINING

    async def test_another_role_is_not_ready(self, target: Any) -> None:
        state, checks = await self.state(target, role=pb.ENGINE_ROLE_PREFILL)
        assert state == checks["role"] == pb.HEALTH_STATE_NOT_READY
        assert (await self.state(target, role=pb.ENGINE_ROLE_AGGREGATED))[0] == pb.HEALTH_STATE_READY

    async def test_a_probe_is_a_request(self, target: Any) -> None:
        state, checks = await self.state(target, include_inference_probe=True, model="counter")
        assert state == checks["inference_probe"] == pb.HEALTH_STATE_READY
        (request,) = target.engine.requests
        assert request.max_tokens == 1
        code, _ = await refusal(target.channel, "Health", pb.HealthRequest(model="none"))
        assert code is grpc.StatusCode.NOT_FOUND

    async def test_a_probe_of_a_dead_engine_fails(self, target: Any) -> None:
        target.engine.failure = RuntimeError("a bug")
        state, checks = await self.state(target, include_inference_probe=True)
        assert state == checks["inference_probe"] == pb.HEALTH_STATE_NOT_READY

    async def test_a_probe_that_hangs_fails(self, targets: Any) -> None:
        engine = ScriptedEngine()
        engine.paused.set()
        async with targets(engine, config=replace(CONFIG, heartbeat_seconds=0.01)) as target:
            state, _ = await self.state(target, include_inference_probe=True)
            assert state == pb.HEALTH_STATE_NOT_READY and engine.open_sequences == 0

    async def test_a_full_target_is_degraded(self, targets: Any) -> None:
        async with targets(ScriptedEngine(max_sequences=0)) as target:
            state, _ = await self.state(target, include_inference_probe=True)
            assert state == pb.HEALTH_STATE_DEGRADED


class TestDrain:
    async def test_it_ends_with_the_last_request(self, target: Any) -> None:
        target.engine.paused.set()
        calls = [
            target.stub.Generate(asking(sampling={"max_tokens": 3})),
            calling(target.channel, "Generate", generate_request(stopping={"max_tokens": 3})),
        ]
        await until(lambda: target.engine.open_sequences == 2)
        drain = aiter(calling(target.channel, "Drain", pb.DrainRequest(stop_accepting_new_requests=True)))
        started = await anext(drain)
        assert (started.state, started.in_flight_requests) == (pb.DRAIN_STATE_STARTED, 2)
        assert started.HasField("open_kv_sessions")
        health = await calling(target.channel, "Health", pb.HealthRequest())
        assert health.state == pb.HEALTH_STATE_DRAINING
        code, _ = await refusal(target.channel, "Generate", generate_request(request_id="two"))
        assert code is grpc.StatusCode.UNAVAILABLE
        target.engine.go_on()
        *_, last = [response async for response in drain]
        assert (last.state, last.in_flight_requests) == (pb.DRAIN_STATE_COMPLETE, 0)
        assert last.HasField("in_flight_requests")
        for call in calls:
            assert [response async for response in call]

    async def test_an_idle_target_is_drained_at_once(self, target: Any) -> None:
        request = pb.DrainRequest(stop_accepting_new_requests=True, deadline_ms=0, abort_after_deadline=True)
        for _ in range(2):
            said = [response async for response in calling(target.channel, "Drain", request)]
            assert [one.state for one in said] == [pb.DRAIN_STATE_STARTED, pb.DRAIN_STATE_COMPLETE]

    @pytest.mark.parametrize("aborts", [False, True])
    async def test_a_deadline(self, target: Any, aborts: bool) -> None:
        target.engine.paused.set()
        theirs = target.stub.Generate(asking())
        await theirs.read()
        ours = calling(target.channel, "Generate", generate_request())
        await until(lambda: target.engine.open_sequences == 2)
        request = pb.DrainRequest(stop_accepting_new_requests=True, deadline_ms=0, abort_after_deadline=aborts)
        said = [response async for response in calling(target.channel, "Drain", request)]
        assert said[0].state == pb.DRAIN_STATE_STARTED
        if not aborts:
            assert said[-1].error.code == pb.ERROR_CODE_DRAINING and said[-1].error.retryable
            assert said[-1].in_flight_requests == target.engine.open_sequences == 2
            for call in (ours, theirs):
                call.cancel()
            return
        assert said[-1].state == pb.DRAIN_STATE_COMPLETE and target.engine.open_sequences == 0
        (ended,) = [response async for response in ours]
        assert ended.error.code == pb.ERROR_CODE_DRAINING and ended.error.retryable
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await theirs.read()
        assert error_of_rpc(caught.value).reason == "DRAINING"

    async def test_who_may(self, targets: Any) -> None:
        async with targets(authenticator=Authenticator(TOKENS)) as target:
            request = pb.DrainRequest(stop_accepting_new_requests=True)
            _, error = await refusal(target.channel, "Drain", request, **bearing(ACME))
            assert isinstance(error, PermissionDenied) and not target.server.health.closed
            said = [one async for one in calling(target.channel, "Drain", request, **bearing(OPERATOR))]
            assert said[-1].state == pb.DRAIN_STATE_COMPLETE

    async def test_one_that_goes_on_taking_requests_is_refused(self, target: Any) -> None:
        code, error = await refusal(target.channel, "Drain", pb.DrainRequest())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.metadata["field"] == "stop_accepting_new_requests" and not target.server.health.closed


@asynccontextmanager
async def with_events(kept: int = 3, **options: Any) -> AsyncIterator[tuple[Target, KvEventLog]]:
    log = KvEventLog(kept, 16)
    async with target_over(kv_events=log, config=replace(CONFIG, kv_events=kept), **options) as target:
        yield target, log


def in_our_words(batch: pb.KvEventBatch) -> target_pb2.SubscribeKvEventsResponse:
    """What TargetService would say, but for the tenant."""
    said = target_pb2.SubscribeKvEventsResponse(sequence=batch.sequence_number, timestamp_ns=batch.timestamp_unix_nanos)
    assert batch.data_parallel_rank == 0
    for event in batch.events:
        told, kind = said.events.add(), event.WhichOneof("event")
        if kind == "all_blocks_cleared":
            told.cleared.SetInParent()
        elif kind == "block_removed":
            told.removed.block_hashes.extend(map(number, event.block_removed.block_hashes))
            assert event.block_removed.medium == pb.STORAGE_MEDIUM_GPU
        else:
            block = event.block_stored
            told.stored.block_hashes.extend(map(number, block.block_hashes))
            told.stored.token_ids.extend(block.token_ids)
            told.stored.block_size = block.block_size
            if block.HasField("parent_block_hash"):
                told.stored.parent_block_hash = number(block.parent_block_hash)
            assert block.medium == pb.STORAGE_MEDIUM_GPU
    return said


def number(found: pb.KvBlockHash) -> int:
    assert found.encoding == "decimal_int64"
    return int(found.value) % 2**64


def following(target: Target, **fields: Any) -> AsyncIterator[Any]:
    return aiter(calling(target.channel, "SubscribeKvEvents", pb.SubscribeKvEventsRequest(**fields)))


class TestKvEvents:
    async def test_they_are_targetservices(self) -> None:
        async with with_events() as (target, log):
            theirs = target.stub.SubscribeKvEvents(target_pb2.SubscribeKvEventsRequest(), timeout=HUNG_SECONDS)
            ours = following(target, data_parallel_ranks=[0])
            changes = [
                [stored(5), stored(2**64 - 3, parent=5), PageChange(2**64 - 3)],
                [stored(2**63, parent=5)],
                [PageChange(0)],
            ]
            for change in [None, *changes]:
                if change is not None:
                    log.append(change)
                expected, heard = await theirs.read(), (await anext(ours)).batch
                for event in expected.events:
                    if event.HasField("stored"):
                        event.stored.ClearField("tenant")
                assert in_our_words(heard).events == expected.events
                assert heard.sequence_number == expected.sequence
            theirs.cancel()
            replayed = following(target, start_sequence_number=2)
            assert [(await anext(replayed)).batch.sequence_number for _ in range(3)] == [1, 2, 3]

    async def test_a_snapshot(self) -> None:
        async with with_events() as (target, log):
            log.append([stored(5), stored(6, parent=5)])
            batch = (await anext(following(target, include_snapshot=True))).batch
            kinds = [event.WhichOneof("event") for event in batch.events]
            assert kinds == ["all_blocks_cleared", "block_stored"] and batch.sequence_number == 1

    async def test_batches_that_are_not_kept(self) -> None:
        async with with_events() as (target, log):
            for one in range(1, 6):
                log.append([stored(one)])
            request = pb.SubscribeKvEventsRequest(start_sequence_number=1)
            code, error = await refusal(target.channel, "SubscribeKvEvents", request)
            assert code is grpc.StatusCode.OUT_OF_RANGE and isinstance(error, PositionOutOfRange)

    async def test_a_reader_that_is_too_slow_is_told_so(self) -> None:
        async with with_events() as (target, log):
            events = following(target)
            assert (await anext(events)).batch.sequence_number == 0
            # Before the reader's task can run again.
            for one in range(1, 6):
                log.append([stored(one)])
            last = await anext(events)
            assert last.error.code == pb.ERROR_CODE_OVERLOADED and last.error.retryable
            assert [one async for one in events] == []

    async def test_who_may_and_where(self) -> None:
        async with with_events(authenticator=Authenticator(TOKENS)) as (target, _):
            request = pb.SubscribeKvEventsRequest()
            _, error = await refusal(target.channel, "SubscribeKvEvents", request, **bearing(ACME))
            assert isinstance(error, PermissionDenied)
            asked = pb.GetKvEventSourcesRequest()
            (source,) = (await calling(target.channel, "GetKvEventSources", asked, **bearing(ACME))).sources
            assert (source.transport, source.encoding, source.buffer_steps) == ("grpc", "protobuf", 3)
            endpoint = source.endpoint_addr
            assert f"{endpoint.host}:{endpoint.port}" == target.server.address

    async def test_none_are_kept(self, target: Any) -> None:
        assert not (await calling(target.channel, "GetKvEventSources", pb.GetKvEventSourcesRequest())).sources
        _, error = await refusal(target.channel, "SubscribeKvEvents", pb.SubscribeKvEventsRequest())
        assert isinstance(error, NotSupported)

    async def test_other_ranks_are_not_here(self, target: Any) -> None:
        for method in ("GetKvEventSources", "SubscribeKvEvents"):
            ranks = pb.SubscribeKvEventsRequest(data_parallel_ranks=[0, 3])
            code, error = await refusal(target.channel, method, ranks)
            assert isinstance(error, OutriderError) and error.metadata["field"] == "data_parallel_ranks[1]"
            assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("10.0.0.7:50051", ("10.0.0.7", 50051)),
        ("[2001:db8::1]:7", ("2001:db8::1", 7)),
        ("target.example:1", ("target.example", 1)),
        ("0.0.0.0:50051", None),
        ("[::]:50051", None),
        ("unix:/run/target", None),
    ],
)
def test_where_events_are(address: str, endpoint: tuple[str, int] | None) -> None:
    source = source_at(address, 4)
    assert source.HasField("endpoint_addr") == (endpoint is not None)
    if endpoint is not None:
        assert (source.endpoint_addr.host, source.endpoint_addr.port) == endpoint
