"""The answer to /v1/responses: items, whole or as numbered events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from outrider.sampling import FinishReason
from outrider_client.answers import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from outrider_client.results import Chunk, Result, Started
from outrider_gateway.failures import Refused
from outrider_gateway.http import TEXT, framed_text, named_event
from outrider_gateway.response_json import hidden_tokens
from outrider_gateway.responses_request import ResponsesRequest
from outrider_gateway.token_texts import TokenTexts

Json = dict[str, Any]


class OutputItems:
    """The items of one response, from the parts of its answer. Each method returns the events of what it did, by type,
    without their numbers."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        # The last one while it may grow, and the pieces of its text or arguments.
        self._open: Json | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []
        self._call = -1
        # Of a message that may grow, what stands around the text in an event of text alone, up to its number.
        self.text_frame: tuple[bytes, bytes] | None = None

    def framed(self, text: str) -> bytes:
        """The event of text alone that goes on with the open message, up to its number."""
        assert self.text_frame is not None
        self._pieces.append(text)
        before, after = self.text_frame
        return before + orjson.dumps(text) + after

    def add(self, part: AnswerPart, logprobs: Sequence[Any] = ()) -> list[Json]:
        """Add a part; `logprobs` are those of its tokens."""
        if isinstance(part, ToolCallPart):
            return self._add_call(part)
        reasoning = isinstance(part, ReasoningPart)
        kind = "reasoning" if reasoning else "message"
        events = [] if self._open is not None and self._open["type"] == kind else [*self.end_item(), *self._begin(kind)]
        if part.text:
            self._pieces.append(part.text)
            self._logprobs += logprobs
            delta = {"content_index": 0, "delta": part.text}
            if reasoning:
                events.append(self._event("response.reasoning_text.delta", **delta))
            else:
                events.append(self._event("response.output_text.delta", **delta, logprobs=list(logprobs)))
        return events

    def end_item(self, status: str = "completed", logprobs: Sequence[Any] = ()) -> list[Json]:
        """End the last item; `logprobs` are those of its last tokens, which brought no text."""
        item = self._open
        if item is None:
            return []
        self._logprobs += logprobs
        text = "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
            events = [done]
        else:
            (part,) = item["content"] = [_content_part(item["type"], text, self._logprobs)]
            if item["type"] == "message":
                done = self._event(
                    "response.output_text.done", content_index=0, text=text, logprobs=list(self._logprobs)
                )
            else:
                done = self._event("response.reasoning_text.done", content_index=0, text=text)
            events = [done, self._event("response.content_part.done", content_index=0, part=part)]
        ended = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}
        self._open, self._pieces, self._logprobs, self.text_frame = None, [], [], None
        return [*events, ended]

    def _add_call(self, part: ToolCallPart) -> list[Json]:
        events: list[Json] = []
        if part.index != self._call:
            events += self.end_item()
            self._call = part.index
            call = {"type": "function_call", "id": _identifier("fc"), "call_id": part.id, "name": part.name}
            events += self._append({**call, "arguments": "", "status": "in_progress"})
        if part.arguments:
            self._pieces.append(part.arguments)
            events.append(self._event("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def _begin(self, kind: str) -> list[Json]:
        if kind == "message":
            item: Json = {"type": kind, "id": _identifier("msg"), "status": "in_progress", "role": "assistant"}
        else:
            item = {"type": kind, "id": _identifier("rs"), "summary": [], "encrypted_content": None}
        events = self._append({**item, "content": []})
        part = _content_part(kind, "", ())
        if kind == "message":
            delta = self._event("response.output_text.delta", content_index=0, delta=TEXT, logprobs=[])
            before, after = framed_text(named_event(delta["type"], delta))
            # Behind the last of its fields comes the number.
            self.text_frame = before, after.removesuffix(b"}\n\n") + b',"sequence_number":'
        return [*events, self._event("response.content_part.added", content_index=0, part=part)]

    def _append(self, item: Json) -> list[Json]:
        self.items.append(item)
        self._open = item
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}]

    def _event(self, kind: str, **values: Any) -> Json:
        assert self._open is not None, "an event is of an item"
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items) - 1, **values}


