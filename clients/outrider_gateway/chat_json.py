"""The parts of a chat answer in OpenAI's form, whole and in pieces."""

from __future__ import annotations

from typing import Any

from outrider_client.answers import AnswerPart, ContentPart, ReasoningPart
from outrider_client.results import Result


def chat_delta(part: AnswerPart) -> dict[str, Any]:
    """What an event of a stream adds to the message."""
    if isinstance(part, ContentPart):
        return {"content": part.text}
    if isinstance(part, ReasoningPart):
        return _reasoning(part.text)
    called: dict[str, Any] = {"index": part.index}
    function = {"arguments": part.arguments}
    if part.name:
        called |= {"id": part.id, "type": "function"}
        function = {"name": part.name, **function}
    return {"tool_calls": [{**called, "function": function}]}


def chat_message(result: Result, *, shows_reasoning: bool) -> dict[str, Any]:
    """The message of a whole answer. It has calls and reasoning where there are any, and no content where there is
    nothing but calls."""
    content = result.text if result.text or not result.tool_calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if result.reasoning and shows_reasoning:
        message |= _reasoning(result.reasoning)
    if result.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in result.tool_calls
        ]
    return message


def _reasoning(text: str) -> dict[str, str]:
    """By DeepSeek's name, which most clients read, and by vLLM's."""
    return {"reasoning_content": text, "reasoning": text}
