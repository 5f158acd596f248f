"""Answers in OpenAI's form, whole or in chunks, for both endpoints."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

import outrider
from outrider.sampling import FinishReason
from outrider_client.answers import AnswerPart, ContentPart, ReasoningPart
from outrider_client.results import Chunk, Result, Started
from outrider_client.terminal.painting import Painter
from outrider_gateway.failures import Refused
from outrider_gateway.generation_request import GenerationRequest
from outrider_gateway.http import TEXT, event_bytes, framed_text
from outrider_gateway.token_texts import PromptEcho, TokenTexts, merged


class ResponseBuilder:
    """Makes the JSON of one request's answers, from chunks and results in the order in which they come."""

    # What ends a stream behind its last event.
    end = b"data: [DONE]\n\n"

    def __init__(self, request: GenerationRequest, model: str, texts: TokenTexts, end_token_ids: Sequence[int]) -> None:
        """`model` is empty where it is not known yet. `end_token_ids` end answers, and are no part of their text."""
        self._request = request
        self._texts = texts
        self._hidden = hidden_tokens(request, end_token_ids)
        chat_kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._head = {
            "id": ("chatcmpl-" if request.chat else "cmpl-") + uuid.uuid4().hex,
            "object": chat_kind if request.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"outrider-{outrider.__version__}",
        }
        # Whether events have nothing but parts of answers.
        self._plain = not (request.drafts or request.logprobs or request.continuous_usage)
        self._pieces = [Painter() if request.drafts else None for _ in range(request.answers)]
        self._offsets = [0] * request.answers
        self._begun = [False] * request.answers
        self._frames: list[tuple[bytes, bytes] | None] = [None] * request.answers
        self._listed: list[list[Any]] = [[] for _ in range(request.answers)]
        self._prompts = [PromptEcho(texts, request.prompt(index).text) for index in range(request.answers)]
        # Of each answer, the sum of its tokens' log-probabilities, where answers are ranked.
        self._likelihood = [0.0] * request.answers
        # Tokens of each prompt and of each answer, as far as they are known.
        self._prompt_tokens = [0] * len(request.prompts)
        self._completion_tokens = [0] * request.answers

    def started(self, index: int, started: Started) -> None:
        """Note what a target accepted. It names the model where no name was known when the request came."""
        self._head["model"] = self._head["model"] or started.model
        self._prompt_tokens[index // self._request.choices] = started.prompt_tokens

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """The events of a chunk; empty for one without text or anything else that was asked for."""
        parts: Sequence[AnswerPart] = chunk.parts
        if self._plain and self._frames[index] is not None and len(parts) == 1 and isinstance(parts[0], ContentPart):
            # The common case behind the first: nothing but the text changes from event to event.
            return self._part_event(index, parts[0])
        pieces = self._pieces[index]
        if self._prompts[index].add(chunk) or self._request.prompt_only:
            return b""
        self._completion_tokens[index] += len(chunk.token_ids)
        if not self._request.shows_reasoning:
            parts = [part for part in parts if not isinstance(part, ReasoningPart)]
        if self._plain:
            if not parts:
                return b""
            return self._opening(index) + b"".join([self._part_event(index, part) for part in parts])
        listed = self._list(index, chunk)
        if not parts and not listed and pieces is None:
            return b""
        first, *others = [self._part(index, self._delta(part)) for part in parts or (ContentPart(""),)]
        # The entries for the whole chunk.
        first["choices"][0]["logprobs"] = listed
        if pieces is not None:
            first["outrider"] = self._drafting(chunk, pieces)
        return self._opening(index) + b"".join(map(event_bytes, (first, *others)))

    def last(self, index: int, result: Result) -> bytes:
        """The events that end an answer."""
        text: dict[str, Any] = {"delta": {}} if self._request.chat else {"text": ""}
        event = self._part(index, text, finish=self._reason(result))
        if self._request.drafts:
            event["outrider"] = {"index": index, "totals": totals(result)}
        return self._opening(index) + event_bytes(event)

    def usage_event(self, results: Sequence[Result]) -> bytes:
        """The event with the usage of the whole request, which has no choice."""
        return event_bytes(self._event([]) | {"usage": self._usage(results)})

    def _opening(self, index: int) -> bytes:
        """Before all else of a chat answer its role and no text, as OpenAI does: its npm package counts tokens of the
        first event twice. Before a completion its prompt, where that is echoed."""
        if self._begun[index] or not (self._request.chat or self._request.echo):
            return b""
        self._begun[index] = True
        if self._request.echo:
            prompt = self._prompts[index]
            return event_bytes(
                self._part(index, {"text": prompt.text}, prompt.lists() if self._request.logprobs else None)
            )
        return event_bytes(self._part(index, {"delta": {"role": "assistant", "content": ""}}))

    def _part_event(self, index: int, part: AnswerPart) -> bytes:
        if not isinstance(part, ContentPart):
            return event_bytes(self._part(index, self._delta(part)))
        before, after = self._frames[index] or self._frame(index)
        return before + orjson.dumps(part.text) + after

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text in an event of text alone."""
        # What follows the text is of our own making, and holds no other.
        event = self._part(index, self._delta(ContentPart(TEXT)))
        self._frames[index] = frame = framed_text(event_bytes(event))
        return frame

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        """What an event adds to an answer. A completion is text alone."""
        if self._request.chat:
            return {"delta": chat_delta(part)}
        return {"text": part.text if isinstance(part, ContentPart) else ""}

    def failure(self, refused: Refused) -> bytes:
        """The event of an error behind the first."""
        return event_bytes(refused.body())

    async def keep(self, index: int, chunk: Chunk) -> None:
        """Note a chunk of an answer that is sent whole."""
        if self._prompts[index].add(chunk) or self._request.prompt_only:
            return
        self._likelihood[index] += sum([entry.logprob for entry in chunk.logprobs])
        listed = self._list(index, chunk)
        if listed is not None:
            self._listed[index].append(listed)

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self._choice(place, index, results[index]) for place, index in enumerate(self._returned(results))]
        answer: dict[str, Any] = {**self._head, "choices": choices, "usage": self._usage(results)}
        if self._request.drafts:
            answer["outrider"] = {"totals": [totals(result) for result in results]}
        if self._request.chat and self._lists_prompts:
            answer["prompt_logprobs"] = self._prompts[0].by_id()
        return answer

    def _returned(self, results: Sequence[Result]) -> list[int]:
        """The indices of the answers that are returned: the likeliest of each prompt by the mean of their tokens'
        log-probabilities, or all."""
        made, returned = self._request.choices, self._request.returned_choices
        if not returned:
            return list(range(len(results)))
        means = [sum_ / max(1, one.completion_tokens) for sum_, one in zip(self._likelihood, results, strict=True)]
        groups = (range(first, first + made) for first in range(0, len(results), made))
        return [index for group in groups for index in sorted(group, key=lambda one: -means[one])[:returned]]

    @property
    def _lists_prompts(self) -> bool:
        """Whether answers have vLLM's list of the prompt's tokens."""
        return self._request.sampling.prompt_logprobs is not None and not self._request.echo

    def _choice(self, place: int, index: int, result: Result) -> dict[str, Any]:
        """The answer of an index as the choice at a place."""
        if not self._request.chat:
            return self._completion_choice(place, index, result)
        parts, listed = self._listed[index], None
        if self._request.logprobs:
            listed = {"content": [entry for part in parts for entry in part["content"]], "refusal": None}
        message = chat_message(result, shows_reasoning=self._request.shows_reasoning)
        return {"index": place, "message": message, "logprobs": listed, "finish_reason": self._reason(result)}

    def _completion_choice(self, place: int, index: int, result: Result) -> dict[str, Any]:
        text, parts, prompt = result.text, self._listed[index], self._prompts[index]
        if self._request.echo:
            text = prompt.text + ("" if self._request.prompt_only else text)
            if self._request.logprobs:
                parts = [prompt.lists(), *parts]
        listed = merged(parts) if self._request.logprobs else None
        choice = {"index": place, "text": text, "logprobs": listed, "finish_reason": self._reason(result)}
        return {**choice, "prompt_logprobs": prompt.by_id()} if self._lists_prompts else choice

    def _reason(self, result: Result) -> str | None:
        # The one token that a target makes behind a prompt alone may end an answer, and is not sent.
        return "length" if self._request.prompt_only else _finish(result)

    def _list(self, index: int, chunk: Chunk) -> Any:
        """The chunk's tokens with their probabilities; None where they were not asked for."""
        if not self._request.logprobs:
            return None
        if self._request.chat:
            return {"content": self._texts.chat(chunk, self._hidden), "refusal": None}
        offset = self._offsets[index] or (len(self._prompts[index].text) if self._request.echo else 0)
        self._offsets[index] = offset + len(chunk.text)
        return self._texts.completion(chunk, self._hidden, offset)

    def _drafting(self, chunk: Chunk, pieces: Painter) -> dict[str, Any]:
        drafting: dict[str, Any] = {
            "step": chunk.step,
            "tokens": len(chunk.token_ids),
            "accepted_by_step": list(chunk.drafts_by_step or (chunk.drafted_tokens,)),
            "pieces": [{"text": text, "drafted": drafted} for text, drafted in pieces.parts(chunk)],
        }
        if chunk.tree is not None:
            drafting["tree"] = self._texts.tree(chunk, chunk.tree)
        return drafting

    def _part(self, index: int, text: dict[str, Any], listed: Any = None, finish: str | None = None) -> dict[str, Any]:
        """An event with a part of one answer."""
        return self._event([{"index": index, **text, "logprobs": listed, "finish_reason": finish}])

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "choices": choices}
        if self._request.include_usage:
            event["usage"] = self._usage_so_far() if self._request.continuous_usage else None
        return event

    def _usage_so_far(self) -> dict[str, int]:
        prompt, completion = sum(self._prompt_tokens), sum(self._completion_tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        """Tokens of all answers; those of a prompt count once, however many answers it has."""
        prompt = sum(result.prompt_tokens for result in results[:: self._request.choices])
        completion = 0 if self._request.prompt_only else sum(result.completion_tokens for result in results)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage["total_tokens"] = prompt + completion
        cached = sum(result.cached_tokens for result in results[:: self._request.choices])
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self._request.prediction is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(result.accepted_prediction_tokens for result in results),
                "rejected_prediction_tokens": sum(result.rejected_prediction_tokens for result in results),
            }
        if any(result.lossy for result in results):
            # Our own mark of answers that need not be the model's own.
            usage["outrider"] = {"lossy_tokens": sum(result.lossy_tokens for result in results)}
        return usage


