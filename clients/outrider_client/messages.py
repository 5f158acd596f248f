"""Conversations as callers write them: OpenAI's message dicts, or pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.v1 import target_pb2

# (role, content).
Message = tuple[str, str]
MessageLike = Message | Mapping[str, str]
_SHAPE = '(role, content) or {"role": ..., "content": ...}'


def messages_to_pb(messages: Sequence[MessageLike]) -> list[target_pb2.ChatMessage]:
    """Messages of the contract. Raises `TypeError` that names what is not as it should be."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: expected a list of messages, got {_kind(messages)}")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, path: str) -> target_pb2.ChatMessage:
    if isinstance(message, Mapping):
        if unknown := [key for key in message if key not in ("role", "content")]:
            raise TypeError(f"{path}: has no field {unknown[0]!r}; role and content are known")
        if missing := [key for key in ("role", "content") if key not in message]:
            raise TypeError(f"{path}: lacks {missing[0]!r}")
        role, content = message["role"], message["content"]
    elif isinstance(message, tuple | list) and len(message) == 2:
        role, content = message
    else:
        raise TypeError(f"{path}: expected {_SHAPE}, got {_kind(message)}")
    for name, said in (("role", role), ("content", content)):
        if not isinstance(said, str):
            raise TypeError(f"{path}.{name}: expected a string, got {_kind(said)}")
    return target_pb2.ChatMessage(role=role, content=content)


def _kind(value: object) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return type(value).__name__ + size
