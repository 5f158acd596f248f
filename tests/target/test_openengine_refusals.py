"""What OpenEngine's services refuse, by its own names of fields; and any message gets an answer or that."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import grpc
import pytest
from examples import examples
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from openengine_calls import calling, generate_request, outputs_of, refusal
from scripted_engine import SERVED, VOCABULARY
from scripted_service import served_tokenizer, target_over

from outrider.errors import InvalidField, OutriderError
from outrider.openengine import openengine_pb2 as pb
from outrider.runtime import run
from outrider.wire.trees import error_of_rpc

TEXT, TOKEN = {"stop_text": "x"}, {"stop_token_id": 5}
BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "long-id": ({"request_id": "é" * 129}, "request_id"),
    "empty-prompt": ({"prompt": ""}, "prompt"),
    "long-prompt": ({"prompt": "x" * 8192}, "prompt"),
    "session": ({"kv": {"session": {}}}, "kv.session"),
    "salt": ({"kv": {"cache_salt": "x"}}, "kv.cache_salt"),
    "media": ({"media": [{"url": "http://localhost"}]}, "media"),
    "adapter": ({"lora_name": "x"}, "lora_name"),
    "no-outputs": ({"sampling": {"num_sequences": 0}}, "sampling.num_sequences"),
    "many-outputs": ({"sampling": {"num_sequences": 65}}, "sampling.num_sequences"),
    "top-k": ({"sampling": {"top_k": -2}}, "sampling.top_k"),
    "no-tokens": ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens"),
    "least-over-most": ({"stopping": {"max_tokens": 2, "min_tokens": 3}}, "stopping.min_tokens"),
    "no-condition": ({"stopping": {"conditions": [TOKEN, {}]}}, "stopping.conditions[1]"),
    "empty-stop": (
        {"stopping": {"conditions": [TOKEN, TEXT, {"stop_text": ""}]}},
        "stopping.conditions[2].stop_text",
    ),
    "stop-outside": (
        {"stopping": {"conditions": [TEXT, TOKEN, {"stop_token_id": VOCABULARY}]}},
        "stopping.conditions[2].stop_token_id",
    ),
    "many-stops": ({"stopping": {"conditions": [TEXT] * 17}}, "stopping.conditions"),
    "many-stop-tokens": ({"stopping": {"conditions": [TOKEN] * 65}}, "stopping.conditions"),
    "all-candidates": ({"response": {"output_candidates": {"all": {}}}}, "response.output_candidates.all"),
    "candidates-by-id": (
        {"response": {"prompt_candidates": {"token_ids": {"ids": [1]}}}},
        "response.prompt_candidates.token_ids",
    ),
    "no-selection": ({"response": {"output_candidates": {}}}, "response.output_candidates"),
    "candidates-of-nothing": (
        {"response": {"return_prompt_logprobs": False, "prompt_candidates": {"top_n": 1}}},
        "response.prompt_candidates",
    ),
    "many-candidates": ({"response": {"prompt_candidates": {"top_n": 21}}}, "response.prompt_candidates.top_n"),
    "no-guide": ({"guided": {}}, "guided"),
    "ebnf": ({"guided": {"ebnf_grammar": 'root ::= "a"'}}, "guided.ebnf_grammar"),
    "tag": ({"guided": {"structural_tag": "{}"}}, "guided.structural_tag"),
    "no-choices": ({"guided": {"choice": {}}}, "guided.choice.choices"),
    "same-choices": ({"guided": {"choice": {"choices": ["a", "a"]}}}, "guided.choice.choices"),
    "no-schema": ({"guided": {"json_schema": "{"}}, "guided.json_schema"),
    "no-expression": ({"guided": {"regex": "("}}, "guided.regex"),
    "backend": ({"guided": {"regex": "a", "backend": "xgrammar"}}, "guided.backend"),
    "form-without-end": ({"guided": {"regex": "a"}, "stopping": {"ignore_eos": True}}, "stopping.ignore_eos"),
} | {
    f"{name}={value}": ({"sampling": {name: value}}, f"sampling.{name}")
    for name, values in {
        "temperature": [math.nan, -1.0],
        "top_p": [0.0, 1.5],
        "min_p": [-0.1],
        "repetition_penalty": [0.0],
        "presence_penalty": [2.1],
        "frequency_penalty": [-2.1],
    }.items()
    for value in values
}


@pytest.mark.parametrize("name", BAD_FIELDS)
async def test_wrong_fields(targets: Any, model_tokenizer: Any, name: str) -> None:
    fields, field = BAD_FIELDS[name]
    async with targets(served=replace(SERVED, tokenizer=model_tokenizer)) as target:
        code, error = await refusal(target.channel, "Generate", generate_request(**fields))
        assert (code, error.metadata.get("field")) == (grpc.StatusCode.INVALID_ARGUMENT, field), error
        assert isinstance(error, InvalidField) and len(target.sequences) == 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(request_id="x"), "input"),
        (pb.GenerateRequest(token_ids={}), "token_ids.ids"),
        (pb.GenerateRequest(token_ids={"ids": [1, VOCABULARY]}), "token_ids.ids[1]"),
        (b"\xff", "request"),
    ],
)
async def test_wrong_input(target: Any, request_: Any, field: str) -> None:
    code, error = await refusal(target.channel, "Generate", request_)
    assert (code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("openengine-routing-key", ["", "a,b"]),
        ("openengine-target-dp-rank", ["1", "-1", "x", "", "4294967296", "0,0"]),
        ("openengine-priority", ["x", "2147483648", "-2147483649", "1.5", "1,1", "+1"]),
    ],
)
async def test_metadata(target: Any, key: str, values: list[str]) -> None:
    for value in values:
        pairs = tuple((key, part) for part in value.split(","))
        code, error = await refusal(target.channel, "Generate", generate_request(), metadata=pairs)
        assert (code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, f"metadata.{key}"), value
    good = (("openengine-routing-key", "k"), ("openengine-target-dp-rank", "0"), ("openengine-priority", "-7"))
    request = generate_request(stopping={"max_tokens": 1})
    assert (await outputs_of(target.channel, request, metadata=good)).tokens() == [21]


async def test_a_model_without_a_tokenizer_takes_token_ids(target: Any) -> None:
    for fields in ({"prompt": "a"}, {"stopping": {"conditions": [TEXT]}}, {"guided": {"regex": "a"}}):
        code, error = await refusal(target.channel, "Generate", generate_request(**fields))
        assert (code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_SUPPORTED")


# Values that are often right, and the ends of what the fields hold.
_TOKENS = st.integers(0, 12) | st.sampled_from([VOCABULARY - 1, VOCABULARY, 2**32 - 1])
_NUMBERS = {
    "double": st.sampled_from([0.0, 0.5, 1.0]) | st.floats(),
    "uint32": st.sampled_from([0, 1, 2]) | st.integers(0, 2**32 - 1),
    "int32": st.sampled_from([-1, 0, 1]) | st.integers(-(2**31), 2**31 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "bool": st.booleans(),
    "string": st.text(max_size=8),
}


def messages(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Any message of a kind, with some of its fields."""

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        message: Any = kind()
        for field in kind.DESCRIPTOR.fields:
            if not draw(st.booleans()):
                continue
            if field.message_type is not None:
                inner = getattr(message, field.name)
                if field.message_type.full_name == "google.protobuf.Struct":
                    inner.update({"key": 1})
                    continue
                strategy = messages(field.message_type._concrete_class)
                if field.is_repeated:
                    inner.extend(draw(st.lists(strategy, max_size=2)))
                else:
                    inner.CopyFrom(draw(strategy))
            elif field.is_repeated:
                values = (
                    _TOKENS
                    if field.name == "ids"
                    else _NUMBERS["string" if field.type == field.TYPE_STRING else "uint32"]
                )
                getattr(message, field.name).extend(draw(st.lists(values, max_size=3)))
            else:
                setattr(message, field.name, draw(_value(field)))
        return message

    return build()


