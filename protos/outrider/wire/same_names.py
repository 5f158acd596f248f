"""Between dataclasses and messages whose fields have the same names."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")
# Looked up once for each kind: for all messages of a request it took a twentieth of the request's processor time.
_NAMES: dict[type, tuple[str, ...]] = {}
_SHARED_NAMES: dict[tuple[type, type], tuple[str, ...]] = {}
_READ_NAMES: dict[tuple[type, type, tuple[str, ...]], tuple[list[str], list[str]]] = {}


def message_of(kind: type[_Message], value: Any, **changed: Any) -> _Message:
    """A message with the fields of a dataclass, of which `changed` replaces some. None stays absent."""
    return kind(**{name: getattr(value, name) for name in _names(type(value))} | changed)


def value_of(kind: type[_Value], message: Message, **changed: Any) -> _Value:
    """A dataclass with the fields of a message, repeated ones as tuples, of which `changed` replaces some. Takes
    microseconds: too slow for every chunk."""
    single, repeated = _read_names(kind, type(message), tuple(changed))
    found = {name: getattr(message, name) for name in single}
    return kind(**found, **{name: tuple(getattr(message, name)) for name in repeated}, **changed)


def shared_fields(kind: type[Message], value: Any) -> dict[str, Any]:
    """Those fields of a dataclass that a kind of message has too, by name: for messages that show a part of a value.
    What must not be left out goes through `message_of`, which refuses a field that the message lacks."""
    return {name: getattr(value, name) for name in _shared_names(kind, type(value))}


def _names(kind: type) -> tuple[str, ...]:
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(field.name for field in fields(kind))
    return names


def _shared_names(kind: type[Message], value: type) -> tuple[str, ...]:
    names = _SHARED_NAMES.get((kind, value))
    if names is None:
        known = kind.DESCRIPTOR.fields_by_name
        names = _SHARED_NAMES[kind, value] = tuple(name for name in _names(value) if name in known)
    return names


def _read_names(kind: type, message: type[Message], changed: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The names of a dataclass's fields that are read from a message: single ones, and repeated ones."""
    names = _READ_NAMES.get((kind, message, changed))
    if names is None:
        empty, names = message(), (list[str](), list[str]())
        for name in _names(kind):
            if name not in changed:
                names[isinstance(getattr(empty, name), MutableSequence)].append(name)
        _READ_NAMES[kind, message, changed] = names
    return names


def set_fields(message: Message) -> dict[str, Any]:
    """The fields of a message that are set, by name."""
    return {field.name: value for field, value in message.ListFields()}
