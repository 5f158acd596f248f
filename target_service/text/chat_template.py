"""A model's chat template, rendered as its authors expect: with what transformers gives templates, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks the end of a message that is to be continued; digits have no case, and are no spaces.
_END_MARK = "\ufdef7340561928\ufdef"
# What templates get from here, or from transformers' own functions, beside the special tokens.
GIVEN = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now", "chat_template", "conversation", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
))  # fmt: skip

Turn = Mapping[str, Any]


class TemplateFailed(Exception):
    """The template does not take a conversation, or is none; the message has its reason, and nothing of the turns."""


class NotContinued(TemplateFailed):
    """The template does not show the last message as it is, so that it cannot be continued."""


class Ending(Enum):
    """How a conversation ends: with the beginning of the assistant's answer, inside of its last message, or with it."""

    ANSWER = "answer"
    CONTINUED = "continued"
    CLOSED = "closed"


class RenderedTooLong(Exception):
    """The template writes more than it may."""


class ChatTemplate:
    """A compiled template. Rendering may take any time and memory, and so may compiling, which computes what is
    constant: the caller bounds both."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are texts by the names that templates know, such as "bos_token". Raises `TemplateFailed` for
        a source that is no template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise TemplateFailed(f"the model's chat template cannot be compiled: {_line(error)}") from None

    def render(
        self,
        turns: Sequence[Turn],
        *,
        now: datetime,
        most: int = 1 << 30,
        ending: Ending = Ending.ANSWER,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation. `now` is the time that templates write, `arguments` are what the caller gives to it by
        name, and `tools` what the answer may call. Raises `TemplateFailed`, `NotContinued`, and `RenderedTooLong` for
        more than `most` characters."""
        messages = [dict(turn) for turn in turns]
        if ending is Ending.CONTINUED:
            messages[-1]["content"] = f"{messages[-1]['content']}{_END_MARK} "
        values = {
            **(arguments or {}),
            "messages": messages,
            "add_generation_prompt": ending is Ending.ANSWER,
            # None, as transformers has it: templates ask `if tools` and `is not none`.
            "tools": list(tools) or None,
            "documents": None,
            "strftime_now": now.strftime,
            **self._special_tokens,
        }
        try:
            text = self._generated(values, most)
        except (RenderedTooLong, MemoryError):
            raise
        # Templates raise what their code raises: of Jinja, of Python, and of their own.
        except Exception as error:
            reason = self._reason(error, [*turns, *tools])
            raise TemplateFailed(f"the model's chat template does not take these turns{reason}") from None
        return _open_end(text, str(turns[-1]["content"])) if ending is Ending.CONTINUED else text

    def _generated(self, values: Mapping[str, Any], most: int) -> str:
        parts, length = [], 0
        for part in self._template.generate(values):
            parts.append(part)
            length += len(part)
            if length > most:
                raise RenderedTooLong
        return "".join(parts)

    def _reason(self, error: Exception, turns: Sequence[Turn]) -> str:
        """The template's own message; empty where that quotes the turns or tools, since errors are logged."""
        reason = _line(error)
        said = " ".join(str(value) for turn in turns for name, value in turn.items() if name != "role")
        # Shorter words show nothing of the turns that they may come from.
        words = (word for word in reason.split() if len(word) >= 4)
        if not reason or any(word in said and word not in self.source for word in words):
            return ""
        return f": {reason}"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text, for training; here it is written as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As transformers: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _open_end(text: str, last: str) -> str:
    """The text up to the end of its last message. Where the template trims that one, so is its end here."""
    if (at := text.rfind(_END_MARK)) < 0 or not text[:at].rstrip().endswith(last.strip()):
        raise NotContinued("the model's chat template does not show the last message as it is")
    # A space stood behind the mark: without it the template trims the message.
    trims = not text.startswith(" ", at + len(_END_MARK))
    return text[:at].rstrip() if trims else text[:at]


def _line(error: Exception) -> str:
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    # Most characters of a template's own reason that are passed on.
    return " ".join(str(text).split())[:200]
