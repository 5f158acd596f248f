"""Between dataclasses and messages whose fields have the same names."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")


def message_of(kind: type[_Message], value: Any, **changed: Any) -> _Message:
    """A message with the fields of a dataclass, of which `changed` replaces some. None stays absent."""
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)} | changed)


def value_of(kind: type[_Value], message: Message, **changed: Any) -> _Value:
    """A dataclass with the fields of a message, repeated ones as tuples, of which `changed` replaces some. Takes
    microseconds: too slow for every chunk."""
    names = (field.name for field in fields(kind) if field.name not in changed)  # type: ignore[arg-type]
    found = ((name, getattr(message, name)) for name in names)
    return kind(**{name: tuple(one) if isinstance(one, MutableSequence) else one for name, one in found}, **changed)


def shared_fields(kind: type[Message], value: Any) -> dict[str, Any]:
    """Those fields of a dataclass that a kind of message has too, by name: for messages that show a part of a value.
    What must not be left out goes through `message_of`, which refuses a field that the message lacks."""
    names = kind.DESCRIPTOR.fields_by_name
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name in names}


def set_fields(message: Message) -> dict[str, Any]:
    """The fields of a message that are set, by name."""
    return {field.name: value for field, value in message.ListFields()}
