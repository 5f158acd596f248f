"""Tools and reasoning by openai's package: before a target that writes given answers, and before a real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import AsyncChatCompletionStream
from pydantic import BaseModel
from scripted_engine import WritingEngine
from scripted_service import byte_tokenizer, model_tokenizer
from transformers import PreTrainedModel
from warm_python import shared_python, warm_executable

from outrider_client.local.stack import Stack

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
# Shows all that a template may be given; and its words choose the form of Hermes, with reasoning.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{{ m.name }}]{{ m.content }}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    '{% endfor %}{{ tools | tojson }}{% if false %}<tool_call> "arguments" </think>{% endif %}<|im_start|>assistant\n'
    "{% if enable_thinking %}<think>{% endif %}"
)
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "Add", "arguments": {"x": 1, "kind": "whole"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Add", "arguments": {"x": 2, "kind": "whole"}}\n</tool_call>'
)


class Add(BaseModel):
    """Add a number."""

    x: int
    kind: Literal["whole", "real"]


ADD = openai.pydantic_function_tool(Add)


def writing(gateways: Any, text: str) -> Any:
    """A gateway before a target that answers with this text."""
    tokenizer = model_tokenizer()
    tokenizer.chat_template = TEMPLATE
    engine = WritingEngine([3 + byte for byte in text.encode()])
    return gateways(engine, served={"tokenizer": tokenizer, "max_context": 4096}), engine, tokenizer


async def test_calls_come_whole_and_in_pieces(gateways: Any) -> None:
    running, _, _ = writing(gateways, CALLS)
    asked: dict[str, Any] = {"model": "counter", "messages": MESSAGES, "tools": [ADD]}
    async with running as gateway:
        whole = (await gateway.openai.chat.completions.create(**asked)).choices[0]
        raw = [chunk async for chunk in await gateway.openai.chat.completions.create(**asked, stream=True)]
        helper: AsyncChatCompletionStream[Any]
        async with gateway.openai.chat.completions.stream(**asked) as helper:
            events = [event async for event in helper]
            joined = (await helper.get_final_completion()).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("Let me see.", "tool_calls")
    assert [call.function.name for call in whole.message.tool_calls] == ["Add", "Add"]
    assert [json.loads(call.function.arguments)["x"] for call in whole.message.tool_calls] == [1, 2]
    assert len({call.id for call in whole.message.tool_calls}) == 2
    # What OpenAI's own helper makes of the pieces, parsed by the tool's schema.
    assert (joined.message.content, joined.finish_reason) == ("Let me see.", "tool_calls")
    assert [call.function.parsed_arguments for call in joined.message.tool_calls] == [
        Add(x=1, kind="whole"), Add(x=2, kind="whole")
    ]  # fmt: skip
    assert [event.index for event in events if event.type == "tool_calls.function.arguments.done"] == [0, 1]
    pieces = [piece for chunk in raw for piece in chunk.choices[0].delta.tool_calls or []]
    firsts = [piece for piece in pieces if piece.id]
    assert [(piece.index, piece.type, piece.function.name) for piece in firsts] == [
        (0, "function", "Add"), (1, "function", "Add")
    ]  # fmt: skip
    assert all(piece.type is piece.function.name is None for piece in pieces if not piece.id)
    assert len(pieces) > 4


async def test_one_call_at_most_and_none(gateways: Any) -> None:
    running, _, _ = writing(gateways, CALLS)
    async with running as gateway:
        create = gateway.openai.chat.completions.create
        one = await create(model="counter", messages=MESSAGES, tools=[ADD], parallel_tool_calls=False)
        none = await create(model="counter", messages=MESSAGES, tools=[ADD], tool_choice="none")
    assert len(one.choices[0].message.tool_calls) == 1
    assert none.choices[0].message.tool_calls is None
    assert none.choices[0].message.content == CALLS
    assert none.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(("opened", "said"), [(False, "<think>\nhm\n</think>\n\nyes"), (True, "hm\n</think>\n\nyes")])
async def test_reasoning_stands_apart(gateways: Any, opened: bool, said: str) -> None:
    running, _, _ = writing(gateways, said)
    asked: dict[str, Any] = {
        "model": "counter", "messages": MESSAGES, "extra_body": {"chat_template_kwargs": {"enable_thinking": opened}}
    }  # fmt: skip
    async with running as gateway:
        create = gateway.openai.chat.completions.create
        message = (await create(**asked)).choices[0].message
        deltas = [chunk.choices[0].delta async for chunk in await create(**asked, stream=True)]
        asked["extra_body"]["include_reasoning"] = False
        without = (await create(**asked)).choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("yes", "hm", "hm")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    assert without.content == "yes" and not hasattr(without, "reasoning_content")


async def test_the_template_gets_tools_and_their_history(gateways: Any) -> None:
    running, engine, tokenizer = writing(gateways, "yes")
    call = {"id": "c1", "type": "function", "function": {"name": "Add", "arguments": '{"x": 1}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    async with running as gateway:
        await gateway.openai.chat.completions.create(model="counter", messages=turns, tools=[ADD])
    said = tokenizer.decode(engine.requests[0].token_ids)
    # Arguments are an object, and a result has its tool's name.
    assert said.startswith('[user]hi[assistant]hmc1Add{"x": 1}[toolAdd]2' + json.dumps([ADD]))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters.type"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "Sub"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"required": 5}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
async def test_wrong_tools_are_refused(gateways: Any, more: dict[str, Any], param: str) -> None:
    running, _, _ = writing(gateways, "yes")
    async with running as gateway:
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.openai.chat.completions.create(model="counter", messages=MESSAGES, **more)
    assert refused.value.param.startswith(param)


async def test_tools_that_nobody_knows_the_calls_of(gateways: Any) -> None:
    tokenizer = model_tokenizer()
    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    async with gateways(served={"tokenizer": tokenizer, "max_context": 4096}) as gateway:
        with pytest.raises(openai.BadRequestError, match="response_template"):
            await gateway.openai.chat.completions.create(model="counter", messages=MESSAGES, tools=[ADD])


@pytest.fixture(scope="module")
def calling_target(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A target service with random weights, whose chat template takes tools."""
    folder, tokenizer = tmp_path_factory.mktemp("model") / "calling", byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("tools | tojson", "tools[0].function.name")
    tiny_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with asyncio.Runner() as runner:
        stack = Stack(tmp_path_factory.mktemp("sockets"))
        flags = ("--model", str(folder), "--dtype", "float32", "--threads", "1")
        try:
            with warm_executable(shared_python("services")):
                address = runner.run(stack.start("target", "target_service", *flags))
            yield address
        finally:
            runner.run(stack.__aexit__(None, None, None))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Add"}}])
async def test_random_weights_call_tools_that_they_must(gateway_before: Any, calling_target: str, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "calling", "messages": MESSAGES, "tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False,
        "temperature": 1.0, "seed": 3, "max_tokens": 400,
    }  # fmt: skip
    async with gateway_before([calling_target], []) as gateway:
        whole = (await gateway.openai.chat.completions.create(**asked)).choices[0]
        async with gateway.openai.chat.completions.stream(**asked) as stream:
            joined = (await stream.get_final_completion()).choices[0]
    assert whole.finish_reason == joined.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name == "Add" and whole.message.content is None
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
    (again,) = joined.message.tool_calls
    assert again.function.arguments == call.function.arguments
    assert again.function.parsed_arguments == Add.model_validate_json(call.function.arguments)
