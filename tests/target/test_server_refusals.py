"""What Generate refuses, how it says so, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import grpc
import pytest
from generation import answers, asking, refused
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from scripted_engine import SERVED, VOCABULARY, ScriptedEngine
from waits import HUNG_SECONDS

from outrider.errors import InvalidField, NotSupported
from outrider.serving.calls import CallLimits
from outrider.v1 import target_pb2 as pb

BAD_FIELDS = {
    "no-input": (pb.GenerateRequest(), "input"),
    "no-tokens": (pb.GenerateRequest(tokens=pb.TokenInput()), "tokens.token_ids"),
    "token-outside": (asking(1, VOCABULARY), "tokens.token_ids[1]"),
    "token-at-the-top": (asking(1, 2**32 - 1), "tokens.token_ids[1]"),
    "empty-text": (pb.GenerateRequest(text=""), "text"),
    "no-messages": (pb.GenerateRequest(chat=pb.ChatInput()), "chat.messages"),
    "bad-role": (
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="critic", content="x")])),
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
    "predicted-outside": (
        asking(prediction={"tokens": {"token_ids": [1, VOCABULARY]}}),
        "prediction.tokens.token_ids[1]",
    ),
    "long-prediction": (
        asking(prediction={"tokens": {"token_ids": [1] * (SERVED.max_context + 1)}}),
        "prediction.tokens.token_ids",
    ),
    "long-predicted-text": (asking(prediction={"text": "é" * (8 * SERVED.max_context + 1)}), "prediction.text"),
    "bad-corpus": (asking(speculation={"corpus": "../x"}), "speculation.corpus"),
    "greedy-at-heat": (
        asking(sampling={"temperature": 1}, speculation={"mode": "VERIFICATION_MODE_GREEDY"}),
        "speculation.mode",
    ),
    "coupled-at-zero": (asking(speculation={"mode": "VERIFICATION_MODE_COUPLED"}), "speculation.mode"),
    "rule-of-another-mode": (asking(speculation={"typical": {"epsilon": 0.1}}), "speculation.typical"),
    "epsilon-of-one": (
        asking(speculation={"mode": "VERIFICATION_MODE_TYPICAL", "typical": {"epsilon": 1.0}}),
        "speculation.typical.epsilon",
    ),
    "delta-nan": (
        asking(speculation={"mode": "VERIFICATION_MODE_TYPICAL", "typical": {"delta": math.nan}}),
        "speculation.typical.delta",
    ),
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
    async def test_bad_field_is_named(self, targets: Any, model_tokenizer: Any, request_: Any, field: str) -> None:
        async with targets(served=replace(SERVED, tokenizer=model_tokenizer, lossy=True)) as target:
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

    async def test_typical_acceptance_where_the_operator_does_not_allow_it(self, target: Any) -> None:
        for temperature in (0.0, 0.8):
            asked = asking(sampling={"temperature": temperature}, speculation={"mode": "VERIFICATION_MODE_TYPICAL"})
            code, error = await refused(target, asked)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert isinstance(error, NotSupported)
            assert "--allow-lossy" in error.message
        assert not target.engine.requests

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
        assert code is grpc.StatusCode.UNAVAILABLE

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
            async for _ in call(iter([payload]), timeout=HUNG_SECONDS):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await answers(target, asking(sampling={"max_tokens": 1}))

    async def test_large_message(self, targets: Any) -> None:
        async with targets(limits=CallLimits(message_bytes=4096)) as target:
            code, _ = await refused(target, asking(*[70000] * 2000))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await answers(target, asking(sampling={"max_tokens": 1}))

    async def test_a_call_without_a_request_names_the_bound(
        self, targets: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """To a handler, a request that is larger than gRPC takes looks like one that never came."""
        async with targets(limits=CallLimits(message_bytes=4096)) as target:
            call = target.channel.stream_stream("/outrider.v1.TargetService/Generate")()
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        said = "request: is missing, or larger than the 4096 bytes of --max-message-bytes"
        assert caught.value.details() == said
        assert said in caplog.text and "Generate from ipv4:127.0.0.1:" in caplog.text
