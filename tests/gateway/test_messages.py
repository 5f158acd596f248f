"""Anthropic's /v1/messages: bodies, messages whole and in events, errors in its form, and counted tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.sampling import FinishReason
from outrider_client.answers import ContentPart, ReasoningPart, ToolCall, ToolCallPart
from outrider_client.messages import ChatTurn, ToolChoice
from outrider_client.results import Chunk, RequestTimes, Result, SpeculationTotals
from outrider_gateway.failures import Refused
from outrider_gateway.generation_request import GenerationRequest
from outrider_gateway.messages_json import MessageBuilder
from outrider_gateway.messages_request import count_call, messages_request
from outrider_gateway.request_fields import MESSAGES_FIELDS, Use
from outrider_gateway.token_texts import TokenTexts

HELLO = {"role": "user", "content": "hello"}
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


def asked(**more: Any) -> GenerationRequest:
    return messages_request({"model": "m", "max_tokens": 9, "messages": [HELLO], **more}, 8)


def test_blocks_become_turns() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "ok"},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "5"}]},
            {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    request = asked(messages=messages, system=[{"type": "text", "text": "brief"}], tools=[TOOL])
    assert request.prompts[0].messages == (
        ChatTurn("system", "brief"),
        ChatTurn("user", "a"),
        ChatTurn("assistant", "ok", (ToolCall("t1", "add", '{"a":1}'),), reasoning="hm"),
        ChatTurn("tool", "5", tool_call_id="t1"),
        ChatTurn("user", "and?"),
    )
    assert count_call({"messages": messages, "tools": [TOOL]}, 100).messages == request.prompts[0].messages[1:]


def test_fields_arrive() -> None:
    request = asked(
        stop_sequences=["x"], temperature=0.5, top_k=3, metadata={"user_id": "ann"}, stream=True, tools=[TOOL],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True}, thinking={"type": "disabled"},
    )  # fmt: skip
    sampling, tools = request.sampling, request.chat_options.tools
    assert (sampling.stop, sampling.temperature, sampling.top_k, sampling.max_tokens) == (("x",), 0.5, 3, 9)
    assert (request.user, request.stream) == ("ann", True)
    assert tools is not None and (tools.choice, tools.name, tools.single_call) == (ToolChoice.REQUIRED, "add", True)
    assert tools.definitions[0] == {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
    }
    assert request.chat_options.template_arguments["enable_thinking"] is False
    form = asked(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert form.sampling.structured_output is not None


def test_other_fields_are_ignored_or_refused_with_a_reason() -> None:
    for field in MESSAGES_FIELDS.values():
        if field.use is Use.IGNORED:
            assert asked(**{field.name: "x"}) == asked()
        elif field.use is Use.REFUSED:
            for value in field.harmless:
                assert asked(**{field.name: value}) == asked()
            with pytest.raises(Refused) as raised:
                asked(**{field.name: "anything"})
            assert raised.value.message == f"{field.name}: is not supported: {field.note}"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"mystery": 1}, "mystery"),
    ],
)
def test_refusals(more: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as raised:
        asked(**more)
    assert (raised.value.status, raised.value.param) == (400, param)


def result(finish: FinishReason = FinishReason.END_OF_SEQUENCE, **more: Any) -> Result:
    totals = SpeculationTotals(1, 0, 0, 0, (), (), 0, 0)
    return Result("", (), finish, None, None, 7, 5, totals, RequestTimes(0, 0, 0), 0, 0, cached_tokens=3, **more)


PARTS = (
    (ReasoningPart("h"), ReasoningPart("m")),
    (ContentPart("so "), ContentPart("it is"), ToolCallPart(0, "t1", "add", '{"a":')),
    (ToolCallPart(0, arguments="1}"), ToolCallPart(1, "t2", "add", "no JSON")),
)
BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "so it is"},
    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
    {"type": "tool_use", "id": "t2", "name": "add", "input": {"invalid_json": "no JSON"}},
]


def test_events_make_the_whole_message() -> None:
    builder = MessageBuilder(asked(), "m", TokenTexts(), ())
    done = result(tool_calls=(ToolCall("t1", "add"), ToolCall("t2", "add")))
    raw = b"".join(builder.chunk(0, Chunk((1,), "", 0, 0, parts=parts)) for parts in PARTS) + builder.last(0, done)
    events = []
    for event in raw.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 4 and events[-2]["usage"]["cache_read_input_tokens"] == 3
    for place, block in enumerate(BLOCKS):
        own = [event for event in events if event.get("index") == place]
        assert own[0]["type"] == "content_block_start" and own[-1]["type"] == "content_block_stop"
        deltas = [event["delta"] for event in own[1:-1]]
        kind = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[block["type"]]
        text = "".join(delta[kind] for delta in deltas)
        assert text == {"t1": '{"a":1}', "t2": "no JSON"}.get(str(block.get("id")), block.get(kind))


async def test_the_whole_message() -> None:
    builder = MessageBuilder(asked(), "m", TokenTexts(), ())
    for parts in PARTS:
        await builder.keep(0, Chunk((1,), "", 0, 0, parts=parts))
    message = builder.whole([result(FinishReason.LENGTH)])
    assert (message["content"], message["stop_reason"]) == (BLOCKS, "max_tokens")


async def test_a_message_says_what_a_chat_says(real: Any, model: str) -> None:
    chat = await real.openai.chat.completions.create(
        model=model, max_tokens=20, temperature=0,
        messages=[{"role": "system", "content": "brief"}, {"role": "user", "content": "say something"}],
    )  # fmt: skip
    body = {"model": model, "max_tokens": 20, "temperature": 0, "system": "brief"}
    body["messages"] = [{"role": "user", "content": "say something"}]
    message = (await real.http.post("/v1/messages", json=body, headers={"x-api-key": "any"})).json()
    assert message["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert (message["role"], message["stop_reason"], message["model"]) == ("assistant", "max_tokens", model)
    assert message["usage"]["output_tokens"] == 20
    counted = await real.http.post("/v1/messages/count_tokens", json={**body, "max_tokens": None, "temperature": None})
    usage = message["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    stream = (await real.http.post("/v1/messages", json={**body, "stream": True})).text
    assert stream.startswith("event: message_start\n") and stream.endswith('data: {"type":"message_stop"}\n\n')
    refused = await real.http.post("/v1/messages", json={**body, "max_tokens": None})
    assert refused.status_code == 400
    assert refused.json() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "max_tokens: is missing"},
    }
