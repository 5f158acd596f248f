"""From the items of a /v1/responses body to the contract's turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.admission.prompt_limits import MAX_MESSAGES
from outrider_client.answers import ToolCall
from outrider_client.messages import ChatTurn
from outrider_gateway.chat_messages import content_text
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, typed

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What an item has from an answer, or for a provider's own books.
_IGNORED = ("id", "status", "phase", "namespace", "caller", "async")
# Parts that are text, by the field that has it.
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
_PART_IGNORED = ("annotations", "logprobs", "prompt_cache_breakpoint")


def input_turns(value: Any) -> tuple[ChatTurn, ...]:
    """The turns of a body's `input`: a user's text, or items. Raises `Refused`."""
    if value is None:
        raise BadField("input", "is missing", "missing_required_parameter")
    if isinstance(value, str):
        return (ChatTurn("user", value),)
    if not isinstance(value, list):
        raise BadField("input", "must be a text or a list of items", "invalid_type")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise BadField("input", f"must have 1 to {MAX_MESSAGES} entries", "invalid_value")
    reader = _ItemReader()
    for index, item in enumerate(value):
        reader.add(item, f"input[{index}]")
    return tuple(reader.turns)


def joined_turns(before: tuple[ChatTurn, ...], after: tuple[ChatTurn, ...]) -> tuple[ChatTurn, ...]:
    """Two conversations as one; system messages that meet there become one, since templates take one."""
    if before and after and before[-1].role == after[0].role == "system":
        merged = ChatTurn("system", f"{before[-1].content}\n\n{after[0].content}")
        return (*before[:-1], merged, *after[1:])
    return before + after


class _ItemReader:
    """Makes turns of items: what the assistant thinks, says and calls one after the other is one turn."""

    def __init__(self) -> None:
        self.turns: list[ChatTurn] = []

    def add(self, item: Any, path: str) -> None:
        fields = Fields(typed(item, dict, path), path)
        kind = fields.text("type", "message")
        read: Mapping[str, Callable[[Fields], None]] = {
            "message": self._message,
            "function_call": self._function_call,
            "function_call_output": self._function_output,
            "reasoning": self._reasoning,
        }
        if kind not in read:
            reason = "items are not kept by id: send the item" if kind == "item_reference" else "is not known here"
            raise BadField(fields.path("type"), f"{reason}; it must be {', '.join(read)}", "invalid_value")
        read[kind](fields)
        fields.ignore(_IGNORED)
        fields.end()

    def _message(self, fields: Fields) -> None:
        role = fields.text("role")
        if role not in _ROLES:
            raise BadField(fields.path("role"), f"must be one of {', '.join(_ROLES)}", "invalid_value")
        content = _content(fields.pop("content"), fields.path("content"))
        if role == "assistant" and self._open() and not self.turns[-1].content and not self.turns[-1].tool_calls:
            self.turns[-1] = replace(self.turns[-1], content=content)
        else:
            self.turns.append(ChatTurn(_ROLES[role], content))

    def _function_call(self, fields: Fields) -> None:
        call = ToolCall(fields.text("call_id"), fields.text("name"), fields.text("arguments"))
        last = self.turns[-1] if self._open() else None
        if last is None:
            self.turns.append(ChatTurn("assistant", "", (call,)))
        else:
            self.turns[-1] = replace(last, tool_calls=(*last.tool_calls, call))

    def _function_output(self, fields: Fields) -> None:
        output = _content(fields.pop("output"), fields.path("output"))
        self.turns.append(ChatTurn("tool", output, tool_call_id=fields.text("call_id")))

    def _reasoning(self, fields: Fields) -> None:
        # A summary is of the same thoughts, and what is encrypted is another server's.
        fields.ignore(("summary", "encrypted_content"))
        content = fields.pop("content")
        text = "" if content is None else _content(content, fields.path("content"))
        self.turns.append(ChatTurn("assistant", reasoning=text))

    def _open(self) -> bool:
        """Whether the last turn is the assistant's."""
        return bool(self.turns) and self.turns[-1].role == "assistant"


def _content(content: Any, path: str) -> str:
    return content_text(content, path, _part)


def _part(part: Any, path: str) -> str:
    fields = Fields(typed(part, dict, path), path)
    kind = fields.text("type")
    if kind not in _TEXTS:
        raise BadField(f"{path}.type", "must be text: this server reads no images, audio or files", "invalid_value")
    text = typed(fields.pop(_TEXTS[kind]), str, fields.path(_TEXTS[kind]))
    fields.ignore(_PART_IGNORED)
    fields.end()
    return text
