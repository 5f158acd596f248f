"""From the items of a /v1/responses body to the contract's turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from outrider_client.answers import ToolCall
from outrider_client.messages import ChatTurn
from outrider_gateway.bodies import Object
from outrider_gateway.chat_messages import TEXT_PARTS, Messages, content_text
from outrider_gateway.failures import BadField
from outrider_gateway.fields import BodyObject, converted, read_object

_PARTS = (*TEXT_PARTS, "reasoning_text")


class ResponseItem(BodyObject):
    """An item of `input`. Ignored is what it has from an answer, or for a provider's own books."""

    ignored: ClassVar[tuple[str, ...]] = ("id", "status", "phase", "namespace", "caller", "async")
    type: str = "message"


class MessageItem(ResponseItem, kw_only=True):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = None


class CallItem(ResponseItem):
    """A call of a function."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""


class CallOutputItem(ResponseItem):
    """What a function returned."""

    call_id: str = ""
    output: Any = None


class ReasoningItem(ResponseItem):
    """Reasoning. A summary is of the same thoughts, and what is encrypted is another server's."""

    content: Any = None
    summary: Any = None
    encrypted_content: Any = None


_ITEMS: Mapping[str, type[ResponseItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


def input_turns(value: Any) -> tuple[ChatTurn, ...]:
    """The turns of a body's `input`: a user's text, or items. Raises `Refused`."""
    if value is None:
        raise BadField("input", "is missing", "missing_required_parameter")
    if isinstance(value, str):
        return (ChatTurn("user", value),)
    if not isinstance(value, list):
        raise BadField("input", "must be a text or a list of items", "invalid_type")
    turns = list[ChatTurn]()
    for index, item in enumerate(converted(value, Messages, "input")):
        _add_item(turns, item, f"input[{index}]")
    return tuple(turns)


def joined_turns(before: tuple[ChatTurn, ...], after: tuple[ChatTurn, ...]) -> tuple[ChatTurn, ...]:
    """Two conversations as one; system messages that meet there become one, since templates take one."""
    if before and after and before[-1].role == after[0].role == "system":
        merged = ChatTurn("system", f"{before[-1].content}\n\n{after[0].content}")
        return (*before[:-1], merged, *after[1:])
    return before + after


def _add_item(turns: list[ChatTurn], value: Any, path: str) -> None:
    """Add an item to the turns: what the assistant thinks, says and calls one after the other is one turn."""
    kind = converted(value, Object, path).get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        reason = "items are not kept by id: send the item" if kind == "item_reference" else "is not known here"
        raise BadField(f"{path}.type", f"{reason}; it must be {', '.join(_ITEMS)}", "invalid_value")
    open_turn = turns[-1] if turns and turns[-1].role == "assistant" else None
    match read_object(_ITEMS[kind], value, path):
        case MessageItem(role=role, content=content):
            said = content_text(content, f"{path}.content", _PARTS)
            if role == "assistant" and open_turn and not open_turn.content and not open_turn.tool_calls:
                turns[-1] = replace(open_turn, content=said)
            else:
                turns.append(ChatTurn("system" if role == "developer" else role, said))
        case CallItem(call_id=called, name=name, arguments=arguments):
            if open_turn is None:
                turns.append(open_turn := ChatTurn("assistant", ""))
            turns[-1] = replace(open_turn, tool_calls=(*open_turn.tool_calls, ToolCall(called, name, arguments)))
        case CallOutputItem(call_id=called, output=output):
            turns.append(ChatTurn("tool", content_text(output, f"{path}.output", _PARTS), tool_call_id=called))
        case ReasoningItem(content=content):
            text = "" if content is None else content_text(content, f"{path}.content", _PARTS)
            turns.append(ChatTurn("assistant", reasoning=text))
