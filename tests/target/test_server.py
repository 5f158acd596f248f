"""Generate and GetTargetInfo over a real socket and a scripted engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from generation import answers, asking, refused, tokens_of
from scripted_engine import END_TOKEN, SERVED, VOCABULARY, ScriptedEngine

from outrider.errors import EngineDead, OutriderError
from outrider.sampling import TypicalAcceptance
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire.trees import DRAFT_REFUSED_KEY, error_of_rpc
from target_service.api import server as server_module
from target_service.api.event_queue import EventQueue
from target_service.core.sequence import StepVerdict


class TestGenerate:
    async def test_events_in_order(self, target: Any) -> None:
        request = asking(10, 20, sampling={"max_tokens": 5, "seed": 9, "temperature": 0.5})
        first, *chunks, last = await answers(target, request)
        started = first.started
        assert (started.sequence_id, started.prompt_tokens, started.seed) == (1, 2, 9)
        assert started.mode == tree_pb2.VERIFICATION_MODE_COUPLED
        assert (started.speculating, started.model) == (True, "counter")
        assert tokens_of(chunks) == [21, 22, 23, 24, 25]
        # A reader that lags gets several steps in one chunk, with the last one's number and all their time.
        steps = [response.chunk.step for response in chunks]
        assert steps == sorted(set(steps)) and steps[-1] == 4
        timings = [response.timings for response in chunks]
        assert sum(step.queue_nanoseconds for step in timings) == 5 * 5
        assert sum(step.compute_nanoseconds for step in timings) == 5 * 7
        finished = last.finished
        assert finished.finish_reason == pb.FINISH_REASON_LENGTH
        assert finished.WhichOneof("matched") is None
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 5)
        assert finished.speculation.steps == 5

    @pytest.mark.parametrize("reason", ["", "UNKNOWN_CORPUS"])
    async def test_the_end_says_why_there_were_no_drafts(self, target: Any, reason: str) -> None:
        target.engine.draft_refused = reason
        call = target.stub.Generate(asking(sampling={"max_tokens": 2}))
        assert tokens_of([response async for response in call]) == [21, 22]
        assert (await call.trailing_metadata()).get(DRAFT_REFUSED_KEY, "") == reason

    async def test_an_error_says_it_too(self, target: Any) -> None:
        target.engine.draft_refused = "UNKNOWN_CORPUS"
        target.engine.paused.set()
        call = target.stub.Generate(asking())
        await call.read()
        target.engine.die(RuntimeError("a bug"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert type(error_of_rpc(caught.value)) is EngineDead
        assert (await call.trailing_metadata())[DRAFT_REFUSED_KEY] == "UNKNOWN_CORPUS"

    async def test_greedy_is_the_default(self, target: Any) -> None:
        first, *_ = await answers(target, asking(sampling={"max_tokens": 1}))
        assert first.started.mode == tree_pb2.VERIFICATION_MODE_GREEDY

    async def test_seed_is_drawn_and_told(self, target: Any) -> None:
        seeds = [(await answers(target, asking(sampling={"max_tokens": 1})))[0].started.seed for _ in range(3)]
        assert len(set(seeds)) == 3
        assert seeds == [request.seed for request in target.engine.requests]

    async def test_seed_zero_is_a_seed(self, target: Any) -> None:
        first, *_ = await answers(target, asking(sampling={"max_tokens": 1, "seed": 0}))
        assert first.started.seed == 0

    async def test_end_token(self, target: Any) -> None:
        *chunks, last = await answers(target, asking(VOCABULARY - 1))
        assert tokens_of(chunks) == [0, 1, END_TOKEN]
        assert last.finished.finish_reason == pb.FINISH_REASON_END_OF_SEQUENCE
        assert last.finished.stop_token_id == END_TOKEN

    async def test_stop_token(self, target: Any) -> None:
        *chunks, last = await answers(target, asking(10, sampling={"stop_token_ids": [13]}))
        assert tokens_of(chunks) == [11, 12, 13]
        assert last.finished.finish_reason == pb.FINISH_REASON_STOP
        assert last.finished.stop_token_id == 13

    async def test_logprobs(self, target: Any) -> None:
        _, chunk, _ = await answers(target, asking(sampling={"max_tokens": 1, "logprobs": 2}))
        (entry,) = chunk.chunk.logprobs
        assert entry.logprob == -0.5
        assert [(top.token_id, top.logprob) for top in entry.top] == [(0, -1.0), (1, -2.0)]

    async def test_output_ends_where_the_context_does(self, target: Any) -> None:
        """Asking for more than fits is not an error: LENGTH says so."""
        responses = await answers(target, asking(*[5] * 250, sampling={"max_tokens": 1000}))
        assert len(tokens_of(responses)) == SERVED.max_context - 250
        assert responses[-1].finished.finish_reason == pb.FINISH_REASON_LENGTH

    async def test_longest_prompt(self, target: Any) -> None:
        assert len(tokens_of(await answers(target, asking(*[5] * (SERVED.max_context - 1))))) == 1

    async def test_what_the_engine_is_asked(self, target: Any) -> None:
        request = asking(
            sampling={"max_tokens": 3, "temperature": 1, "top_k": 4},
            speculation={"mode": "VERIFICATION_MODE_REJECTION", "max_nodes": 7, "corpus": "docs"},
        )
        await answers(target, request, metadata=(("outrider-tenant", "acme"),))
        (asked,) = target.engine.requests
        assert asked.mode.value == "rejection"
        assert (asked.max_draft_nodes, asked.corpus, asked.tenant, asked.max_tokens) == (7, "docs", "acme", 3)
        assert asked.sampling.top_k == 4
        assert asked.speculate
        assert not asked.external

    @pytest.mark.parametrize(("temperature", "lossy"), [(0.0, False), (0.7, True)])
    async def test_typical_acceptance_is_asked_for_and_marked(
        self, targets: Any, temperature: float, lossy: bool
    ) -> None:
        options = {"mode": "VERIFICATION_MODE_TYPICAL", "typical": {"epsilon": 0.25}}
        async with targets(served=replace(SERVED, lossy=True)) as target:
            asked = asking(sampling={"max_tokens": 2, "temperature": temperature}, speculation=options)
            responses = await answers(target, asked)
            info = await target.stub.GetTargetInfo(pb.GetTargetInfoRequest())
        assert responses[0].started.mode == tree_pb2.VERIFICATION_MODE_TYPICAL
        assert target.engine.requests[0].typical == TypicalAcceptance(epsilon=0.25)
        assert responses[-1].finished.usage.lossy is lossy
        assert list(info.modes) == [1, 2, 3, 4]

    async def test_lossless_answers_are_not_marked(self, target: Any) -> None:
        responses = await answers(target, asking(sampling={"max_tokens": 2, "temperature": 0.7}))
        assert not responses[-1].finished.usage.lossy

    @pytest.mark.parametrize(
        ("options", "served", "expected"),
        [
            ({}, SERVED, True),
            ({"enabled": False}, SERVED, False),
            ({"max_nodes": 0}, SERVED, False),
            ({"enabled": True}, replace(SERVED, speculation=False), False),
        ],
        ids=["default", "off", "no-nodes", "no-draft"],
    )
    async def test_speculating(self, targets: Any, options: Any, served: Any, expected: bool) -> None:
        async with targets(served=served) as target:
            first, *_ = await answers(target, asking(speculation=options, sampling={"max_tokens": 1}))
        assert first.started.speculating is expected

    async def test_many_at_once(self, target: Any) -> None:
        requests = [asking(50 + i, sampling={"max_tokens": 20}) for i in range(32)]
        results = await asyncio.gather(*(answers(target, request) for request in requests))
        assert [tokens_of(result) for result in results] == [[51 + i + j for j in range(20)] for i in range(32)]


class TestEnds:
    @pytest.mark.parametrize("paused", [True, False], ids=["waiting", "running"])
    async def test_cancel_frees_at_once(self, targets: Any, paused: bool) -> None:
        engine = ScriptedEngine(tick=0.005)
        async with targets(engine) as target:
            if paused:
                engine.paused.set()
            stream = target.stub.Generate(asking(sampling={"max_tokens": 200}))
            for _ in range(1 if paused else 3):
                await stream.read()
            stream.cancel()
            await target.idle()
            assert engine.cancelled == [1]

    async def test_deadline_frees_at_once(self, targets: Any) -> None:
        engine = ScriptedEngine()
        engine.paused.set()
        async with targets(engine) as target:
            # Until one is long enough for the call to reach the engine.
            for seconds in (0.1, 1.0, 10.0):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await answers(target, asking(sampling={"max_tokens": 250}), timeout=seconds)
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                await target.idle()
                if engine.requests:
                    break
            assert engine.cancelled == [1]

    async def test_lost_client_frees_at_once(self, targets: Any) -> None:
        engine = ScriptedEngine(tick=0.005)
        async with targets(engine) as target:
            async with grpc.aio.insecure_channel(
                target.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                call = channel.unary_stream(
                    "/outrider.v1.TargetService/Generate",
                    request_serializer=pb.GenerateRequest.SerializeToString,
                    response_deserializer=pb.GenerateResponse.FromString,
                )(asking(sampling={"max_tokens": 250}))
                await call.read()
            await target.idle()
            assert engine.cancelled == [1]

    async def test_finished_is_not_cancelled(self, target: Any) -> None:
        await answers(target, asking(sampling={"max_tokens": 2}))
        await target.idle()
        assert target.engine.cancelled == []

    async def test_slow_reader_is_given_up(self, targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The engine frees the sequence while the reader sleeps; the reader learns of it when it wakes."""
        engine = ScriptedEngine(tick=0)
        monkeypatch.setattr(server_module, "UNREAD_STEPS", 0)
        async with targets(engine) as target:
            code, error = await refused(target, asking(sampling={"max_tokens": 250}))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.metadata == {"steps": "0"}
            assert engine.cancelled == [1]

    async def test_inbox_drops_what_nobody_reads(self) -> None:
        cancelled: list[int] = []
        queue = EventQueue(2, cancelled.append)
        verdicts = [StepVerdict(7, step, (), (step,), 0) for step in range(4)]
        for verdict in verdicts[:2]:
            queue.put(verdict)
        assert await queue.next_events() == verdicts[:2]
        for verdict in verdicts[1:3]:
            queue.put(verdict)
        assert cancelled == []
        queue.put(verdicts[3])
        assert cancelled == [7]
        with pytest.raises(OutriderError, match="too slowly"):
            await queue.next_events()


async def test_info(target: Any) -> None:
    info = await target.stub.GetTargetInfo(pb.GetTargetInfoRequest())
    assert (info.model, info.vocabulary_size, info.max_context, info.max_rows) == ("counter", VOCABULARY, 256, 16)
    assert (info.dtype, info.page_size, info.kv_tokens, info.kv_token_bytes) == ("float32", 16, 4096, 46_080)
    assert (info.drafter, list(info.end_token_ids), info.version) == ("trie", [END_TOKEN], "0.1.0")
    assert list(info.modes) == [1, 2, 3]
    assert (info.torch_version, info.triton_version) == ("2.9", "3.5")
    assert (info.device, info.device_name) == ("cuda:0", "A GPU")
    assert (info.captured_step_sizes, info.capturable_step_sizes) == (25, 26)
    assert (info.draft, info.draft_connected) == ("localhost:1", True)
    assert (info.speculating, info.speculation_reason) == (True, "it is scripted")