class ResponsesBuilder:
    """Makes the response to one request, and its events, from chunks and the result in order."""

    # What ends a stream behind its last event.
    end = b"data: [DONE]\n\n"

    def __init__(self, request: ResponsesRequest, model: str, texts: TokenTexts, end_token_ids: Sequence[int]) -> None:
        """Arguments as of `ResponseBuilder`."""
        self._request, self._texts, self._model = request, texts, model
        self._hidden = hidden_tokens(request, end_token_ids)
        self.response_id = _identifier("resp")
        self._created = int(time.time())
        self._items = OutputItems()
        self._number = 0
        # Log-probabilities of tokens that brought no text yet.
        self._listed: list[Any] = []
        # Tokens before the first part that is no reasoning, where there is reasoning.
        self._reasoning_tokens = 0
        # The response, once it is complete.
        self.complete: Json | None = None

    def started(self, _index: int, started: Started) -> None:
        """Note what a target accepted."""
        self._model = self._model or started.model

    def chunk(self, _index: int, chunk: Chunk) -> bytes:
        """The events of a chunk."""
        if self._items.text_frame is not None and len(chunk.parts) == 1 and not self._request.logprobs:
            part = chunk.parts[0]
            if isinstance(part, ContentPart) and part.text:
                # The common case, of which nothing but the text and the number change from event to event.
                number, self._number = self._number, self._number + 1
                return b"%b%d}\n\n" % (self._items.framed(part.text), number)
        return self._opening() + self._numbered(self._add(chunk))

    async def keep(self, _index: int, chunk: Chunk) -> None:
        """Note a chunk of a response that is sent whole."""
        self._add(chunk)

    def last(self, _index: int, result: Result) -> bytes:
        """The events that end the response."""
        opening, closing = self._opening(), self._close(result)
        kind = "response.completed" if self._status(result) == "completed" else "response.incomplete"
        self.complete = self._response(self._status(result), result)
        return opening + self._numbered([*closing, {"type": kind, "response": self.complete}])

    def usage_event(self, _results: Sequence[Result]) -> bytes:
        """Nothing: the last event has the usage."""
        return b""

    def whole(self, results: Sequence[Result]) -> Json:
        """The response that is not streamed."""
        (result,) = results
        self._close(result)
        self.complete = self._response(self._status(result), result)
        return self.complete

    def failure(self, refused: Refused) -> bytes:
        """The event of an error behind the first."""
        error = refused.body()["error"]
        described = {"code": error["code"], "message": error["message"], "param": error["param"]}
        # The inner object is what OpenAI's Python package looks for.
        return self._numbered([{"type": "error", **described, "error": error}])

    def _add(self, chunk: Chunk) -> list[Json]:
        if self._request.logprobs:
            self._listed += self._texts.chat(chunk, self._hidden)
        events: list[Json] = []
        for part in chunk.parts:
            # Which of the tokens are whose is not known: the first text has them all.
            if isinstance(part, ContentPart):
                events += self._items.add(part, self._listed)
                self._listed = []
            else:
                events += self._items.add(part)
        if chunk.parts:
            # Those of a chunk without parts are of text that is still to come.
            self._listed = []
        if all(item["type"] == "reasoning" for item in self._items.items) and self._items.items:
            self._reasoning_tokens += len(chunk.token_ids)
        return events

    def _close(self, result: Result) -> list[Json]:
        status = self._status(result)
        # A response has an item, also where the output is empty.
        begun = [] if self._items.items else self._items.add(ContentPart(""))
        return [*begun, *self._items.end_item(status, self._listed)]

    def _status(self, result: Result) -> str:
        return "incomplete" if result.finish_reason is FinishReason.LENGTH else "completed"

    def _opening(self) -> bytes:
        if self._number:
            return b""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": response} for kind in kinds])

    def _numbered(self, events: Sequence[Json]) -> bytes:
        written = []
        for event in events:
            written.append(named_event(event["type"], {**event, "sequence_number": self._number}))
            self._number += 1
        return b"".join(written)

    def _response(self, status: str, result: Result | None = None) -> Json:
        cut = status == "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._model,
            "previous_response_id": self._request.previous or None,
            "output": self._items.items if result is not None else [],
            "usage": None if result is None else self._usage(result),
            **self._request.shown,
        }

    def _usage(self, result: Result) -> Mapping[str, Any]:
        usage: Json = {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": result.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": result.prompt_tokens + result.completion_tokens,
        }
        return usage


def _content_part(kind: str, text: str, logprobs: Sequence[Any]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _identifier(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