def _value(field: Any) -> st.SearchStrategy[Any]:
    names = {getattr(field, f"TYPE_{name.upper()}"): name for name in _NUMBERS}
    if field.enum_type is not None:
        return st.integers(0, 6)
    if field.name == "ids":
        return _TOKENS
    if field.name == "max_tokens":
        return st.integers(0, 20)
    return _NUMBERS[names[field.type]]


@given(st.lists(messages(pb.GenerateRequest) | st.binary(max_size=40), min_size=1, max_size=6))
@examples(120)
def test_any_request_is_answered_or_refused(requests: list[Any]) -> None:
    """All at once, and each by itself in order; no bug shows, and nothing is left."""

    async def answered(channel: Any, request: Any) -> None:
        try:
            await outputs_of(channel, request)
        except grpc.aio.AioRpcError as error:
            assert error.code() is not grpc.StatusCode.INTERNAL, error.details()
            assert type(error_of_rpc(error)) is not OutriderError

    async def all_answered() -> None:
        async with target_over(served=replace(SERVED, tokenizer=served_tokenizer())) as target:
            await asyncio.gather(*[answered(target.channel, request) for request in requests])
            await target.idle()
            assert (await outputs_of(target.channel, generate_request(stopping={"max_tokens": 1}))).tokens() == [21]

    run(all_answered())


CONTROLS = ("GetServerInfo", "GetModelInfo", "GetLoad", "Health", "Abort", "GetKvConnectorInfo", "GetKvEventSources")


@given(
    st.lists(
        st.sampled_from(CONTROLS).flatmap(
            lambda method: st.tuples(
                st.just(method),
                st.binary(max_size=20)
                | messages(
                    pb.DESCRIPTOR.services_by_name["Control"].methods_by_name[method].input_type._concrete_class
                ),
            )
        ),
        max_size=6,
    )
)
@examples(120)
def test_any_call_of_control_is_answered_or_refused(calls: list[tuple[str, Any]]) -> None:
    async def all_answered() -> None:
        async with target_over() as target:
            for method, request in calls:
                try:
                    await calling(target.channel, method, request)
                except grpc.aio.AioRpcError as error:
                    assert type(error_of_rpc(error)) is not OutriderError
            await target.idle()

    run(all_answered())
