"""/v1/responses through OpenAI's own package: whole, streamed, parsed, continued, with tools and with reasoning."""

from __future__ import annotations

import json
from typing import Any, get_args

import openai
import pytest
from pydantic import BaseModel

from outrider.sampling import FinishReason
from outrider_client.answers import ContentPart, ReasoningPart, ToolCallPart
from outrider_client.messages import ChatTurn
from outrider_client.results import Chunk, RequestTimes, Result, SpeculationTotals
from outrider_gateway.failures import Refused
from outrider_gateway.request_fields import RESPONSES_FIELDS, Use
from outrider_gateway.responses_json import ResponsesBuilder
from outrider_gateway.responses_request import ResponsesRequest, responses_request
from outrider_gateway.stored_responses import StoredResponse, StoredResponses
from outrider_gateway.token_texts import TokenTexts

# OpenAI's own types of events, by name.
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(openai.types.responses.ResponseStreamEvent)[0])
}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


PICTURE = {"type": "input_image", "image_url": "http://a.example/b.png"}


def asked(**more: Any) -> ResponsesRequest:
    return responses_request({"model": "m", "input": "hello", **more}, 8)


async def test_a_response_says_what_a_chat_says(real: Any, model: str) -> None:
    chat = await real.openai.chat.completions.create(
        model=model, max_tokens=20, temperature=0,
        messages=[{"role": "system", "content": "brief"}, {"role": "user", "content": "say something"}],
    )  # fmt: skip
    common = {"model": model, "instructions": "brief", "input": "say something", "max_output_tokens": 20}
    response = await real.openai.responses.create(temperature=0, metadata={"a": "b"}, **common)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat.usage.prompt_tokens and response.usage.output_tokens == 20
    assert (response.model, response.metadata, response.temperature) == (model, {"a": "b"}, 0)
    assert await real.openai.responses.retrieve(response.id) == response
    events = []
    async with real.openai.responses.stream(temperature=0, **common) as stream:
        async for event in stream:
            events.append(event)
    # OpenAI's package has no final response of one that was cut.
    last = events[-1].response
    assert last.output_text == response.output_text and last.usage.output_tokens == 20
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == last.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_conversation_goes_on(real: Any, model: str) -> None:
    # The tiny model's own text is no UTF-8.
    common = {"model": model, "temperature": 0, "extra_body": {"guided_regex": "[a-z]{5}"}}
    first = await real.openai.responses.create(input="one", instructions="brief", **common)
    second = await real.openai.responses.create(input="two", previous_response_id=first.id, **common)
    items = [{"role": "user", "content": "one"}, *(item.model_dump() for item in first.output)]
    again = await real.openai.responses.create(input=[*items, {"role": "user", "content": "two"}], **common)
    # Instructions are not carried on.
    assert second.usage.input_tokens == again.usage.input_tokens and second.output_text == again.output_text
    assert second.previous_response_id == first.id
    await real.openai.responses.delete(first.id)
    for gone in (
        real.openai.responses.retrieve(first.id),
        real.openai.responses.create(input="x", previous_response_id=first.id, **common),
    ):
        with pytest.raises(openai.NotFoundError):
            await gone
    third = await real.openai.responses.create(input="x", store=False, **common)
    with pytest.raises(openai.NotFoundError):
        await real.openai.responses.retrieve(third.id)
    # Nobody else's.
    assert (await real.http.get(f"/v1/responses/{second.id}")).status_code == 200
    other = await real.http.get(f"/v1/responses/{second.id}", headers={"outrider-tenant": "other"})
    assert other.status_code == 404


async def test_a_response_is_parsed(real: Any, model: str) -> None:
    class Answer(BaseModel):
        good: bool

    response = await real.openai.responses.parse(model=model, input="x", text_format=Answer, max_output_tokens=40)
    assert response.output_parsed is not None and isinstance(response.output_parsed.good, bool)
    assert response.status == "completed"


async def test_log_probabilities_are_included(real: Any, model: str) -> None:
    response = await real.openai.responses.create(
        model=model,
        input="x",
        max_output_tokens=4,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        extra_body={"ignore_eos": True},
    )
    listed = response.output[0].content[0].logprobs
    assert len(listed) == 4 and all(len(entry.top_logprobs) == 2 for entry in listed)


def test_items_become_turns() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "fc", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "6"}]},
    ]  # fmt: skip
    turns = asked(input=items, instructions="first", tools=[TOOL]).prompts[0].messages
    assert turns[0] == ChatTurn("system", "first\n\nbrief")
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool", "tool"]
    assert (turns[1].content, turns[2].content, turns[2].reasoning) == ("a\nb", "ok", "hm")
    assert [call.id for call in turns[2].tool_calls] == ["c1", "c2"]
    assert [(turn.tool_call_id, turn.content) for turn in turns[3:]] == [("c1", "5"), ("c2", "6")]


