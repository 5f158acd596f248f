"""From the messages of Anthropic's API to the contract's turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.admission.prompt_limits import MAX_MESSAGES
from outrider_client.answers import ToolCall
from outrider_client.messages import ChatTurn
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, bounded, json_bytes, typed

# Hints to a cache, and what comes back with an answer.
_IGNORED = ("cache_control", "citations", "signature", "caller", "is_error")


def message_turns(messages: Any, system: Any) -> tuple[ChatTurn, ...]:
    """The turns of a body's `system` and `messages`. Raises `Refused`."""
    if messages is None:
        raise BadField("messages", "is missing", "missing_required_parameter")
    entries = typed(messages, list, "messages")
    if not 1 <= len(entries) <= MAX_MESSAGES:
        raise BadField("messages", f"must have 1 to {MAX_MESSAGES} entries", "invalid_value")
    instructions = "" if system is None else _texts(system, "system")
    turns = [ChatTurn("system", instructions)] if instructions else []
    for index, entry in enumerate(entries):
        turns += _turns(entry, f"messages[{index}]")
    return tuple(turns)


def _turns(message: Any, path: str) -> list[ChatTurn]:
    fields = Fields(typed(message, dict, path), path)
    role, content, at = fields.text("role"), fields.pop("content"), fields.path("content")
    if role not in ("user", "assistant"):
        raise BadField(fields.path("role"), "must be user or assistant", "invalid_value")
    fields.end()
    if isinstance(content, str):
        return [ChatTurn(role, content)]
    blocks = bounded(typed(content, list, at), MAX_MESSAGES, at)
    read = _AssistantBlocks() if role == "assistant" else _UserBlocks()
    for index, block in enumerate(blocks):
        read.add(block, f"{at}[{index}]")
    return read.turns()


class _Blocks:
    """The blocks of one message; `kinds` are those that its role has."""

    def __init__(self, kinds: Mapping[str, Callable[[Fields], None]]) -> None:
        self._kinds = {"text": self._text, **kinds}
        self.texts: list[str] = []

    def add(self, block: Any, path: str) -> None:
        fields = Fields(typed(block, dict, path), path)
        kind = fields.text("type")
        if kind not in self._kinds:
            problem = f"must be {', '.join(self._kinds)}: this server reads no images or files"
            raise BadField(fields.path("type"), problem, "invalid_value")
        self._kinds[kind](fields)
        fields.ignore(_IGNORED)
        fields.end()

    def _text(self, fields: Fields) -> None:
        self.texts.append(fields.text("text"))


class _UserBlocks(_Blocks):
    """What a user says, and what tools returned, which comes first."""

    def __init__(self) -> None:
        super().__init__({"tool_result": self._result})
        self._results: list[ChatTurn] = []

    def _result(self, fields: Fields) -> None:
        content = fields.pop("content", "")
        text = _texts(content, fields.path("content"))
        self._results.append(ChatTurn("tool", text, tool_call_id=fields.text("tool_use_id")))

    def turns(self) -> list[ChatTurn]:
        texts = [ChatTurn("user", "\n".join(self.texts))] if self.texts or not self._results else []
        return [*self._results, *texts]


class _AssistantBlocks(_Blocks):
    """Reasoning, text and calls of the assistant."""

    def __init__(self) -> None:
        super().__init__({"tool_use": self._use, "thinking": self._thinking, "redacted_thinking": self._redacted})
        self._calls: list[ToolCall] = []
        self._thoughts: list[str] = []

    def _use(self, fields: Fields) -> None:
        arguments = json_bytes(typed(fields.pop("input", {}), dict, fields.path("input")), fields.path("input"))
        self._calls.append(ToolCall(fields.text("id"), fields.text("name"), arguments.decode()))

    def _thinking(self, fields: Fields) -> None:
        self._thoughts.append(fields.text("thinking"))

    def _redacted(self, fields: Fields) -> None:
        # Another server's, which nobody else can read.
        fields.ignore(("data",))

    def turns(self) -> list[ChatTurn]:
        thoughts = "\n".join(self._thoughts)
        return [ChatTurn("assistant", "\n".join(self.texts), tuple(self._calls), reasoning=thoughts)]


def _texts(content: Any, path: str) -> str:
    """A string, or blocks of text, which stand on lines of their own."""
    if isinstance(content, str):
        return content
    blocks = _Blocks({})
    for index, block in enumerate(bounded(typed(content, list, path), MAX_MESSAGES, path)):
        blocks.add(block, f"{path}[{index}]")
    return "\n".join(blocks.texts)
