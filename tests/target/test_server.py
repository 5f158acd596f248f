"""Generate and GetTargetInfo over a real socket and a scripted engine."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from scripted_engine import END_TOKEN, SERVED, VOCABULARY, ScriptedEngine, successor

from outrider.errors import InvalidField, OutriderError
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire import error_of_rpc
from target_service.inbox import Inbox
from target_service.sequence import Verdict
from target_service.server import StreamLimits


def asking(*token_ids: int, **fields: Any) -> pb.GenerateRequest:
    """A request for `token_ids`; nested messages may be given as dictionaries."""
    return pb.GenerateRequest(tokens=pb.TokenInput(token_ids=token_ids or (10, 20)), **fields)


async def answers(target: Any, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
    return [response async for response in target.stub.Generate(request, **options)]


async def refused(target: Any, request: pb.GenerateRequest, **options: Any) -> tuple[grpc.StatusCode, OutriderError]:
    """How a request fails, after checking that it left nothing behind."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(target, request, **options)
    assert len(target.sequences) == 0
    return caught.value.code(), error_of_rpc(caught.value)


def tokens_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.chunk.token_ids]


class TestGenerate:
    async def test_events_in_order(self, target: Any) -> None:
        request = asking(10, 20, sampling={"max_tokens": 5, "seed": 9, "temperature": 0.5})
        first, *chunks, last = await answers(target, request)
        started = first.started
        assert (started.sequence_id, started.prompt_tokens, started.seed) == (1, 2, 9)
        assert started.mode == tree_pb2.VERIFICATION_MODE_COUPLED
        assert (started.speculating, started.model) == (True, "counter")
        assert tokens_of(chunks) == [21, 22, 23, 24, 25]
        assert [response.chunk.step for response in chunks] == [0, 1, 2, 3, 4]
        assert (chunks[0].timings.queue_nanoseconds, chunks[0].timings.compute_nanoseconds) == (5, 7)
        finished = last.finished
        assert finished.finish_reason == pb.FINISH_REASON_LENGTH
        assert finished.WhichOneof("matched") is None
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 5)
        assert finished.speculation.steps == 5

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


BAD_FIELDS = {
    "no-input": (pb.GenerateRequest(), "input"),
    "no-tokens": (pb.GenerateRequest(tokens=pb.TokenInput()), "tokens.token_ids"),
    "token-outside": (asking(1, VOCABULARY), "tokens.token_ids[1]"),
    "token-at-the-top": (asking(1, 2**32 - 1), "tokens.token_ids[1]"),
    "empty-text": (pb.GenerateRequest(text=""), "text"),
    "no-messages": (pb.GenerateRequest(chat=pb.ChatInput()), "chat.messages"),
    "bad-role": (
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="tool", content="x")])),
        "chat.messages[0].role",
    ),
    "bias-outside": (asking(sampling={"logit_bias": {VOCABULARY: 1.0}}), f"sampling.logit_bias[{VOCABULARY}]"),
    "bias-nan": (asking(sampling={"logit_bias": {3: math.nan}}), "sampling.logit_bias[3]"),
    "empty-stop": (asking(sampling={"stop": [""]}), "sampling.stop[0]"),
    "long-stop": (asking(sampling={"stop": ["x" * 257]}), "sampling.stop[0]"),
    "many-stops": (asking(sampling={"stop": ["x"] * 17}), "sampling.stop"),
    "stop-token-outside": (asking(sampling={"stop_token_ids": [2**32 - 1]}), "sampling.stop_token_ids[0]"),
    "min-over-max": (asking(sampling={"min_tokens": 3, "max_tokens": 2}), "sampling.min_tokens"),
    "many-nodes": (asking(speculation={"max_nodes": SERVED.max_rows}), "speculation.max_nodes"),
    "bad-corpus": (asking(speculation={"corpus": "../x"}), "speculation.corpus"),
    "greedy-at-heat": (
        asking(sampling={"temperature": 1}, speculation={"mode": "VERIFICATION_MODE_GREEDY"}),
        "speculation.mode",
    ),
    "coupled-at-zero": (asking(speculation={"mode": "VERIFICATION_MODE_COUPLED"}), "speculation.mode"),
    "unknown-mode": (asking(speculation={"mode": 99}), "speculation.mode"),
} | {
    f"{name}={value}": (asking(sampling={name: value}), f"sampling.{name}")
    for name, values in {
        "temperature": [math.nan, math.inf, -1.0],
        "top_p": [0.0, 1.5, math.nan, -0.1],
        "min_p": [-0.1, 1.1, math.nan],
        "repetition_penalty": [0.0, -1.0, math.nan, math.inf],
        "presence_penalty": [-2.1, 2.1, math.nan],
        "frequency_penalty": [-2.1, 2.1, math.nan],
        "max_tokens": [0],
        "logprobs": [21, 2**32 - 1],
    }.items()
    for value in values
}


