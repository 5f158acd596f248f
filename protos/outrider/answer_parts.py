"""The parts of a chat answer: pieces of text, of reasoning and of tool calls, in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A piece of what the reader is shown."""

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
