"""The answer to Anthropic's /v1/messages: blocks, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from outrider.sampling import FinishReason
from outrider_client.answers import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from outrider_client.results import Chunk, Result, Started
from outrider_gateway.failures import Refused
from outrider_gateway.generation_request import GenerationRequest
from outrider_gateway.http import TEXT, framed_text, named_event
from outrider_gateway.token_texts import TokenTexts

Json = dict[str, Any]
# By status: Anthropic's types of errors.
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(refused: Refused) -> Json:
    """An error in Anthropic's form."""
    kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


class MessageBuilder:
    """Makes the message of one request, and its events, from chunks and the result in order."""

    # What ends a stream behind its last event.
    end = b""

    def __init__(self, request: GenerationRequest, model: str, texts: TokenTexts, end_token_ids: Sequence[int]) -> None:
        """Arguments as of `ResponseBuilder`."""
        del request, texts, end_token_ids
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._prompt_tokens = 0
        self._begun = False
        self._blocks: list[Json] = []
        # Pieces of the last block while it may grow, and the index of the last call.
        self._pieces: list[str] = []
        self._open, self._call = False, -1
        # Of a block of text that may grow, what stands before and behind the text in an event of text alone.
        self._frame: tuple[bytes, bytes] | None = None

    def started(self, _index: int, started: Started) -> None:
        """Note what a target accepted."""
        self._model, self._prompt_tokens = self._model or started.model, started.prompt_tokens

    def chunk(self, _index: int, chunk: Chunk) -> bytes:
        """The events of a chunk."""
        if self._frame is not None and len(chunk.parts) == 1:
            part = chunk.parts[0]
            if isinstance(part, ContentPart) and part.text:
                # The common case, of which nothing but the text changes from event to event.
                self._pieces.append(part.text)
                before, after = self._frame
                return before + orjson.dumps(part.text) + after
        return self._opening() + _written(self._add(chunk))

    async def keep(self, _index: int, chunk: Chunk) -> None:
        """Note a chunk of a message that is sent whole."""
        self._add(chunk)

    def last(self, _index: int, result: Result) -> bytes:
        """The events that end the message."""
        reason, sequence = _stop(result)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end: list[Json] = [{"type": "message_delta", "delta": delta, "usage": _usage(result)}, {"type": "message_stop"}]
        return self._opening() + _written([*self._close(), *end])

    def usage_event(self, _results: Sequence[Result]) -> bytes:
        """Nothing: the last events have the usage."""
        return b""

    def whole(self, results: Sequence[Result]) -> Json:
        """The message that is not streamed."""
        (result,) = results
        self._close()
        reason, sequence = _stop(result)
        return {**self._message(), "stop_reason": reason, "stop_sequence": sequence, "usage": _usage(result)}

    def failure(self, refused: Refused) -> bytes:
        """The event of an error behind the first."""
        return named_event("error", error_body(refused))

    def _add(self, chunk: Chunk) -> list[Json]:
        return [event for part in chunk.parts for event in self._add_part(part)]

    def _add_part(self, part: AnswerPart) -> list[Json]:
        events: list[Json] = []
        if isinstance(part, ToolCallPart):
            if part.index != self._call:
                self._call = part.index
                events += self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            delta, text = {"type": "input_json_delta", "partial_json": part.arguments}, part.arguments
        elif isinstance(part, ReasoningPart):
            if not self._is_open("thinking"):
                events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
            delta, text = {"type": "thinking_delta", "thinking": part.text}, part.text
        else:
            assert isinstance(part, ContentPart), "there are three kinds of parts"
            if not self._is_open("text"):
                events += self._begin({"type": "text", "text": ""})
            delta, text = {"type": "text_delta", "text": part.text}, part.text
        if text:
            self._pieces.append(text)
            events.append(self._delta(delta))
        return events

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _is_open(self, kind: str) -> bool:
        return self._open and bool(self._blocks[-1]["type"] == kind)

    def _begin(self, block: Json) -> list[Json]:
        ended = self._close()
        self._blocks.append(block)
        self._open = True
        if block["type"] == "text":
            self._frame = framed_text(_written([self._delta({"type": "text_delta", "text": TEXT})]))
        return [
            *ended,
            {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)},
        ]

    def _close(self) -> list[Json]:
        """End the last block."""
        if not self._open:
            return []
        block, text = self._blocks[-1], "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        self._open, self._pieces, self._frame = False, [], None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _opening(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _written([{"type": "message_start", "message": message}])

    def _message(self) -> Json:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": self._blocks,
        }  # fmt: skip


def _stop(result: Result) -> tuple[str, str | None]:
    """Why the message ended, and by which sequence."""
    if result.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if result.stop_string is not None:
        return "stop_sequence", result.stop_string
    return ("tool_use" if result.tool_calls else "end_turn"), None


def _usage(result: Result) -> Mapping[str, int]:
    """As Anthropic counts: what came from a cache stands apart from the other input."""
    return {
        "input_tokens": result.prompt_tokens - result.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": result.cached_tokens,
        "output_tokens": result.completion_tokens,
    }


def _arguments(text: str) -> Json:
    """The object that a call's arguments are. One that the model was free to write, and that is none, is kept as
    text."""
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {"invalid_json": text}
    return found if isinstance(found, dict) else {"invalid_json": text}


def _written(events: Sequence[Json]) -> bytes:
    return b"".join([named_event(event["type"], event) for event in events])
