"""From the messages of Anthropic's API to the contract's turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from outrider_client.answers import ToolCall
from outrider_client.messages import ChatTurn
from outrider_gateway.bodies import Entries, Object
from outrider_gateway.chat_messages import Messages
from outrider_gateway.failures import BadField
from outrider_gateway.fields import BodyObject, converted, json_bytes, read_object


class BlockMessage(BodyObject):
    """One of Anthropic's messages."""

    role: Literal["user", "assistant"]
    content: str | Entries


class AnthropicBlock(BodyObject):
    """A block of a content. Ignored are hints to a cache, and what comes back with an answer."""

    ignored: ClassVar[tuple[str, ...]] = ("cache_control", "citations", "signature", "caller", "is_error")
    type: str


class TextBlock(AnthropicBlock):
    """Text of either role."""

    text: str = ""


class ResultBlock(AnthropicBlock):
    """What a tool returned."""

    tool_use_id: str = ""
    content: str | Entries = ""


class UseBlock(AnthropicBlock):
    """A call of a tool."""

    id: str = ""
    name: str = ""
    input: Object = msgspec.field(default_factory=dict)


class ThinkingBlock(AnthropicBlock):
    """The assistant's reasoning."""

    thinking: str = ""


class RedactedBlock(AnthropicBlock):
    """Another server's reasoning, which nobody else can read."""

    data: Any = None


_TEXT: Mapping[str, type[AnthropicBlock]] = {"text": TextBlock}
_BLOCKS: Mapping[str, Mapping[str, type[AnthropicBlock]]] = {
    "user": {**_TEXT, "tool_result": ResultBlock},
    "assistant": {**_TEXT, "tool_use": UseBlock, "thinking": ThinkingBlock, "redacted_thinking": RedactedBlock},
}


def message_turns(messages: Any, system: Any) -> tuple[ChatTurn, ...]:
    """The turns of a body's `system` and `messages`. Raises `Refused`."""
    if messages is None:
        raise BadField("messages", "is missing", "missing_required_parameter")
    entries = converted(messages, Messages, "messages")
    instructions = "" if system is None else _text(system, "system")
    turns = [ChatTurn("system", instructions)] if instructions else []
    for index, entry in enumerate(entries):
        turns += _turns(entry, f"messages[{index}]")
    return tuple(turns)


def _turns(value: Any, path: str) -> list[ChatTurn]:
    message, path = read_object(BlockMessage, value, path), f"{path}.content"
    role, content = message.role, message.content
    if isinstance(content, str):
        return [ChatTurn(role, content)]
    turns, texts, thoughts, calls = list[ChatTurn](), list[str](), list[str](), list[ToolCall]()
    for index, block in enumerate(_read_blocks(content, path, _BLOCKS[role])):
        at = f"{path}[{index}]"
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ResultBlock(content=returned, tool_use_id=called):
                turns.append(ChatTurn("tool", _text(returned, f"{at}.content"), tool_call_id=called))
            case UseBlock(id=called, name=name, input=arguments):
                calls.append(ToolCall(called, name, json_bytes(arguments, f"{at}.input").decode()))
            case ThinkingBlock(thinking=thought):
                thoughts.append(thought)
    # What tools returned comes first, and a user need not say anything beside it.
    if role == "assistant" or texts or not turns:
        turns.append(ChatTurn(role, "\n".join(texts), tuple(calls), reasoning="\n".join(thoughts)))
    return turns


def _read_blocks(content: list[Any], path: str, kinds: Mapping[str, type[AnthropicBlock]]) -> list[AnthropicBlock]:
    blocks = []
    for index, value in enumerate(content):
        at = f"{path}[{index}]"
        kind = converted(value, Object, at).get("type")
        if not isinstance(kind, str) or kind not in kinds:
            problem = f"must be {', '.join(kinds)}: this server reads no images or files"
            raise BadField(f"{at}.type", problem, "invalid_value")
        blocks.append(read_object(kinds[kind], value, at))
    return blocks


def _text(content: Any, path: str) -> str:
    """A string, or blocks of text, which stand on lines of their own."""
    if isinstance(content, str):
        return content
    blocks = _read_blocks(converted(content, Entries, path), path, _TEXT)
    return "\n".join([block.text for block in blocks if isinstance(block, TextBlock)])
