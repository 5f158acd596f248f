"""JSON in a conversation, of tools and of their calls' arguments: shown as it was given, or a field of the caller."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import grpc
import pytest
from scripted_engine import SERVED
from scripted_service import Target

from outrider.errors import InvalidField
from outrider.structured_output import MAX_SCHEMA_DEPTH
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import error_of_rpc
from target_service.text.given_json import read_json
from target_service.text.tokenizer import ModelTokenizer

SHOWS_TOOLS = (
    "{% for call in messages[0].tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.parameters.properties | tojson }}{% endfor %}"
)
# Beyond 64 bits, as no number of msgpack is, and beyond 53 with a sign.
NUMBERS = '{"most": 123456789012345678901234567890, "least": -9223372036854775809, "each": [1e300, 0.1]}'
# Half of a pair is no character, and what follows is no number of JSON.
NO_JSON = ['{"a": "\\ud800"}', '{"\\ude00": 1}', '{"a": NaN}', '{"a": 1e400}', '{"a": ' + 5000 * "9" + "}", '{"a"', ""]


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


# Some are written again only where the stack is as shallow as when they were read.
TOO_DEEP = [nested(levels) for levels in (MAX_SCHEMA_DEPTH + 1, *range(920, 960), 5000)]


def definitions(properties: str) -> str:
    parameters = f'{{"type": "object", "properties": {properties}}}'
    return f'[{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}]'


def called(arguments: str) -> pb.ChatInput:
    call = pb.ToolCall(id="1", name="f", arguments=arguments)
    return pb.ChatInput(messages=[pb.ChatMessage(role="assistant", tool_calls=[call])])


def offered(given: str, choice: pb.ToolChoice = pb.TOOL_CHOICE_NONE) -> pb.ChatInput:
    return pb.ChatInput(
        messages=[pb.ChatMessage(role="user", content="hi")], tools=pb.Tools(definitions=given, choice=choice)
    )


async def read(target: Target, chat: pb.ChatInput) -> list[int]:
    """The tokens that the service makes of a conversation."""
    answer = await target.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    return list(answer.token_ids)


@pytest.fixture
def served(model_tokenizer: Any) -> Any:
    """A model whose template shows tools, in a context with room for them."""
    tokenizer = ModelTokenizer(model_tokenizer.backend, chat_template=SHOWS_TOOLS)
    return replace(SERVED, tokenizer=tokenizer, max_context=65536)


async def test_numbers_of_any_size_are_shown_as_they_are(targets: Any, served: Any) -> None:
    async with targets(served=served) as target:
        for chat in (called(NUMBERS), offered(definitions(NUMBERS))):
            shown = served.tokenizer.decode(await read(target, chat))
            assert json.loads(shown) == json.loads(NUMBERS)


@pytest.mark.parametrize("template", ["of tools", "of text"])
async def test_arguments_that_are_no_object_are_shown_as_text(
    targets: Any, served: Any, model_tokenizer: Any, template: str
) -> None:
    tokenizer = served.tokenizer if template == "of tools" else model_tokenizer
    async with targets(served=replace(served, tokenizer=tokenizer)) as target:
        for arguments in filter(None, (*NO_JSON, *TOO_DEEP, "[1]")):
            shown = tokenizer.decode(await read(target, called(arguments)))
            assert json.dumps(arguments) in shown


@pytest.mark.parametrize("choice", [pb.TOOL_CHOICE_AUTO, pb.TOOL_CHOICE_NONE, pb.TOOL_CHOICE_REQUIRED])
async def test_tools_that_cannot_be_read_are_a_field_of_the_caller(
    targets: Any, model_tokenizer: Any, choice: pb.ToolChoice
) -> None:
    async with targets(served=replace(SERVED, tokenizer=model_tokenizer, max_context=65536)) as target:
        for given, reason in ((NO_JSON, "is not JSON"), (TOO_DEEP, "levels deep")):
            for one in given:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in target.stub.Generate(pb.GenerateRequest(chat=offered(definitions(one), choice))):
                        pass
                error = error_of_rpc(raised.value)
                assert isinstance(error, InvalidField) and error.field == "chat.tools.definitions"
                assert reason in error.problem


def test_levels_are_those_of_a_schema() -> None:
    assert read_json(nested(MAX_SCHEMA_DEPTH)) == json.loads(nested(MAX_SCHEMA_DEPTH))
    for text in TOO_DEEP:
        with pytest.raises(ValueError, match="levels deep"):
            read_json(text)
