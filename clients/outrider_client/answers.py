"""A chat answer told apart: text, reasoning and tool calls, in the pieces in which they come, and as a whole.

Every door that shows answers is built on these values: a chunk has parts, and `Answer` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A piece of what the reader is told."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of what the model writes before its answer, or between parts of it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A piece of a tool call. The first piece of each call, and no other, has `id` and `name`; `arguments` is the next
    piece of the call's JSON. `index` counts the calls of an answer from 0."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


AnswerPart = ContentPart | ReasoningPart | ToolCallPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` are JSON; of a call that the model was free to make, what it wrote, which may be
    none."""

    id: str
    name: str
    arguments: str = ""


class Answer:
    """An answer so far, of the parts of its chunks."""

    def __init__(self) -> None:
        # Pieces: a string that grows with every chunk would be copied as often.
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """Add the next parts."""
        for part in parts:
            if isinstance(part, ContentPart):
                self._text.append(part.text)
            elif isinstance(part, ReasoningPart):
                self._reasoning.append(part.text)
            elif part.index == len(self._calls):
                self._calls.append((part.id, part.name, [part.arguments]))
            else:
                self._calls[part.index][2].append(part.arguments)

    @property
    def text(self) -> str:
        """What the reader is told."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """What the model wrote before it; empty where nobody told it apart."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, the last of which may be incomplete."""
        return tuple([ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls])


def part_from_pb(pb: target_pb2.AnswerPart) -> AnswerPart:
    """A part of a message."""
    kind = pb.WhichOneof("part")
    if kind == "tool_call":
        call = pb.tool_call
        return ToolCallPart(call.index, call.id, call.name, call.arguments)
    return ReasoningPart(pb.reasoning) if kind == "reasoning" else ContentPart(pb.text)