# Fields that are taken, with values that make another request, and what some need beside them.
VALUES: dict[str, Any] = {
    "input": "other", "instructions": "x", "previous_response_id": "r", "store": False, "max_output_tokens": 5,
    "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}, "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False,
    "include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"},
    "chat_template_kwargs": {"a": 1}, "enable_thinking": False,
}  # fmt: skip
BESIDE = {"tool_choice": {"tools": [TOOL]}, "parallel_tool_calls": {"tools": [TOOL]}}


@pytest.mark.parametrize("name", VALUES)
def test_every_field_does_something(name: str) -> None:
    beside = BESIDE.get(name, {})
    assert asked(**beside, **{name: VALUES[name]}) != asked(**beside)


def test_other_fields_are_ignored_or_refused_with_a_reason() -> None:
    for field in RESPONSES_FIELDS.values():
        if field.use is Use.IGNORED:
            assert asked(**{field.name: "x"}).sampling == asked().sampling
        elif field.use is Use.REFUSED:
            for value in field.harmless:
                assert asked(**{field.name: value}).sampling == asked().sampling
            with pytest.raises(Refused) as raised:
                asked(**{field.name: "anything"})
            assert raised.value.message == f"{field.name}: is not supported: {field.note}"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"truncation": "head"}, "truncation"),
        ({"tools": [{**TOOL, "parameters": json.loads('{"a":' * 250 + "1" + "}" * 250)}]}, "tools"),
        ({"metadata": {"a": "v" * 513}}, "metadata.a"),
        ({"metadata": {"a": {"b": {}}}}, "metadata.a"),
        ({"metadata": {"n" * 65: ""}}, f"metadata.{'n' * 64}"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"mystery": 1}, "mystery"),
    ],
)  # fmt: skip
def test_refusals(more: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as raised:
        asked(**more)
    assert (raised.value.status, raised.value.param) == (400, param)


async def test_an_error_behind_the_first_event_is_an_event(gateways: Any) -> None:
    async with gateways() as gateway:
        gateway.targets[0].engine.pause_after(2)
        stream = await gateway.openai.responses.create(model="counter", input="x", stream=True, max_output_tokens=8)
        with pytest.raises(openai.APIError, match="engine"):
            async for event in stream:
                if event.type == "response.output_text.delta":
                    gateway.targets[0].engine.die(RuntimeError("dead"))


def result(finish: FinishReason = FinishReason.END_OF_SEQUENCE) -> Result:
    totals = SpeculationTotals(1, 0, 0, 0, (), (), 0, 0)
    return Result("", (), finish, None, None, 7, 5, totals, RequestTimes(0, 0, 0), 0, 0, cached_tokens=3)


def events_of(*chunks: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The events of an answer with these parts, each checked against OpenAI's types."""
    builder = ResponsesBuilder(asked(stream=True, tools=[TOOL]), "m", TokenTexts(), ())
    raw = b"".join(builder.chunk(0, Chunk((1,), "", 0, 0, parts=parts)) for parts in chunks) + builder.last(0, result())
    found = []
    for number, event in enumerate(raw.decode().strip().split("\n\n")):
        name, data = event.split("\n")
        read = json.loads(data.removeprefix("data: "))
        assert name == f"event: {read['type']}" and read["sequence_number"] == number
        EVENTS[read["type"]].model_validate(read)
        found.append(read)
    return found


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events = events_of(
        (ReasoningPart("h"), ReasoningPart("m")),
        (ContentPart("so "), ContentPart("it is"), ToolCallPart(0, "c1", "add", '{"a":')),
        (ToolCallPart(0, arguments="1}"), ToolCallPart(1, "c2", "add")),
        (ToolCallPart(1, arguments="{}"),),
    )
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert output[1]["content"][0]["text"] == "so it is"
    assert [(item["call_id"], item["arguments"]) for item in output[2:]] == [("c1", '{"a":1}'), ("c2", "{}")]
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert events[-1]["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:6] == ["created", "in_progress", "output_item.added", "content_part.added",
                         "reasoning_text.delta", "reasoning_text.delta"]  # fmt: skip
    for place, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == place]
        assert own[0]["type"] == "response.output_item.added" and own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item and {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        assert item["status"] == "completed"


def test_an_answer_without_parts_is_an_empty_message() -> None:
    (item,) = events_of(())[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


async def test_stored_responses_are_bounded_for_each_tenant() -> None:
    now = 0.0
    stored = StoredResponses(13_000, 10.0, lambda: now)
    small = StoredResponse(b"x" * 500, (ChatTurn("user", "a"),))
    assert not await stored.put("a", "large", StoredResponse(b"x" * 4000, ()))
    for number in range(4):
        assert await stored.put("a", f"{number}", small)
    # A quarter of all is a tenant's.
    assert [bool(await stored.get("a", f"{number}")) for number in range(4)] == [False, False, True, True]
    assert (await stored.get("b", "3")) is None and not await stored.delete("b", "3")
    for tenant in "bcdef":
        for number in range(3):
            await stored.put(tenant, f"{number}", small)
        assert stored.kept_bytes <= 13_000
    assert (await stored.get("f", "2")) is small
    now = 11.0
    assert (await stored.get("f", "2")) is None and stored.kept_bytes == 0
