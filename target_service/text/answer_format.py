"""How a model marks its reasoning and its tool calls: found by its chat template, and described by data.

An answer is split into parts by transformers' response templates: by the one that a tokenizer's settings carry
(`response_template`), else by one of `answer_formats/`, chosen by what the chat template writes.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

# Names of fields in response templates, and what their regions are.
CONTENT, CALLS, REASONING = "content", "tool_calls", ("thinking", "reasoning", "reasoning_content")
# The form of calls that are explained to a model whose template knows none, and that every model can be held to.
DEFAULT = "hermes"
# Reasoning is marked like this where a format has no other mark. Spaces around it are neither's.
_THINKING = {"open_pattern": r"<think>\n?", "close_pattern": r"\s*</think>\s*"}
# Written by chat templates where the assistant's turn begins; what follows is the beginning of the answer.
_TURN_BEGINS = (
    *("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start|>assistant", "[/INST]"),
    *(
        "<|assistant|>",
        "<\uff5cAssistant\uff5c>",
        "<start_of_turn>model\n",
        "<|turn>model\n",
        "<|im_assistant|>assistant",
    ),
    *("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|start_of_role|>assistant<|end_of_role|>", "[/TOOL_RESULTS]"),
)
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True)
class CallText:
    """The text of tool calls, for answers that are held to them: `begin`, then `text` for each call, of which
    `separator` stands between two, and `end`. In `text`, `$name` is the tool's name as JSON, `$bare_name` as it stands,
    `$index` the call's place and `$arguments` the JSON of its arguments. With an `argument` that is such a text for
    each argument instead, in which `$key` is its name and `$value` its JSON, or of a string the string as it stands.
    `single` formats have one call an answer. All of it begins with `trigger`, and an answer that has it calls tools;
    with `only_first` one that begins with it."""

    text: str
    trigger: str
    argument: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""
    single: bool = False
    only_first: bool = False


@dataclass(frozen=True)
class AnswerFormat:
    """A response template, and how calls are written.

    Attributes:
        response_template: as transformers reads it.
        call: None where no call can be forced in this format.
        call_id_length: letters and digits of a call's id, which some chat templates count; 0 for any.
    """

    response_template: Mapping[str, Any]
    call: CallText | None = None
    call_id_length: int = 0

    @property
    def fields(self) -> Mapping[str, Any]:
        """The template's fields by name."""
        fields: Mapping[str, Any] = self.response_template["fields"]
        return fields

    @property
    def calls(self) -> bool:
        """Whether answers in this format may call tools."""
        return CALLS in self.fields

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The texts that begin and end the model's reasoning; None where it has none, or others."""
        for name in self.fields.keys() & set(REASONING):
            field = self.fields[name]
            # Marks of reasoning that formats look for, as texts.
            for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
                if field.get("open") == begin or re.match(field.get("open_pattern", "(?!)"), begin):
                    return begin, end
        return None

    def without(self, *names: str) -> AnswerFormat | None:
        """The format without some fields; None where nothing but text is left."""
        left = {name: field for name, field in self.fields.items() if name not in names}
        if not left.keys() - {CONTENT}:
            return None
        return replace(self, response_template={**self.response_template, "fields": left})

    def mentions(self, text: str) -> bool:
        """Whether a token's text is one that the format looks for."""
        # Patterns escape what means something in them.
        return text in json.dumps(self.fields, ensure_ascii=False).replace("\\", "")


def answer_format(chat_template: str, response_template: Mapping[str, Any] | None = None) -> AnswerFormat | None:
    """The format of a model's answers; None for one whose answers are text alone, as far as is known.
    `response_template` is that of the model's own tokenizer, which goes before what the chat template shows."""
    shown = (one for one, ways in formats().values() if any(all(mark in chat_template for mark in way) for way in ways))
    found = next(shown, None)
    if response_template is not None:
        call, length = (found.call, found.call_id_length) if found else (None, 0)
        return AnswerFormat(response_template, call, length)
    thinks = "</think>" in chat_template
    if found is None:
        return _template({"thinking": _THINKING}) if thinks else None
    if found.fields.get("thinking") == _field(_THINKING) and not thinks:
        return found.without("thinking")
    return found


def default_format() -> AnswerFormat:
    """The format of calls that every model can be held to."""
    found, _ = formats()[DEFAULT]
    return found


@cache
def formats() -> Mapping[str, tuple[AnswerFormat, list[list[str]]]]:
    """All formats by name, each with the texts by which chat templates show it; narrower ones before wider ones."""
    return dict(sorted(_read(), key=lambda pair: -max(sum(map(len, group)) for group in pair[1][1])))


def _read() -> Iterator[tuple[str, tuple[AnswerFormat, list[list[str]]]]]:
    for file in files(__package__).joinpath("answer_formats").iterdir():
        if file.name.endswith(".toml"):
            data = tomllib.loads(file.read_text(encoding="utf-8"))
            call = CallText(**data["call"]) if "call" in data else None
            made = _template({"thinking": _THINKING, **data["fields"]}, call, data.get("call_id_length", 0))
            yield file.name.removesuffix(".toml"), (made, data["markers"])


def _template(fields: Mapping[str, Any], call: CallText | None = None, call_id_length: int = 0) -> AnswerFormat:
    """A format of fields that name what is theirs alone."""
    made = {name: _field(field) for name, field in {CONTENT: {}, **fields}.items()}
    if CALLS in made:
        made[CALLS] = {"transform": _CALL, **made[CALLS], "repeats": True}
    template = {"start_anchor": list(_TURN_BEGINS), "fields": made}
    return AnswerFormat(template, call, call_id_length)


def _field(field: Mapping[str, Any]) -> dict[str, Any]:
    # A region's text as it stands can be streamed.
    as_it_stands = {"content": "text", "content_args": {"strip": False}}
    return copy.deepcopy({**field} if "content" in field else {**as_it_stands, **field})
