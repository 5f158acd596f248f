"""Conversations as callers give them: OpenAI's message dicts, or pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.struct_pb2 import Struct

from outrider.errors import InvalidField
from outrider.v1 import target_pb2

# (role, content).
Message = tuple[str, str]
# Dicts as OpenAI's: the content is a string, or parts of type text.
MessageLike = Message | Mapping[str, Any]
# Fields that OpenAI's clients send, and no chat template of a target reads.
_IGNORED = ("name", "annotations", "refusal")
_SHAPE = '(role, content) or {"role": ..., "content": ...}'


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How the model's chat template renders a conversation.

    `add_generation_prompt` ends it with the beginning of the assistant's answer; None does, unless
    `continue_final_message` leaves the last message open, so that the answer goes on with it. `template_arguments` are
    given to the template by name, for example {"enable_thinking": False}; names that it does not read change nothing.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def chat_to_pb(messages: Sequence[MessageLike], options: ChatOptions) -> target_pb2.ChatInput:
    """A conversation as protobuf. Raises `TypeError`, which names the wrong message or field, and `InvalidField` for
    template arguments that JSON cannot have."""
    chat = target_pb2.ChatInput(
        messages=messages_to_pb(messages),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
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
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, path: str) -> target_pb2.ChatMessage:
    if isinstance(message, Mapping):
        if unknown := [key for key in message if key not in ("role", "content", *_IGNORED)]:
            raise TypeError(f"{path}: has no field {unknown[0]!r}; role and content are known")
        if missing := [key for key in ("role", "content") if key not in message]:
            raise TypeError(f"{path}: lacks {missing[0]!r}")
        role, content = message["role"], message["content"]
    elif isinstance(message, tuple | list) and len(message) == 2:
        role, content = message
    else:
        raise TypeError(f"{path}: expected {_SHAPE}, got {_kind(message)}")
    if not isinstance(role, str):
        raise TypeError(f"{path}.role: expected a string, got {_kind(role)}")
    return target_pb2.ChatMessage(role=role, content=_content(content, f"{path}.content"))


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