def hidden_tokens(request: GenerationRequest, end_token_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that are listed nowhere, since they have no text."""
    if request.echo:
        # Clients count the answer's from the end.
        return frozenset()
    ends = () if request.sampling.ignore_eos else end_token_ids
    return frozenset((*ends, *request.sampling.stop_token_ids))


def totals(result: Result) -> dict[str, Any]:
    """What drafting did for one answer: our own addition, for those who ask."""
    drafting = result.speculation
    decode = result.times.decode
    return {
        "steps": drafting.steps,
        "drafted_tokens": drafting.drafted_tokens,
        "accepted_tokens": drafting.accepted_tokens,
        "fallback_steps": drafting.fallback_steps,
        "draft_refused": result.draft_refused or None,
        "mean_accepted_length": round(result.mean_accepted_length, 3),
        "completion_tokens": result.completion_tokens,
        # The first token is the prompt's: the rest take the time of decoding.
        "tokens_per_second": round((result.completion_tokens - 1) / decode, 2) if decode else None,
        "queue_ms": round(result.times.queue * 1e3, 3),
        "prefill_ms": round(result.times.prefill * 1e3, 3),
        "decode_ms": round(decode * 1e3, 3),
    }


def _finish(result: Result) -> str | None:
    if result.finish_reason is None:
        return None
    if result.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if result.tool_calls else "stop"


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
