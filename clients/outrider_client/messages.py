"""Conversations as callers give them: OpenAI's message dicts, pairs, or turns; and the tools of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from google.protobuf.struct_pb2 import Struct

from outrider.errors import InvalidField
from outrider.v1 import target_pb2
from outrider_client.answers import ToolCall


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A message of a conversation. `role` is system, user, assistant or tool. The assistant's may have `tool_calls` and
    `reasoning`; a tool's names the call that it answers, and the tool where its `name` is not that of the call."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


# (role, content).
Message = tuple[str, str]
# Dicts as OpenAI's: the content is a string, or parts of type text.
MessageLike = Message | ChatTurn | Mapping[str, Any]
# Fields that OpenAI's clients send, and no chat template of a target reads.
_IGNORED = ("annotations", "refusal")
_KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content")


class ToolChoice(Enum):
    """Whether an answer calls tools: as the model likes, not at all, or certainly."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What an answer may call. `definitions` are dicts as OpenAI's: {"type": "function", "function": {...}}. With
    `ToolChoice.REQUIRED` the arguments match the tools' schemas, and `name` is the one tool that is called, if any.
    `single_call` keeps the answer to one call at most."""

    definitions: Sequence[Mapping[str, Any]]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    single_call: bool = False

    def to_pb(self) -> target_pb2.Tools:
        """As protobuf. Raises `InvalidField` for definitions that JSON cannot have."""
        try:
            definitions = json.dumps(list(self.definitions), ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError):
            raise InvalidField("chat.tools.definitions", "must be JSON") from None
        choice = target_pb2.ToolChoice.Value(f"TOOL_CHOICE_{self.choice.name}")
        return target_pb2.Tools(definitions=definitions, choice=choice, name=self.name, single_call=self.single_call)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How the model's chat template renders a conversation.

    `add_generation_prompt` ends it with the beginning of the assistant's answer; None does, unless
    `continue_final_message` leaves the last message open, so that the answer goes on with it. `template_arguments` are
    given to the template by name, for example {"enable_thinking": False}; names that it does not read change nothing.
    `tools` are what the answer may call.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolOptions | None = None


def chat_to_pb(messages: Sequence[MessageLike], options: ChatOptions) -> target_pb2.ChatInput:
    """A conversation as protobuf. Raises `TypeError`, which names the wrong message or field, and `InvalidField` for
    tools and template arguments that JSON cannot have."""
    chat = target_pb2.ChatInput(
        messages=messages_to_pb(messages),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        tools=None if options.tools is None else options.tools.to_pb(),
    )
    if options.template_arguments:
        arguments = Struct()
        try:
            arguments.update(dict(options.template_arguments))
        except (TypeError, ValueError, RecursionError):
            raise InvalidField("chat.template_arguments", "must be an object of JSON") from None
        chat.template_arguments.CopyFrom(arguments)
    return chat


def messages_to_pb(messages: Sequence[MessageLike]) -> list[target_pb2.ChatMessage]:
    """Messages as protobuf. Raises `TypeError`, which names the wrong message or field."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: expected a list of messages, got {_kind(messages)}")
    return [_turn_to_pb(_turn(message, f"messages[{index}]")) for index, message in enumerate(messages)]


def _turn_to_pb(turn: ChatTurn) -> target_pb2.ChatMessage:
    calls = [target_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls]
    return target_pb2.ChatMessage(
        role=turn.role,
        content=turn.content,
        tool_calls=calls,
        tool_call_id=turn.tool_call_id,
        name=turn.name,
        reasoning=turn.reasoning,
    )


def _turn(message: object, path: str) -> ChatTurn:
    if isinstance(message, ChatTurn):
        return message
    if isinstance(message, Mapping):
        return _turn_of(message, path)
    if not isinstance(message, tuple | list) or len(message) != 2:
        shape = '(role, content) or {"role": ..., "content": ...}'
        raise TypeError(f"{path}: expected {shape}, got {_kind(message)}")
    role, content = message
    return ChatTurn(_text(role, f"{path}.role"), _content(content, f"{path}.content"))


def _turn_of(message: Mapping[str, Any], path: str) -> ChatTurn:
    """A turn of OpenAI's dict."""
    if unknown := [key for key in message if key not in (*_KNOWN, *_IGNORED)]:
        raise TypeError(f"{path}: has no field {unknown[0]!r}; role and content are known")
    calls = tuple(
        _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.get("tool_calls") or ())
    )
    # A message with calls may have no content.
    required = ("role",) if calls else ("role", "content")
    if missing := [key for key in required if key not in message]:
        raise TypeError(f"{path}: lacks {missing[0]!r}")
    role, content = _text(message["role"], f"{path}.role"), message.get("content")
    return ChatTurn(
        role,
        "" if content is None and calls else _content(content, f"{path}.content"),
        calls,
        _text(message.get("tool_call_id") or "", f"{path}.tool_call_id"),
        # Users have names too, which no template reads.
        _text(message.get("name") or "", f"{path}.name") if role == "tool" else "",
        _text(message.get("reasoning_content") or message.get("reasoning") or "", f"{path}.reasoning"),
    )


def _tool_call(call: object, path: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
        shape = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        raise TypeError(f"{path}: expected {shape}, got {_kind(call)}")
    return ToolCall(
        _text(call.get("id") or "", f"{path}.id"),
        _text(function["name"], f"{path}.function.name"),
        _text(function.get("arguments") or "", f"{path}.function.arguments"),
    )


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{path}: expected a string, got {_kind(value)}")
    return value


def _content(content: object, path: str) -> str:
    """A string unchanged; parts of type text joined by line breaks, as the gateway does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, tuple | list):
        raise TypeError(f"{path}: expected a string or a list of text parts, got {_kind(content)}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TypeError(f'{path}[{index}]: expected {{"type": "text", "text": ...}}, got {_kind(part)}')
        texts.append(part["text"])
    return "\n".join(texts)


def _kind(value: object) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return type(value).__name__ + size
