"""Between dataclasses and messages whose fields have the same names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")


def message_of(kind: type[_Message], value: Any, **changed: Any) -> _Message:
    """A message with the fields of a dataclass, of which `changed` replaces some. None stays absent."""
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)} | changed)


def value_of(kind: type[_Value], message: Message, **changed: Any) -> _Value:
    """A dataclass with the fields of a message, of which `changed` replaces some, among them all repeated ones."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names if name not in changed} | changed)


def set_fields(message: Message) -> dict[str, Any]:
    """The fields of a message that are set, by name."""
    return {field.name: value for field, value in message.ListFields()}
