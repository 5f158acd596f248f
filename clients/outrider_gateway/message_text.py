"""The text of a conversation, from the forms that OpenAI's clients send it in."""

from __future__ import annotations

from typing import Any

from outrider_client.client import Message
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, items, text

# What OpenAI calls roles, and what the contract does.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MAX_MESSAGES = 4096


def messages(value: Any, path: str = "messages") -> tuple[Message, ...]:
    """(role, content) pairs from the field `messages`. Raises `BadField`."""
    if value is None:
        raise BadField(path, "is missing", "missing_required_parameter")
    turns = items(value, path)
    if not 1 <= len(turns) <= _MAX_MESSAGES:
        raise BadField(path, f"must have 1 to {_MAX_MESSAGES} entries", "invalid_value")
    return tuple(_message(turn, f"{path}[{i}]") for i, turn in enumerate(turns))


def _message(turn: Any, path: str) -> Message:
    if not isinstance(turn, dict):
        raise BadField(path, "must be an object", "invalid_type")
    fields = Fields(turn, path)
    role = fields.text("role")
    if role not in _ROLES:
        raise BadField(fields.path("role"), f"must be one of {', '.join(_ROLES)}", "invalid_value")
    content = content_text(fields.take("content"), fields.path("content"))
    # What clients send back with an answer that they got, and what no chat template of a target reads.
    fields.ignore(("name", "annotations", "refusal"))
    if fields.take("tool_calls"):
        raise BadField(fields.path("tool_calls"), "is not supported by this server", "unsupported_parameter")
    fields.end()
    return _ROLES[role], content


def content_text(content: Any, path: str) -> str:
    """The text of a content: a string, or parts of type text, which stand on lines of their own."""
    if isinstance(content, str):
        return content
    if content is None:
        raise BadField(path, "is missing", "missing_required_parameter")
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(items(content, path)))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise BadField(path, "must be an object", "invalid_type")
    if part.get("type") != "text":
        raise BadField(f"{path}.type", "must be text: this server reads nothing else", "invalid_value")
    return text(part.get("text"), f"{path}.text")