class TestRefusals:
    @pytest.mark.parametrize(("request_", "field"), BAD_FIELDS.values(), ids=BAD_FIELDS)
    async def test_bad_field_is_named(self, targets: Any, byte_tokenizer: Any, request_: Any, field: str) -> None:
        async with targets(served=replace(SERVED, tokenizer=byte_tokenizer)) as target:
            code, error = await refused(target, request_)
            assert not target.engine.requests
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error, InvalidField)
        assert error.field == field

    async def test_other_model(self, target: Any) -> None:
        code, error = await refused(target, asking(model="another"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert error.metadata == {"served": "counter"}
        assert await answers(target, asking(model="counter", sampling={"max_tokens": 1}))

    async def test_prompt_past_the_context(self, target: Any) -> None:
        code, error = await refused(target, asking(*[5] * SERVED.max_context))
        assert code is grpc.StatusCode.OUT_OF_RANGE
        assert error.metadata == {"tokens": "256", "limit": "255"}

    @pytest.mark.parametrize(
        "request_",
        [
            pb.GenerateRequest(text="abc"),
            pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a")])),
            asking(sampling={"stop": ["x"]}),
        ],
        ids=["text", "chat", "stop"],
    )
    async def test_text_without_a_tokenizer(self, target: Any, request_: pb.GenerateRequest) -> None:
        code, _ = await refused(target, request_)
        assert code is grpc.StatusCode.FAILED_PRECONDITION

    async def test_full_queue_says_when_to_try_again(self, targets: Any) -> None:
        engine = ScriptedEngine(max_sequences=1)
        engine.paused.set()
        async with targets(engine) as target:
            stream = target.stub.Generate(asking())
            await stream.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers(target, asking())
            stream.cancel()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.seconds == 1

    async def test_draining(self, target: Any) -> None:
        target.engine.drain()
        code, _ = await refused(target, asking())
        assert code is grpc.StatusCode.UNAVAILABLE

    @pytest.mark.parametrize("when", ["before", "meanwhile"])
    async def test_dead_engine(self, target: Any, when: str) -> None:
        if when == "before":
            target.engine.die(RuntimeError("kernel"))
            await asyncio.sleep(0.01)
            code, _ = await refused(target, asking())
        else:
            target.engine.paused.set()
            stream = target.stub.Generate(asking())
            await stream.read()
            target.engine.die(RuntimeError("kernel"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            code = caught.value.code()
        assert code is grpc.StatusCode.INTERNAL

    @pytest.mark.parametrize(
        "payload",
        [
            b"\xff\xff\xff\xff",
            b"\x22\x7f\x01",
            b"\x0a\x02\xff\xfe",
            b"\x2b" * 5000,
        ],
        ids=["garbage", "truncated", "bad-utf8", "nested-groups"],
    )
    @pytest.mark.parametrize("method", ["Generate", "Verify"])
    async def test_malformed_bytes_harm_nobody_else(self, target: Any, payload: bytes, method: str) -> None:
        call = target.channel.stream_stream(f"/outrider.v1.TargetService/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(iter([payload]), timeout=5):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await answers(target, asking(sampling={"max_tokens": 1}))

    async def test_large_message(self, targets: Any) -> None:
        async with targets(max_message_bytes=4096) as target:
            code, _ = await refused(target, asking(*[70000] * 2000))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await answers(target, asking(sampling={"max_tokens": 1}))


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
        engine = ScriptedEngine(tick=0.01)
        async with targets(engine) as target:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers(target, asking(sampling={"max_tokens": 250}), timeout=0.1)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await target.idle()
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

    async def test_slow_reader_is_given_up(self, targets: Any) -> None:
        """The engine frees the sequence while the reader sleeps; the reader learns of it when it wakes."""
        engine = ScriptedEngine(tick=0)
        async with targets(engine, limits=StreamLimits(unread_steps=0)) as target:
            code, error = await refused(target, asking(sampling={"max_tokens": 250}))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.metadata == {"steps": "0"}
            assert engine.cancelled == [1]

    async def test_inbox_drops_what_nobody_reads(self) -> None:
        cancelled: list[int] = []
        inbox = Inbox(2, cancelled.append)
        verdicts = [Verdict(7, step, (), (step,), 0) for step in range(4)]
        for verdict in verdicts[:2]:
            inbox.put(verdict)
        assert await inbox.get() == verdicts[0]
        inbox.put(verdicts[2])
        assert cancelled == []
        inbox.put(verdicts[3])
        assert cancelled == [7]
        with pytest.raises(OutriderError, match="too slowly"):
            await inbox.get()


async def test_info(target: Any) -> None:
    info = await target.stub.GetTargetInfo(pb.GetTargetInfoRequest())
    assert (info.model, info.vocabulary_size, info.max_context, info.max_rows) == ("counter", VOCABULARY, 256, 16)
    assert (info.dtype, info.page_size, info.kv_tokens) == ("float32", 16, 4096)
    assert (info.drafter, list(info.end_token_ids), info.version) == ("trie", [END_TOKEN], "0.1.0")
    assert list(info.modes) == [1, 2, 3]
    assert successor(VOCABULARY - 1) == 0
