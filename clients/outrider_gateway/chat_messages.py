"""From OpenAI's messages to the contract's turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.admission.prompt_limits import MAX_MESSAGES
from outrider_client.answers import ToolCall
from outrider_client.messages import ChatTurn
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, bounded, typed

# What OpenAI calls roles, and what the contract does.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What comes back with an answer, or is a hint to other servers; no chat template of a target reads it.
_IGNORED = (
    "annotations", "refusal", "cache_control", "provider_specific_fields", "reasoning_details", "thinking_blocks",
    "citations", "extra_content", "id", "weight", "metadata", "model", "timestamp", "status", "is_error",
)  # fmt: skip
# Kinds of parts by what they call their text: a part of an answer comes back as OpenAI's APIs name it.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Likewise, but content that the model would have to see.
_REFUSED = {"audio": "messages have text alone", "function_call": "the name here is tool_calls"}


def chat_turns(value: Any) -> tuple[ChatTurn, ...]:
    """The turns of a body's `messages`. Raises `Refused`."""
    if value is None:
        raise BadField("messages", "is missing", "missing_required_parameter")
    messages = typed(value, list, "messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadField("messages", f"must have 1 to {MAX_MESSAGES} entries", "invalid_value")
    return tuple(_turn(message, f"messages[{i}]") for i, message in enumerate(messages))


def content_text(content: Any, path: str, read_part: Callable[[Any, str], str] | None = None) -> str:
    """The text of a content: a string, or parts with text, which stand on lines of their own. `read_part` reads a part
    and its path, as a message's part unless given."""
    if isinstance(content, str):
        return content
    if content is None:
        raise BadField(path, "is missing", "missing_required_parameter")
    parts = bounded(typed(content, list, path), MAX_MESSAGES, path)
    read = read_part or _part
    return "\n".join(read(part, f"{path}[{i}]") for i, part in enumerate(parts))


def _turn(message: Any, path: str) -> ChatTurn:
    fields = Fields(typed(message, dict, path), path)
    role = fields.text("role")
    if role not in _ROLES:
        raise BadField(fields.path("role"), f"must be one of {', '.join(_ROLES)}", "invalid_value")
    content, name = fields.pop("content"), fields.text("name")
    calls = _tool_calls(fields, role)
    called = fields.text("tool_call_id")
    if called and role != "tool":
        raise BadField(fields.path("tool_call_id"), "is for messages of role tool", "invalid_value")
    # By either name, and as an answer has it by both.
    other = fields.text("reasoning")
    reasoning = fields.text("reasoning_content") or other
    fields.ignore(_IGNORED)
    for refused, reason in _REFUSED.items():
        if fields.pop(refused):
            raise BadField(fields.path(refused), f"is not supported: {reason}", "unsupported_parameter")
    fields.end()
    return ChatTurn(
        _ROLES[role],
        # What calls a tool may say nothing, and so may an answer that was cut while the model reasoned.
        "" if content is None and (calls or reasoning) else content_text(content, fields.path("content")),
        calls,
        called,
        # Others have names too, which no template reads.
        name if role == "tool" else "",
        reasoning if role == "assistant" else "",
    )


def _tool_calls(fields: Fields, role: str) -> tuple[ToolCall, ...]:
    path = fields.path("tool_calls")
    calls = bounded(typed(fields.pop("tool_calls", []), list, path), MAX_MESSAGES, path)
    if calls and role != "assistant":
        raise BadField(path, "is for messages of role assistant", "invalid_value")
    return tuple(_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls))


def _tool_call(value: Any, path: str) -> ToolCall:
    fields = Fields(typed(value, dict, path), path)
    if fields.text("type", "function") != "function":
        raise BadField(fields.path("type"), "must be function", "invalid_value")
    called = fields.inner("function")
    if called is None:
        raise BadField(fields.path("function"), "is missing", "missing_required_parameter")
    call = ToolCall(fields.text("id"), called.text("name"), called.text("arguments"))
    called.ignore(_IGNORED)
    called.end()
    # Its place in a stream, which some clients keep.
    fields.ignore(("index", *_IGNORED))
    fields.end()
    return call


def _part(part: Any, path: str) -> str:
    fields = Fields(typed(part, dict, path), path)
    kind = fields.pop("type")
    name = _TEXTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise BadField(f"{path}.type", "must be text: this server reads no images, audio or files", "invalid_value")
    text: str = typed(fields.pop(name), str, f"{path}.{name}")
    fields.ignore(("name", "logprobs", *_IGNORED))
    fields.end()
    return text
