"""From OpenAI's messages to the contract's turns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from outrider.admission.prompt_limits import MAX_MESSAGES
from outrider_client.answers import ToolCall
from outrider_client.messages import ChatTurn
from outrider_gateway.bodies import Entries, Object
from outrider_gateway.failures import BadField
from outrider_gateway.fields import BodyObject, converted, read_object

Messages = Annotated[list[Any], Meta(min_length=1, max_length=MAX_MESSAGES)]
# What comes back with an answer, or is a hint to other servers; no chat template of a target reads it.
_IGNORED = (
    "annotations", "refusal", "cache_control", "provider_specific_fields", "reasoning_details", "thinking_blocks",
    "citations", "extra_content", "id", "weight", "metadata", "model", "timestamp", "status", "is_error",
)  # fmt: skip
# Kinds of parts that are text: a part of an answer comes back as OpenAI's APIs name it.
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ChatMessage(BodyObject):
    """One of OpenAI's messages."""

    ignored: ClassVar[tuple[str, ...]] = _IGNORED
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Entries | None = None
    name: str = ""
    tool_calls: Entries = msgspec.field(default_factory=list)
    tool_call_id: str = ""
    # By either name, and as an answer has it by both.
    reasoning: str = ""
    reasoning_content: str = ""
    audio: Any = None
    function_call: Any = None


class CalledFunction(BodyObject):
    """The function of a call, and its arguments as JSON."""

    ignored: ClassVar[tuple[str, ...]] = _IGNORED
    name: str = ""
    arguments: str = ""


class FunctionCall(BodyObject):
    """A call in a message. Its place in a stream is kept by some clients."""

    ignored: ClassVar[tuple[str, ...]] = ("index", *_IGNORED)
    function: Object
    id: str = ""
    type: Literal["function"] = "function"


class MessagePart(BodyObject):
    """A part of a content. A refusal has its text under its own name."""

    ignored: ClassVar[tuple[str, ...]] = ("name", "logprobs", "prompt_cache_breakpoint", *_IGNORED)
    type: str
    text: str | None = None
    refusal: str | None = None


def chat_turns(value: Any) -> tuple[ChatTurn, ...]:
    """The turns of a body's `messages`. Raises `Refused`."""
    if value is None:
        raise BadField("messages", "is missing", "missing_required_parameter")
    messages = converted(value, Messages, "messages")
    return tuple(_turn(message, f"messages[{i}]") for i, message in enumerate(messages))


def content_text(content: Any, path: str, kinds: Collection[str] = TEXT_PARTS) -> str:
    """The text of a content: a string, or parts of these kinds, which stand on lines of their own."""
    if content is None:
        raise BadField(path, "is missing", "missing_required_parameter")
    if isinstance(content, str):
        return content
    return "\n".join(
        _part_text(part, f"{path}[{i}]", kinds) for i, part in enumerate(converted(content, Entries, path))
    )


def _turn(value: Any, path: str) -> ChatTurn:
    message = read_object(ChatMessage, value, path)
    role, calls = message.role, message.tool_calls
    if calls and role != "assistant":
        raise BadField(f"{path}.tool_calls", "is for messages of role assistant", "invalid_value")
    if message.tool_call_id and role != "tool":
        raise BadField(f"{path}.tool_call_id", "is for messages of role tool", "invalid_value")
    # Content that the model would have to see.
    for refused, reason in (("audio", "messages have text alone"), ("function_call", "the name here is tool_calls")):
        if getattr(message, refused):
            raise BadField(f"{path}.{refused}", f"is not supported: {reason}", "unsupported_parameter")
    reasoning = message.reasoning_content or message.reasoning
    # What calls a tool may say nothing, and so may an answer that was cut while the model reasoned.
    silent = message.content is None and (calls or reasoning)
    return ChatTurn(
        "system" if role == "developer" else role,
        "" if silent else content_text(message.content, f"{path}.content"),
        tuple(_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)),
        message.tool_call_id,
        # Others have names too, which no template reads.
        message.name if role == "tool" else "",
        reasoning if role == "assistant" else "",
    )


def _tool_call(value: Any, path: str) -> ToolCall:
    call = read_object(FunctionCall, value, path)
    called = read_object(CalledFunction, call.function, f"{path}.function")
    return ToolCall(call.id, called.name, called.arguments)


def _part_text(value: Any, path: str, kinds: Collection[str]) -> str:
    kind = converted(value, Object, path).get("type")
    if kind not in kinds:
        raise BadField(f"{path}.type", "must be text: this server reads no images, audio or files", "invalid_value")
    part, name = read_object(MessagePart, value, path), "refusal" if kind == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise BadField(f"{path}.{name}", "is missing", "missing_required_parameter")
    return text
