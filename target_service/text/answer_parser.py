"""Tells the text of an answer, as it comes, from the model's reasoning and its tool calls."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from outrider.answer_parts import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from target_service.text.answer_format import CALLS, CONTENT, REASONING, AnswerFormat

# Characters before a place that a pattern there may look at, at most. Chosen: the longest looks back over a call.
_LOOKED_BACK = 65536


class AnswerParser:
    """The parts of one answer. However the text is cut into pieces, the parts add up to the same answer."""

    def __init__(
        self,
        answer_format: AnswerFormat,
        prompt_end: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        single: bool = False,
    ) -> None:
        """`prompt_end` is the end of the prompt, special tokens included, where templates begin the answer. Values that
        the model writes as plain text are cast by the schemas of `tools`. Of `single` answers only the first call is
        kept."""
        self.answer_format = answer_format
        self._single = single
        template = load_response_template(dict(answer_format.response_template))
        # Without a beginning in sight none of it is the answer's.
        begun = prompt_end if template.start_anchor_re.search(prompt_end) else ""
        self._parser = _Regions(template, prefix=begun, tools=[dict(tool) for tool in tools])
        # Calls so far, and whether the last one is open with its name known.
        self._calls = 0
        self._streams = False
        # Spaces behind a call, which are content only with something behind them.
        self._held = ""

    @property
    def reasons(self) -> bool:
        """Whether the answer goes on inside the model's reasoning."""
        return self._parser.current in REASONING

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that are certain with the next piece of text."""
        return self._parts(self._parser.feed(text)) if text else []

    def finish(self) -> list[AnswerPart]:
        """The parts still held back, at the end of the answer."""
        return self._parts(self._parser.ended())

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[AnswerPart]:
        parts = [part for event in events for part in self._parts_of(event)]
        if not self._single:
            return parts
        return [part for part in parts if not isinstance(part, ToolCallPart) or not part.index]

    def _parts_of(self, event: Mapping[str, Any]) -> list[AnswerPart]:
        kind, field = event["type"], event["field"]
        if field == CALLS:
            return self._call_parts(kind, event)
        if kind != "region_chunk":
            return []
        if field in REASONING:
            return [ReasoningPart(event["text"])]
        return self._content(event["text"]) if field == CONTENT else []

    def _content(self, text: str) -> list[AnswerPart]:
        self._held += text
        if self._calls and not self._held.strip():
            return []
        text, self._held = self._held, ""
        return [ContentPart(text)]

    def _call_parts(self, kind: str, event: Mapping[str, Any]) -> list[AnswerPart]:
        if kind == "region_open":
            self._held = ""
            name = event.get("name")
            self._streams = name is not None
            return [] if name is None else [self._first_piece(name, "")]
        if kind == "region_chunk":
            return [ToolCallPart(self._calls - 1, arguments=event["text"])] if self._streams else []
        if kind == "region_broken":
            # What cannot be read as a call is what the model wrote.
            return self._content(event["text"])
        if self._streams:
            return []
        return [self._first_piece(*_name_and_arguments(call)) for call in _calls_of(event["value"])]

    def _first_piece(self, name: str, arguments: str) -> ToolCallPart:
        length = self.answer_format.call_id_length
        # As OpenAI's: that many are never drawn twice.
        letters = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length or 24))
        self._calls += 1
        return ToolCallPart(self._calls - 1, letters if length else f"call_{letters}", name, arguments)


class _Regions(ResponseParser):  # type: ignore[misc]
    """transformers' parser, which also reports a call's name when it opens, and goes on behind a region that cannot be
    read as what it should be. It has no other place for either than these methods."""

    _buffer: str
    _pos: int

    @property
    def current(self) -> str | None:
        return self._current if self._opened else None

    def feed(self, text: str) -> list[dict[str, Any]]:
        """As transformers', which keeps all of the answer and copies it with every piece: what was told apart is
        forgotten here."""
        events: list[dict[str, Any]] = super().feed(text)
        if self._pos > 2 * _LOOKED_BACK:
            # Something stays in front, so that nothing stands at the answer's beginning again.
            self._buffer, self._pos = self._buffer[self._pos - _LOOKED_BACK :], _LOOKED_BACK
        field = self._spec.fields.get(self._current)
        if field is not None and field.name != CALLS and field.content == "text":
            # It was all told; of a call the whole is read at its end.
            self._body = ""
        return events

    def ended(self) -> list[dict[str, Any]]:
        """The events at the end. `finalize` would also refuse an answer that lacks a field."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        # Arguments that are taken as they stand are streamed.
        if field.name == CALLS and field.content == "text":
            events[-1]["name"] = self._captures.get("name")

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body = self._current, self._body
        # Of parsed arguments: what a region that is no call raises, of whatever kind its parser is.
        try:
            super()._close_current(events)
            if events and events[-1]["type"] == "region_close" and field == CALLS:
                _check_calls(events[-1]["value"])
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            if events and events[-1]["type"] == "region_close":
                events.pop()
            events.append({"type": "region_broken", "field": field, "text": body})
            self._reset_to_implicit()


def _check_calls(value: Any) -> None:
    """Raise `ValueError` for what is no call, or no list of calls."""
    for call in _calls_of(value):
        name, _ = _name_and_arguments(call)
        if not name:
            raise ValueError("a call has no name")


def _calls_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name_and_arguments(call: Any) -> tuple[str, str]:
    """Of a call in the form that chat templates take."""
    function = call["function"]
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str):
        raise TypeError("a call's name is no text")
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
