"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens as requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from outrider.admission.prompt_limits import MOST_CONTEXT, check_bytes
from outrider_client.client import Client
from outrider_client.messages import ChatOptions, ChatTurn
from outrider_client.results import TargetInfo
from outrider_gateway.bodies import (
    CountFields,
    GenerationFields,
    MessageOptions,
    MessagesFields,
    Name,
    Object,
    TemplateFields,
)
from outrider_gateway.failures import BadField
from outrider_gateway.fields import BodyObject, Fields, converted, read_object
from outrider_gateway.generation_request import CHAT_NAMES, GenerationRequest, Prompt
from outrider_gateway.messages_input import message_turns
from outrider_gateway.request_fields import MESSAGES_FIELDS
from outrider_gateway.structured import json_form
from outrider_gateway.translation import chat_options, completed, fitting, sampling_params

MESSAGES_NAMES = {**CHAT_NAMES, "stop": "stop_sequences"}


class OutputConfig(BodyObject):
    """`output_config`."""

    ignored: ClassVar[tuple[str, ...]] = ("effort", "task_budget")
    format: Any = None


class UserMetadata(BodyObject):
    """`metadata`."""

    user_id: Name = ""


class BlockToolChoice(BodyObject):
    """`tool_choice`."""

    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class BlockTool(BodyObject):
    """One of the caller's own tools."""

    ignored: ClassVar[tuple[str, ...]] = (
        *("cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers"),
    )
    type: str = "custom"
    name: str = ""
    description: str = ""
    input_schema: Object | None = None
    strict: bool = False


def messages_request(body: Mapping[str, Any], max_choices: int, max_prompt: int = MOST_CONTEXT) -> GenerationRequest:
    """The body of /v1/messages. Raises `Refused`, also for a text that cannot have as few as `max_prompt` tokens."""
    del max_choices
    fields = Fields(body)
    fields.refuse(MESSAGES_FIELDS, GenerationFields)
    turns, options = _prompt(fields.read(MessagesFields), max_prompt)
    asked = fields.read(MessageOptions)
    output = read_object(OutputConfig, asked.output_config, "output_config")
    form = json_form(output.format, "output_config.format") or json_form(asked.output_format, "output_format")
    user = read_object(UserMetadata, asked.metadata, "metadata").user_id
    given = msgspec.structs.replace(fields.read(GenerationFields), stop=asked.stop_sequences, user=user)
    sampling = sampling_params(given, asked.max_tokens, None)
    prompts = (Prompt(messages=turns),)
    request = GenerationRequest(True, prompts, sampling, chat_options=options, fields=MESSAGES_NAMES)
    return completed(request, given, fields, 1, "max_tokens", MESSAGES_FIELDS, form)


@dataclass(frozen=True, slots=True)
class CountCall:
    """The body of /v1/messages/count_tokens."""

    model: str
    messages: tuple[ChatTurn, ...]
    chat_options: ChatOptions
    names: Mapping[str, str] = field(default_factory=lambda: MESSAGES_NAMES)

    async def ask(self, client: Client, info: TargetInfo | None, seconds: float | None) -> dict[str, Any]:
        """See `TargetCall.ask`."""
        del info
        found = await client.tokenize(
            messages=self.messages, chat_options=self.chat_options, model=self.model, timeout=seconds
        )
        return {"input_tokens": len(found.token_ids)}


def count_call(body: Mapping[str, Any], max_prompt: int) -> CountCall:
    """The body of /v1/messages/count_tokens. Raises `Refused`."""
    fields = Fields(body)
    turns, options = _prompt(fields.read(MessagesFields), max_prompt)
    call = CountCall(fields.read(CountFields).model, turns, options)
    fields.end(MESSAGES_FIELDS)
    return call


def _prompt(asked: MessagesFields, max_prompt: int) -> tuple[tuple[ChatTurn, ...], ChatOptions]:
    """The conversation, and how it is rendered."""
    turns = message_turns(asked.messages, asked.system)
    fitting(check_bytes, sum(len(turn.content.encode()) for turn in turns), max_prompt, "messages")
    choice, single = _choice(asked.tool_choice)
    return turns, chat_options(
        TemplateFields(
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)],
            tool_choice=choice,
            parallel_tool_calls=not single,
            chat_template_kwargs=asked.chat_template_kwargs,
            enable_thinking=asked.enable_thinking,
            thinking=asked.thinking,
        )
    )


def _choice(value: Object | None) -> tuple[str | Object | None, bool]:
    """`tool_choice` as chats have it, and whether there may be one call only."""
    if value is None:
        return None, False
    chosen = read_object(BlockToolChoice, value, "tool_choice")
    named = {"type": "function", "function": {"name": chosen.name}}
    return {"auto": "auto", "any": "required", "none": "none"}.get(chosen.type, named), chosen.disable_parallel_tool_use


def _tool(value: Any, path: str) -> Object:
    """A tool as chats have it."""
    if converted(value, Object, path).get("type") not in (None, "custom"):
        raise BadField(f"{path}.type", "must be custom: this server has no tools of its own", "invalid_value")
    tool = read_object(BlockTool, value, path)
    function: Object = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
