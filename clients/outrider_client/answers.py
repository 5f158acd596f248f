"""A chat answer told apart: text, reasoning and tool calls, in the pieces in which they come, and as a whole.

Every interface that shows answers is built on these values: a chunk has parts, and `Answer` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.answer_parts import AnswerPart, ContentPart, ReasoningPart, ToolCall, ToolCallPart
from outrider.v1 import target_pb2

__all__ = ["Answer", "AnswerPart", "ContentPart", "ReasoningPart", "ToolCall", "ToolCallPart", "part_from_pb"]


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
